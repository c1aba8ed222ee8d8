// 16 lanes of AVX-512 (F, BW, DQ, VL, VNNI). See vec_portable.hpp for what each operation means.
#pragma once

#include <immintrin.h>

#include "kernels/table.hpp"

namespace segue {
namespace {

struct Vec {
    static constexpr int lanes = 16;
    static constexpr const char* name = "avx512";
    // How many rows the integer kernels take at once; chosen so that all accumulators stay in registers.
    static constexpr int quant_rows = 8;
    static constexpr int float_rows = 6;

    using F = __m512;
    using I = __m512i;
    using W = __m512i;
    using Dot = __m512i;

    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
    static F load(const BFloat16* p) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
    static F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static void store(Half* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static void store_n(float* p, int n, F x) { _mm512_mask_storeu_ps(p, mask(n), x); }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F select_less(F a, F b, F then, F otherwise) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
    }
    static F keep_n(F x, int n, F otherwise) { return _mm512_mask_blend_ps(mask(n), otherwise, x); }
    static F exp2_int(F n) {
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }
    static F swap_pairs(F x) { return _mm512_permute_ps(x, 0xB1); }
    static float reduce_add(F x) {
        const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
        __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
        q = _mm_add_ps(q, _mm_movehl_ps(q, q));
        return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
    }
    static float reduce_max(F x) { return _mm512_reduce_max_ps(x); }

    static I to_int(F x) { return _mm512_cvtps_epi32(x); }
    static I abs_bits(F x) { return _mm512_castps_si512(abs(x)); }
    static I max_int(I a, I b) { return _mm512_max_epi32(a, b); }
    static int32_t reduce_max_int(I x) { return _mm512_reduce_max_epi32(x); }
    static I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
    static int32_t reduce_add_int(I x) { return _mm512_reduce_add_epi32(x); }
    static void store_i8(int8_t* p, I x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }

    static I set1_int(int32_t x) { return _mm512_set1_epi32(x); }
    static I mul_int(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I and_int(I a, I b) { return _mm512_and_si512(a, b); }
    static I or_int(I a, I b) { return _mm512_or_si512(a, b); }
    static I shift_left(I a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
    static I shift_right(I a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
    static F float_of(I x) { return _mm512_cvtepi32_ps(x); }
    static I load_int(const uint32_t* p) { return _mm512_loadu_si512(p); }
    static I load_int(const uint16_t* p) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I load_int(const uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_int(const int8_t* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }

    static W load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static W load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
    template <int from, int to, int mask>
    static W bits(W plane) {
        return _mm512_and_si512(shifted<to - from>(plane), _mm512_set1_epi8(mask));
    }
    template <int from, int to, int mask>
    static W join(W codes, W plane) {
        return _mm512_ternarylogic_epi32(codes, shifted<to - from>(plane), _mm512_set1_epi8(mask),
                                         0xF8);  // a | (b & c)
    }
    static W levels(const int8_t* table) {
        const __m128i levels =
            _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), _mm_set1_epi8(-128));
        return _mm512_broadcast_i32x4(levels);
    }
    static W look_up(W codes, W levels) { return _mm512_shuffle_epi8(levels, codes); }

    template <int bits>
    static Dot begin(int32_t start) {
        return _mm512_set1_epi32(start);
    }
    template <int bits>
    static Dot dot(Dot acc, W w, const int8_t* x) {
        return _mm512_dpbusd_epi32(acc, w, broadcast4(x));
    }
    template <int bits>
    static I end(Dot acc, int32_t) {
        return acc;
    }

   private:
    template <int n>
    static __m512i shifted(__m512i x) {  // bits that come from another byte are masked out by whoever asks
        if constexpr (n > 0) return _mm512_slli_epi16(x, n);
        if constexpr (n < 0) return _mm512_srli_epi16(x, -n);
        return x;
    }
    static __mmask16 mask(int n) { return static_cast<__mmask16>(_bzhi_u32(0xffffu, static_cast<unsigned>(n))); }
    static __m512i broadcast4(const int8_t* x) {
        int32_t four;
        __builtin_memcpy(&four, x, sizeof(four));
        return _mm512_set1_epi32(four);
    }
};

}  // namespace
}  // namespace segue

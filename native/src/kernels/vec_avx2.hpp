// 8 lanes of AVX2 with FMA and F16C; with AVX-VNNI where that is compiled in. See vec_portable.hpp for what each
// operation means. Integer dot products are exact either way, so both give the same bits.
#pragma once

#include <immintrin.h>

#include "kernels/table.hpp"

namespace segue {
namespace {

struct Vec {
    static constexpr int lanes = 8;
#if defined(__AVXVNNI__)
    static constexpr const char* name = "avx2_vnni";
#else
    static constexpr const char* name = "avx2";
#endif
    static constexpr int quant_rows = 4;
    static constexpr int float_rows = 2;

    using F = __m256;
    using I = __m256i;
    using W = __m256i;
#if defined(__AVXVNNI__)
    using W8 = __m256i;  // u8
#else
    struct W8 {
        __m256i w;          // s8
        __m256i magnitude;  // u8, 128 included
    };
#endif
    using Dot = __m256i;

    static F zero() { return _mm256_setzero_ps(); }
    static F set1(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
    static F load(const BFloat16* p) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
    static F load_n(const float* p, int n) { return _mm256_maskload_ps(p, mask(n)); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static void store(Half* p, F x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    static void store_n(float* p, int n, F x) { _mm256_maskstore_ps(p, mask(n), x); }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
    static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F select_less(F a, F b, F then, F otherwise) {
        return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
    }
    static F keep_n(F x, int n, F otherwise) { return _mm256_blendv_ps(otherwise, x, _mm256_castsi256_ps(mask(n))); }
    static F exp2_int(F n) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }
    static F swap_pairs(F x) { return _mm256_permute_ps(x, 0xB1); }
    static float reduce_add(F x) {
        __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        q = _mm_add_ps(q, _mm_movehl_ps(q, q));
        return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
    }
    static float reduce_max(F x) {
        __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        q = _mm_max_ps(q, _mm_movehl_ps(q, q));
        return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
    }

    static I to_int(F x) { return _mm256_cvtps_epi32(x); }
    static I abs_bits(F x) { return _mm256_castps_si256(abs(x)); }
    static I max_int(I a, I b) { return _mm256_max_epi32(a, b); }
    static int32_t reduce_max_int(I x) {
        __m128i q = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4E));
        return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
    }
    static I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
    static int32_t reduce_add_int(I x) {
        __m128i q = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
        return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
    }
    static void store_i8(int8_t* p, I x) {
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
    }

    static I set1_int(int32_t x) { return _mm256_set1_epi32(x); }
    static I mul_int(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I and_int(I a, I b) { return _mm256_and_si256(a, b); }
    static I or_int(I a, I b) { return _mm256_or_si256(a, b); }
    static I shift_left(I a, int n) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(n)); }
    static I shift_right(I a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
    static F float_of(I x) { return _mm256_cvtepi32_ps(x); }
    static I load_int(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static I load_int(const uint16_t* p) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_int(const uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_int(const int8_t* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }

    static W load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    template <int from, int to, int mask>
    static W bits(W plane) {
        return _mm256_and_si256(shifted<to - from>(plane), _mm256_set1_epi8(mask));
    }
    template <int from, int to, int mask>
    static W join(W codes, W plane) {
        return _mm256_or_si256(codes, bits<from, to, mask>(plane));
    }
#if defined(__AVXVNNI__)
    static W8 load_bytes(const uint8_t* p) { return load_codes(p); }
    static W levels(const int8_t* table) { return _mm256_xor_si256(broadcast16(table), _mm256_set1_epi8(-128)); }
    static W8 look_up(W codes, W levels) { return _mm256_shuffle_epi8(levels, codes); }
    template <int bits>
    static Dot begin(int32_t start) {
        return _mm256_set1_epi32(start);
    }
    template <int bits>
    static Dot dot(Dot acc, W w, const int8_t* x) {
        return _mm256_dpbusd_avx_epi32(acc, w, broadcast4(x));
    }
    template <int bits>
    static I end(Dot acc, int32_t) {
        return acc;
    }
#else
    static W8 load_bytes(const uint8_t* p) {
        return magnitude(_mm256_xor_si256(load_codes(p), _mm256_set1_epi8(-128)));
    }
    static W levels(const int8_t* table) { return broadcast16(table); }
    static W8 look_up(W codes, W levels) { return magnitude(_mm256_shuffle_epi8(levels, codes)); }
    // Sums of codes of up to 4 bits stay in 16 bits: eight steps of pairs of u4 × s8 reach 8 · 2 · 15 · 127 = 30,480.
    // A pair of u6 × s8 reaches 16,002. Bytes are signed here and begin at 0: |w| ≤ 128 and |x| ≤ 127, so a pair
    // reaches 32,512 and cannot saturate.
    template <int bits>
    static Dot begin(int32_t) {
        return _mm256_setzero_si256();
    }
    template <int bits, class Codes>
    static Dot dot(Dot acc, const Codes& w, const int8_t* x) {
        if constexpr (bits == 8) {
            const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(broadcast4(x), w.w));
            return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        } else if constexpr (bits > 4) {
            const __m256i pairs = _mm256_maddubs_epi16(w, broadcast4(x));
            return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        } else {
            return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, broadcast4(x)));
        }
    }
    template <int bits>
    static I end(Dot acc, int32_t start) {
        if constexpr (bits == 8) return acc;
        if constexpr (bits <= 4) acc = _mm256_madd_epi16(acc, _mm256_set1_epi16(1));
        return _mm256_add_epi32(acc, _mm256_set1_epi32(start));
    }
#endif

   private:
    template <int n>
    static __m256i shifted(__m256i x) {  // bits that come from another byte are masked out by whoever asks
        if constexpr (n > 0) return _mm256_slli_epi16(x, n);
        if constexpr (n < 0) return _mm256_srli_epi16(x, -n);
        return x;
    }
    static __m256i broadcast16(const int8_t* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
#if !defined(__AVXVNNI__)
    static W8 magnitude(__m256i w) { return {w, _mm256_abs_epi8(w)}; }
#endif
    static __m256i mask(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static __m256i broadcast4(const int8_t* x) {
        int32_t four;
        __builtin_memcpy(&four, x, sizeof(four));
        return _mm256_set1_epi32(four);
    }
};

}  // namespace
}  // namespace segue

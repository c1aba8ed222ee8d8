// 4 lanes in plain C++: the meaning of every operation the kernels use, for any CPU.
#pragma once

#include <bit>
#include <cmath>

#include "kernels/table.hpp"

namespace segue {
namespace {

struct Vec {
    static constexpr int lanes = 4;
    static constexpr const char* name = "portable";
    static constexpr int quant_rows = 4;
    static constexpr int float_rows = 2;

    using F = float __attribute__((vector_size(16)));
    using I = int32_t __attribute__((vector_size(16)));
    struct W {
        uint8_t w[4 * lanes];
    };
    using Dot = I;

    static F zero() { return F{}; }
    static F set1(float x) { return F{x, x, x, x}; }
    static F load(const float* p) { return F{p[0], p[1], p[2], p[3]}; }
    static F load(const Half* p) { return F{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
    static F load(const BFloat16* p) { return F{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}; }
    // The first n ≤ lanes elements, then zeros; nothing beyond them is read.
    static F load_n(const float* p, int n) {
        F x{};
        for (int i = 0; i < lanes && i < n; ++i) x[i] = p[i];
        return x;
    }
    static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }
    static void store(Half* p, F x) {
        for (int i = 0; i < lanes; ++i) p[i] = to_half(x[i]);
    }
    static void store_n(float* p, int n, F x) {
        for (int i = 0; i < lanes && i < n; ++i) p[i] = x[i];
    }

    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    // Fused where the CPU does it in one instruction; elsewhere rounded twice, for speed.
    static F fma(F a, F b, F c) {
#if defined(__FP_FAST_FMAF)
        F r;
        for (int i = 0; i < lanes; ++i) r[i] = std::fma(a[i], b[i], c[i]);
        return r;
#else
        return a * b + c;
#endif
    }
    static F max(F a, F b) { return a > b ? a : b; }  // b if one is NaN
    static F min(F a, F b) { return a < b ? a : b; }
    static F abs(F a) { return std::bit_cast<F>(std::bit_cast<I>(a) & 0x7fffffff); }
    // To nearest, ties to even, for |a| < 2^22.
    static F round(F a) { return (a + 0x1.8p23f) - 0x1.8p23f; }
    static F select_less(F a, F b, F then, F otherwise) { return a < b ? then : otherwise; }
    // The first n lanes of x, the others from `otherwise`.
    static F keep_n(F x, int n, F otherwise) {
        for (int i = 0; i < lanes; ++i) x[i] = i < n ? x[i] : otherwise[i];
        return x;
    }
    // 2^n for integral n in [-126, 127].
    static F exp2_int(F n) { return std::bit_cast<F>((__builtin_convertvector(n, I) + 127) << 23); }
    // (0, 1, 2, 3) → (1, 0, 3, 2)
    static F swap_pairs(F x) { return F{x[1], x[0], x[3], x[2]}; }
    static float reduce_add(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static float reduce_max(F x) {
        const float a = x[0] > x[1] ? x[0] : x[1];
        const float b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }

    // Of rounded values in [-127, 127].
    static I to_int(F x) { return __builtin_convertvector(x, I); }
    // The bits of |x|, which order as |x| does, with infinity and then NaN above all numbers.
    static I abs_bits(F x) { return std::bit_cast<I>(x) & 0x7fffffff; }
    static I max_int(I a, I b) { return a > b ? a : b; }
    static int32_t reduce_max_int(I x) {
        const int32_t a = x[0] > x[1] ? x[0] : x[1];
        const int32_t b = x[2] > x[3] ? x[2] : x[3];
        return a > b ? a : b;
    }
    static I add_int(I a, I b) { return a + b; }
    static int32_t reduce_add_int(I x) { return x[0] + x[1] + x[2] + x[3]; }
    static void store_i8(int8_t* p, I x) {
        for (int i = 0; i < lanes; ++i) p[i] = static_cast<int8_t>(x[i]);
    }

    static I set1_int(int32_t x) { return I{} + x; }
    static I mul_int(I a, I b) { return a * b; }
    static I and_int(I a, I b) { return a & b; }
    static I or_int(I a, I b) { return a | b; }
    static I shift_left(I a, int n) { return std::bit_cast<I>(std::bit_cast<U>(a) << n); }
    static I shift_right(I a, int n) { return std::bit_cast<I>(std::bit_cast<U>(a) >> n); }  // fills with zeros
    static F float_of(I x) { return __builtin_convertvector(x, F); }
    template <class T>
    static I load_int(const T* p) {
        return I{static_cast<int32_t>(p[0]), static_cast<int32_t>(p[1]), static_cast<int32_t>(p[2]),
                 static_cast<int32_t>(p[3])};
    }

    // Codes: unsigned bytes, 4 consecutive k of each lane's output.
    static W load_codes(const uint8_t* p) {
        W w;
        __builtin_memcpy(w.w, p, sizeof(w.w));
        return w;
    }
    // Bits of each byte, `from` moved to `to`, and masked there.
    template <int from, int to, int mask>
    static W bits(W plane) {
        for (uint8_t& b : plane.w) b = static_cast<uint8_t>((b << 8 >> from << to >> 8) & mask);
        return plane;
    }
    template <int from, int to, int mask>
    static W join(W codes, const W& plane) {
        const W more = bits<from, to, mask>(plane);
        for (int i = 0; i < 4 * lanes; ++i) codes.w[i] |= more.w[i];
        return codes;
    }
    // Signed bytes, as their value + 128.
    static W load_bytes(const uint8_t* p) { return load_codes(p); }
    static W levels(const int8_t* table) {
        W w;
        for (int i = 0; i < 16; ++i) w.w[i] = static_cast<uint8_t>(table[i] + 128);
        return w;
    }
    static W look_up(W codes, const W& levels) {
        for (uint8_t& b : codes.w) b = levels.w[b];
        return codes;
    }

    // A dot product: begin, one step for 4 consecutive k at a time, end, each for codes of `bits` bits. It starts at
    // `start`, which both are given: where codes stand for something less than they are, at -offset · Σ x. For bytes
    // `start` is -128 · Σ x. Sums are exact.
    template <int bits>
    static Dot begin(int32_t start) {
        return I{} + start;
    }
    template <int bits>
    static Dot dot(Dot acc, const W& w, const int8_t* x) {
        for (int i = 0; i < lanes; ++i) {
            acc[i] += w.w[4 * i] * x[0] + w.w[4 * i + 1] * x[1] + w.w[4 * i + 2] * x[2] + w.w[4 * i + 3] * x[3];
        }
        return acc;
    }
    template <int bits>
    static I end(Dot acc, int32_t) {
        return acc;
    }

   private:
    using U = uint32_t __attribute__((vector_size(16)));
};

}  // namespace
}  // namespace segue

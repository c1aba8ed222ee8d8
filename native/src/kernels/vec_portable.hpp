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
    struct W4 {
        uint8_t w[4 * lanes];  // 4 consecutive k of each lane's output
    };
    using W8 = W4;
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

    // One step of an integer dot product: 4 consecutive k for each lane's output. Sums are exact.
    static W4 load_w4(const uint8_t* p) { return load_w8(p); }
    static W4 low_nibbles(W4 w) {
        for (uint8_t& b : w.w) b &= 15;
        return w;
    }
    static W4 high_nibbles(W4 w) {
        for (uint8_t& b : w.w) b >>= 4;
        return w;
    }
    static W8 load_w8(const uint8_t* p) {
        W8 w;
        __builtin_memcpy(w.w, p, sizeof(w.w));
        return w;
    }
    static Dot begin_u4() { return I{}; }
    static Dot dot_u4(Dot acc, W4 w, const int8_t* x) { return dot(acc, w, x); }
    static F end_u4(Dot acc) { return __builtin_convertvector(acc, F); }
    // 8-bit weights are stored as w + 128, so the sum starts at −128 · Σ x.
    static Dot begin_i8(int32_t isum) { return I{} - 128 * isum; }
    static Dot dot_i8(Dot acc, W8 w, const int8_t* x) { return dot(acc, w, x); }
    static F end_i8(Dot acc) { return __builtin_convertvector(acc, F); }

   private:
    static Dot dot(Dot acc, const W4& w, const int8_t* x) {
        for (int i = 0; i < lanes; ++i) {
            acc[i] += w.w[4 * i] * x[0] + w.w[4 * i + 1] * x[1] + w.w[4 * i + 2] * x[2] + w.w[4 * i + 3] * x[3];
        }
        return acc;
    }
};

}  // namespace
}  // namespace segue

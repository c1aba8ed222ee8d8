// Operations on one row: norms, activations, quantisation, rotation. No row ever looks at another.
#pragma once

#include <bit>
#include <cmath>

#include "kernels/table.hpp"

namespace segue {
namespace {

// Calls tile<MR>() for `rows` ≤ MR rows.
template <int MR, class Tile>
inline void with_rows(int rows, const Tile& tile) {
    if constexpr (MR > 1) {
        if (rows < MR) return with_rows<MR - 1>(rows, tile);
    }
    tile.template operator()<MR>();
}

// e^x; 0 below -87.3, NaN stays NaN. Cephes' expf: range reduction by ln 2 in two parts, then a polynomial.
template <class V>
inline typename V::F exp(typename V::F x) {
    using F = typename V::F;
    constexpr float kLowest = -87.3f;
    // A NaN passes through max and min only as their second operand.
    const F clamped = V::min(V::set1(88.0f), V::max(V::set1(kLowest), x));
    const F n = V::round(V::mul(clamped, V::set1(1.44269504088896341f)));
    F r = V::fma(n, V::set1(-0.693359375f), clamped);
    r = V::fma(n, V::set1(2.12194440e-4f), r);
    F p = V::set1(1.9875691500e-4f);
    p = V::fma(p, r, V::set1(1.3981999507e-3f));
    p = V::fma(p, r, V::set1(8.3334519073e-3f));
    p = V::fma(p, r, V::set1(4.1665795894e-2f));
    p = V::fma(p, r, V::set1(1.6666665459e-1f));
    p = V::fma(p, r, V::set1(5.0000001201e-1f));
    p = V::add(V::fma(p, V::mul(r, r), r), V::set1(1.0f));
    return V::select_less(x, V::set1(kLowest), V::zero(), V::mul(p, V::exp2_int(n)));
}

// Calls visit(i, n) for pieces of n ≤ lanes elements; `whole` for full ones is a constant to the compiler.
template <class V, class Visit>
inline void for_lanes(int size, const Visit& visit) {
    int i = 0;
    for (; i + V::lanes <= size; i += V::lanes) visit(i, V::lanes);
    if (i < size) visit(i, size - i);
}

template <class V>
inline typename V::F load_part(const float* p, int n) {
    return n == V::lanes ? V::load(p) : V::load_n(p, n);
}

template <class V>
inline void store_part(float* p, int n, typename V::F x) {
    if (n == V::lanes) {
        V::store(p, x);
    } else {
        V::store_n(p, n, x);
    }
}

template <class V>
float sum_of_squares(const float* x, int n) {
    using F = typename V::F;
    constexpr int kChains = 4;
    F acc[kChains];
    for (F& a : acc) a = V::zero();
    int i = 0;
    for (; i + kChains * V::lanes <= n; i += kChains * V::lanes) {
        for (int c = 0; c < kChains; ++c) {
            const F v = V::load(x + i + c * V::lanes);
            acc[c] = V::fma(v, v, acc[c]);
        }
    }
    for_lanes<V>(n - i, [&](int j, int part) {
        const F v = load_part<V>(x + i + j, part);
        acc[0] = V::fma(v, v, acc[0]);
    });
    return V::reduce_add(V::add(V::add(acc[0], acc[1]), V::add(acc[2], acc[3])));
}

constexpr float kLargest = 3.402823466e38f;
constexpr float kNaN = __builtin_nanf("");

template <class V>
void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
    const float mean = sum_of_squares<V>(x, n) / static_cast<float>(n);
    // A row whose squares overflow must not come out as zeros, which look like a result.
    const auto scale = V::set1(mean <= kLargest ? 1.0f / std::sqrt(mean + eps) : kNaN);
    for_lanes<V>(n, [&](int i, int part) {
        const auto v = V::mul(load_part<V>(x + i, part), scale);
        store_part<V>(y + i, part, V::mul(v, load_part<V>(weight + i, part)));
    });
}

template <class V>
float sum_of(const float* x, int n) {
    auto sum = V::zero();
    for_lanes<V>(n, [&](int i, int part) { sum = V::add(sum, load_part<V>(x + i, part)); });
    return V::reduce_add(sum);
}

template <class V>
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* y) {
    const auto mean = V::set1(sum_of<V>(x, n) / static_cast<float>(n));
    for_lanes<V>(n, [&](int i, int part) { store_part<V>(y + i, part, V::sub(load_part<V>(x + i, part), mean)); });
    rms_norm<V>(y, weight, eps, n, y);
    for_lanes<V>(n, [&](int i, int part) {
        store_part<V>(y + i, part, V::add(load_part<V>(y + i, part), load_part<V>(bias + i, part)));
    });
}

// x · sigmoid(z)
template <class V>
inline typename V::F times_sigmoid(typename V::F x, typename V::F z) {
    return V::div(x, V::add(V::set1(1.0f), exp<V>(V::sub(V::zero(), z))));
}

// Φ is (1 + erf(x / √2)) / 2, erf that of Abramowitz & Stegun 7.1.26: off by 1.5e-7 at most.
template <class V>
inline typename V::F gelu(typename V::F x) {
    const auto one = V::set1(1.0f);
    const auto magnitude = V::abs(V::mul(x, V::set1(0.70710678118654752f)));
    const auto t = V::div(one, V::fma(V::set1(0.3275911f), magnitude, one));
    auto p = V::set1(1.061405429f);
    p = V::fma(p, t, V::set1(-1.453152027f));
    p = V::fma(p, t, V::set1(1.421413741f));
    p = V::fma(p, t, V::set1(-0.284496736f));
    p = V::mul(V::fma(p, t, V::set1(0.254829592f)), t);
    const auto tail = V::mul(V::mul(p, V::set1(0.5f)), exp<V>(V::sub(V::zero(), V::mul(magnitude, magnitude))));
    return V::mul(x, V::select_less(x, V::zero(), tail, V::sub(one, tail)));
}

template <class V, Function function>
inline typename V::F activated(typename V::F x) {
    if constexpr (function == Function::kSilu) {
        return times_sigmoid<V>(x, x);
    } else if constexpr (function == Function::kGelu) {
        return gelu<V>(x);
    } else if constexpr (function == Function::kGeluTanh) {  // (1 + tanh(u)) / 2 = sigmoid(2u)
        const auto inner = V::fma(V::mul(V::mul(x, x), x), V::set1(0.044715f), x);
        return times_sigmoid<V>(x, V::mul(inner, V::set1(1.59576912160573071f)));
    } else {
        return V::max(V::zero(), x);  // a NaN passes
    }
}

// Calls visit.operator()<function>().
template <class Visit>
inline void with_function(Function function, const Visit& visit) {
    switch (function) {
        case Function::kSilu:
            return visit.template operator()<Function::kSilu>();
        case Function::kGelu:
            return visit.template operator()<Function::kGelu>();
        case Function::kGeluTanh:
            return visit.template operator()<Function::kGeluTanh>();
        case Function::kRelu:
            return visit.template operator()<Function::kRelu>();
    }
}

template <class V>
void activate(Function function, const float* x, int n, float* y) {
    with_function(function, [&]<Function f>() {
        for_lanes<V>(n,
                     [&](int i, int part) { store_part<V>(y + i, part, activated<V, f>(load_part<V>(x + i, part))); });
    });
}

template <class V>
void glu(Function function, const float* x, int n, float* y) {
    with_function(function, [&]<Function f>() {
        for_lanes<V>(n, [&](int i, int part) {
            store_part<V>(y + i, part,
                          V::mul(activated<V, f>(load_part<V>(x + i, part)), load_part<V>(x + n + i, part)));
        });
    });
}

// cap · tanh(x / cap), where tanh(z) = 1 - 2 / (1 + e^2z)
template <class V>
inline typename V::F soft_cap_lanes(typename V::F x, float cap) {
    const auto one = V::set1(1.0f);
    const auto power = exp<V>(V::mul(x, V::set1(2.0f / cap)));
    return V::mul(V::sub(one, V::div(V::set1(2.0f), V::add(one, power))), V::set1(cap));
}

template <class V>
void soft_cap(float* x, float cap, int n) {
    for_lanes<V>(
        n, [&](int i, int part) { store_part<V>(x + i, part, soft_cap_lanes<V>(load_part<V>(x + i, part), cap)); });
}

// A group with a NaN or an infinity gets the scale NaN, which makes every product with it NaN.
template <class V>
void quantise_row(const float* x, const QuantView& quant, int row) {
    using F = typename V::F;
    using I = typename V::I;
    constexpr int kVectors = kGroup / V::lanes;
    constexpr float kSmallest = 0x1p-120f;  // 127 / x overflows a little below; such groups count as zero
    const size_t first = static_cast<size_t>(row / kRowBlock) * static_cast<size_t>(quant.groups) * kRowBlock +
                         static_cast<size_t>(row % kRowBlock);
    for (int g = 0; g < quant.groups; ++g) {
        const size_t at = first + static_cast<size_t>(g) * kRowBlock;
        F v[kVectors];
        I largest = V::to_int(V::zero());
        for (int i = 0; i < kVectors; ++i) {
            v[i] = V::load(x + g * kGroup + i * V::lanes);
            largest = V::max_int(largest, V::abs_bits(v[i]));
        }
        const float amax = std::bit_cast<float>(V::reduce_max_int(largest));
        if (!(amax >= kSmallest && amax <= kLargest)) {
            __builtin_memset(quant.q + at * kGroup, 0, kGroup);
            quant.scale[at] = quant.sum[at] = amax < kSmallest ? 0.0f : kNaN;
            quant.isum[at] = quant.half_isum[2 * at] = quant.half_isum[2 * at + 1] = 0;
            continue;
        }
        const float inverse = 127.0f / amax;
        int32_t halves[2];
        for (int half = 0; half < 2; ++half) {
            I sum = V::to_int(V::zero());
            for (int i = half * kVectors / 2; i < (half + 1) * kVectors / 2; ++i) {
                const auto q = V::to_int(V::round(V::mul(v[i], V::set1(inverse))));
                V::store_i8(quant.q + at * kGroup + i * V::lanes, q);
                sum = V::add_int(sum, q);
            }
            halves[half] = quant.half_isum[2 * at + static_cast<size_t>(half)] = V::reduce_add_int(sum);
        }
        const int32_t isum = halves[0] + halves[1];
        const float scale = amax / 127.0f;
        quant.scale[at] = scale;
        quant.isum[at] = isum;
        quant.sum[at] = scale * static_cast<float>(isum);
    }
}

// Pairs (2i, 2i+1): cos and sin have an entry for every element, sin with the sign of its term.
template <class V>
inline void rotate_interleaved(float* x, const RopeArgs& a, typename V::F scale) {
    for_lanes<V>(a.rope_dim, [&](int i, int part) {
        const auto v = load_part<V>(x + i, part);
        const auto rotated =
            V::fma(V::swap_pairs(v), load_part<V>(a.sin + i, part), V::mul(v, load_part<V>(a.cos + i, part)));
        store_part<V>(x + i, part, V::mul(rotated, scale));
    });
}

// Pairs (i, i + rope_dim/2): the first half of cos and sin is used.
template <class V>
inline void rotate_halves(float* x, const RopeArgs& a, typename V::F scale) {
    const int half = a.rope_dim / 2;
    for_lanes<V>(half, [&](int i, int part) {
        const auto lo = load_part<V>(x + i, part);
        const auto hi = load_part<V>(x + half + i, part);
        const auto cos = load_part<V>(a.cos + i, part);
        const auto sin = load_part<V>(a.sin + i, part);
        store_part<V>(x + i, part, V::mul(V::sub(V::mul(lo, cos), V::mul(hi, sin)), scale));
        store_part<V>(x + half + i, part, V::mul(V::fma(hi, cos, V::mul(lo, sin)), scale));
    });
}

template <class V>
void rope(float* x, int heads, float scale, const RopeArgs& a) {
    const auto factor = V::set1(scale);
    for (int h = 0; h < heads; ++h, x += a.head_dim) {
        if (a.interleaved) {
            rotate_interleaved<V>(x, a, factor);
        } else {
            rotate_halves<V>(x, a, factor);
        }
        for_lanes<V>(a.head_dim - a.rope_dim, [&](int i, int part) {
            float* rest = x + a.rope_dim + i;
            store_part<V>(rest, part, V::mul(load_part<V>(rest, part), factor));
        });
    }
}

template <class V>
int argmax(const float* logits, int n) {
    using F = typename V::F;
    constexpr int kBlock = 16 * V::lanes;
    const F lowest = V::set1(-kLargest);
    float best = 0.0f;
    int best_block = -1;
    F trouble = V::zero();  // x - x is NaN for NaN and infinity
    for (int begin = 0; begin < n; begin += kBlock) {
        F largest = lowest;
        const int size = n - begin < kBlock ? n - begin : kBlock;
        for_lanes<V>(size, [&](int i, int part) {
            const F v = part == V::lanes ? V::load(logits + begin + i)
                                         : V::keep_n(V::load_n(logits + begin + i, part), part, lowest);
            trouble = V::add(trouble, V::sub(v, v));
            largest = V::max(largest, v);
        });
        const float block_max = V::reduce_max(largest);
        if (best_block < 0 || block_max > best) {
            best = block_max;
            best_block = begin;
        }
    }
    if (!(V::reduce_add(trouble) == 0.0f)) return -1;
    int id = best_block;
    while (logits[id] != best) ++id;
    return id;
}

}  // namespace
}  // namespace segue

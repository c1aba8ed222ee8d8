// What the integer kernels do with a packed block of each format.
//
// Dot products of codes and quantised activations are exact integers, whatever instructions make them. What is rounded
// is the chain of each output: its fmas, in the order written here, over groups of 32 ascending. A format is a struct
// with
//   type, Packed   what it is for
//   groups         of 32 k in a block
//   add_block()    acc[m] of `lanes` outputs, from `first` on, of MR rows; moves x on to the next block
#pragma once

#include "kernels/levels.hpp"
#include "kernels/packed.hpp"
#include "kernels/table.hpp"
#include "kernels/unroll.hpp"

namespace segue {
namespace {

// What the first row of a tile has for a group. The next row's is beside it; the next group's is kRowBlock times as
// far.
struct GroupInputs {
    const int8_t* q;
    const float* scale;
    const float* sum;
    const int32_t* isum;
    const int32_t* half_isum;

    void next_group() {
        q += kRowBlock * kGroup;
        scale += kRowBlock;
        sum += kRowBlock;
        isum += kRowBlock;
        half_isum += 2 * kRowBlock;
    }
};

inline GroupInputs inputs_of(const QuantView& x, int row) {
    const size_t at = static_cast<size_t>(row / kRowBlock) * static_cast<size_t>(x.groups) * kRowBlock +
                      static_cast<size_t>(row % kRowBlock);
    return {x.q + at * kGroup, x.scale + at, x.sum + at, x.isum + at, x.half_isum + 2 * at};
}

// The codes of step s of a group, from its planes (kernels/packed.hpp).

template <class V>
[[gnu::always_inline]] inline auto load(const packed::Vector& vector, int first) {
    return V::load_codes(vector + 4 * first);
}
template <class V, int s>
[[gnu::always_inline]] inline auto four_bits(const packed::Nibbles& low, int first) {
    return V::template bits<4 * (s % 2), 0, 0x0f>(load<V>(low[s / 2], first));
}
template <class V, int s>
[[gnu::always_inline]] inline auto five_bits(const packed::Nibbles& low, const packed::Bits& high, int first) {
    return V::template join<s, 4, 0x10>(four_bits<V, s>(low, first), load<V>(high, first));
}
template <class V, int s>
[[gnu::always_inline]] inline auto six_bits(const packed::Nibbles& low, const packed::Pairs& high, int first) {
    return V::template join<2 * (s % 4), 4, 0x30>(four_bits<V, s>(low, first), load<V>(high[s / 4], first));
}
template <class V, int s>
[[gnu::always_inline]] inline auto two_bits(const packed::Pairs& low, int first) {
    return V::template bits<2 * (s % 4), 0, 0x03>(load<V>(low[s / 4], first));
}
template <class V, int s>
[[gnu::always_inline]] inline auto three_bits(const packed::Pairs& low, const packed::Bits& high, int first) {
    return V::template join<s, 2, 0x04>(two_bits<V, s>(low, first), load<V>(high, first));
}

// dot[m] += Σ code · q over steps [begin, end) of a group, where code(s) are the codes of step s.
template <class V, int bits, int begin, int end, int MR, class Code>
[[gnu::always_inline]] inline void multiply(const Code& code, const int8_t* q, typename V::Dot (&dot)[MR]) {
    unroll<end - begin>([&](auto i) __attribute__((always_inline)) {
        constexpr int s = begin + decltype(i)::value;
        const auto w = code(std::integral_constant<int, s>{});
        unroll<MR>([&](auto m) __attribute__((always_inline)) {
            dot[m] = V::template dot<bits>(dot[m], w, q + kGroup * m + 4 * s);
        });
    });
}

// acc = fma(Σ (code - offset) · q, d · d_x, acc)
template <class V, int bits, int offset, int MR, class Code>
[[gnu::always_inline]] inline void add_group(const Code& code, typename V::F d, const GroupInputs& x,
                                             typename V::F (&acc)[MR]) {
    typename V::Dot dot[MR];
    unroll<MR>([&](auto m) __attribute__((always_inline)) {
        dot[m] = V::template begin<bits>(offset == 0 ? 0 : -offset * x.isum[m]);
    });
    multiply<V, bits, 0, 8>(code, x.q, dot);
    unroll<MR>([&](auto m) __attribute__((always_inline)) {
        const auto sum = V::template end<bits>(dot[m], offset == 0 ? 0 : -offset * x.isum[m]);
        acc[m] = V::fma(V::float_of(sum), V::mul(d, V::set1(x.scale[m])), acc[m]);
    });
}

// acc = fma(minimum, Σ x, acc)
template <class V, int MR>
[[gnu::always_inline]] inline void add_minimum(typename V::F minimum, const GroupInputs& x, typename V::F (&acc)[MR]) {
    unroll<MR>([&](auto m) __attribute__((always_inline)) { acc[m] = V::fma(minimum, V::set1(x.sum[m]), acc[m]); });
}

// acc = fma(s[0] · Σ (code - offset) · q + s[1] · Σ (code - offset) · q, d · d_x, acc), the sums each over 16 k. All
// but the fma is exact: the largest, of Q6_K, is 2 · 128 · 16 · 32 · 127 < 2^24.
template <class V, int bits, int offset, int MR, class Code>
[[gnu::always_inline]] inline void add_halves(const Code& code, const typename V::I (&s)[2], typename V::F d,
                                              const GroupInputs& x, typename V::F (&acc)[MR]) {
    typename V::I total[MR];
    unroll<2>([&](auto half) __attribute__((always_inline)) {
        constexpr int h = decltype(half)::value;
        typename V::Dot dot[MR];
        unroll<MR>([&](auto m) __attribute__((always_inline)) {
            dot[m] = V::template begin<bits>(offset == 0 ? 0 : -offset * x.half_isum[2 * m + h]);
        });
        multiply<V, bits, 4 * h, 4 * h + 4>(code, x.q, dot);
        unroll<MR>([&](auto m) __attribute__((always_inline)) {
            const auto sum = V::template end<bits>(dot[m], offset == 0 ? 0 : -offset * x.half_isum[2 * m + h]);
            const auto scaled = V::mul_int(s[h], sum);
            total[m] = h == 0 ? scaled : V::add_int(total[m], scaled);
        });
    });
    unroll<MR>([&](auto m) __attribute__((always_inline)) {
        acc[m] = V::fma(V::float_of(total[m]), V::mul(d, V::set1(x.scale[m])), acc[m]);
    });
}

// 32 k in a block

template <class V>
struct Q4_0 {
    using Packed = packed::Q4_0;
    static constexpr TensorType type = TensorType::kQ4_0;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        add_group<V, 4, 8>([&](auto s) { return four_bits<V, s()>(b.low, first); }, V::load(b.d + first), x, acc);
        x.next_group();
    }
};

template <class V>
struct Q4_1 {
    using Packed = packed::Q4_1;
    static constexpr TensorType type = TensorType::kQ4_1;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        add_group<V, 4, 0>([&](auto s) { return four_bits<V, s()>(b.low, first); }, V::load(b.d + first), x, acc);
        add_minimum<V>(V::load(b.m + first), x, acc);
        x.next_group();
    }
};

template <class V>
struct Q5_0 {
    using Packed = packed::Q5_0;
    static constexpr TensorType type = TensorType::kQ5_0;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        add_group<V, 5, 16>([&](auto s) { return five_bits<V, s()>(b.low, b.high, first); }, V::load(b.d + first), x,
                            acc);
        x.next_group();
    }
};

template <class V>
struct Q5_1 {
    using Packed = packed::Q5_1;
    static constexpr TensorType type = TensorType::kQ5_1;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        add_group<V, 5, 0>([&](auto s) { return five_bits<V, s()>(b.low, b.high, first); }, V::load(b.d + first), x,
                           acc);
        add_minimum<V>(V::load(b.m + first), x, acc);
        x.next_group();
    }
};

template <class V>
struct Q8_0 {
    using Packed = packed::Q8_0;
    static constexpr TensorType type = TensorType::kQ8_0;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        add_group<V, 8, 128>([&](auto s) { return V::load_bytes(b.q[s] + 4 * first); }, V::load(b.d + first), x, acc);
        x.next_group();
    }
};

template <class V>
struct IQ4_NL {
    using Packed = packed::Q4_0;
    static constexpr TensorType type = TensorType::kIQ4_NL;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        const auto levels = V::levels(kLevelsIQ4);
        add_group<V, 8, 128>([&](auto s) { return V::look_up(four_bits<V, s()>(b.low, first), levels); },
                             V::load(b.d + first), x, acc);
        x.next_group();
    }
};

template <class V>
struct MXFP4 {
    using Packed = packed::MXFP4;
    static constexpr TensorType type = TensorType::kMXFP4;
    static constexpr int groups = 1;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        const auto levels = V::levels(kLevelsFP4);
        add_group<V, 8, 128>([&](auto s) { return V::look_up(four_bits<V, s()>(b.low, first), levels); },
                             scales(b, first), x, acc);
        x.next_group();
    }

   private:
    // 2^(e - 128), down to 2^-128: of two factors in [2^-64, 2^63].
    static typename V::F scales(const Packed& b, int first) {
        const auto e = V::load_int(b.e + first);
        const auto half = V::shift_right(e, 1);
        const auto rest = V::add_int(half, V::and_int(e, V::set1_int(1)));
        const auto middle = V::set1_int(-64);
        return V::mul(V::exp2_int(V::float_of(V::add_int(half, middle))),
                      V::exp2_int(V::float_of(V::add_int(rest, middle))));
    }
};

// 256 k in a block: 8 groups

// The scales (and minima) of the groups of a block, decoded once for all rows of a tile.
template <class V>
struct GroupScales {
    typename V::F d[8];
    typename V::F minimum[8];
};

// Byte i of each lane.
template <class V>
[[gnu::always_inline]] inline typename V::I byte_of(typename V::I x, int i) {
    return V::and_int(V::shift_right(x, 8 * i), V::set1_int(0xff));
}
// Bits [from, from + 4) of each byte, and in bits 4 and 5 those from `from2` on of another.
template <class V>
[[gnu::always_inline]] inline typename V::I six_of(typename V::I low, int from, typename V::I high, int from2) {
    const auto two = V::and_int(V::shift_right(high, from2), V::set1_int(0x03030303));
    return V::or_int(V::and_int(V::shift_right(low, from), V::set1_int(0x0f0f0f0f)), V::shift_left(two, 4));
}

// d · s and -dmin · m of Q4_K and Q5_K. Both are exact.
template <class V, class Packed>
[[gnu::always_inline]] inline void decode_scales_and_minima(const Packed& b, int first, GroupScales<V>& to) {
    const auto d = V::load(b.d + first);
    const auto dmin = V::sub(V::zero(), V::load(b.dmin + first));
    const auto s = V::load_int(b.sm[0] + first);
    const auto m = V::load_int(b.sm[1] + first);
    const auto rest = V::load_int(b.sm[2] + first);
    const auto low6 = V::set1_int(0x3f3f3f3f);
    const typename V::I scales[2] = {V::and_int(s, low6), six_of<V>(rest, 0, s, 6)};
    const typename V::I minima[2] = {V::and_int(m, low6), six_of<V>(rest, 4, m, 6)};
    unroll<8>([&](auto g) __attribute__((always_inline)) {
        to.d[g] = V::mul(d, V::float_of(byte_of<V>(scales[g / 4], g % 4)));
        to.minimum[g] = V::mul(dmin, V::float_of(byte_of<V>(minima[g / 4], g % 4)));
    });
}

template <class V>
struct Q4_K {
    using Packed = packed::Q4_K;
    static constexpr TensorType type = TensorType::kQ4_K;
    static constexpr int groups = 8;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        GroupScales<V> scales;
        decode_scales_and_minima(b, first, scales);
#pragma GCC unroll 1
        for (int g = 0; g < groups; ++g, x.next_group()) {
            add_group<V, 4, 0>([&](auto s) { return four_bits<V, s()>(b.low[g], first); }, scales.d[g], x, acc);
            add_minimum<V>(scales.minimum[g], x, acc);
        }
    }
};

template <class V>
struct Q5_K {
    using Packed = packed::Q5_K;
    static constexpr TensorType type = TensorType::kQ5_K;
    static constexpr int groups = 8;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        GroupScales<V> scales;
        decode_scales_and_minima(b, first, scales);
#pragma GCC unroll 1
        for (int g = 0; g < groups; ++g, x.next_group()) {
            add_group<V, 5, 0>([&](auto s) { return five_bits<V, s()>(b.low[g], b.high[g], first); }, scales.d[g], x,
                               acc);
            add_minimum<V>(scales.minimum[g], x, acc);
        }
    }
};

template <class V>
struct IQ4_XS {
    using Packed = packed::IQ4_XS;
    static constexpr TensorType type = TensorType::kIQ4_XS;
    static constexpr int groups = 8;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        const auto levels = V::levels(kLevelsIQ4);
        const auto d = V::load(b.d + first);
        const auto low = V::load_int(b.s_low + first);
        const auto high = V::load_int(b.s_high + first);
#pragma GCC unroll 1
        for (int g = 0; g < groups; ++g, x.next_group()) {
            const auto two = V::and_int(V::shift_right(high, 2 * g), V::set1_int(3));
            const auto code = V::or_int(V::and_int(V::shift_right(low, 4 * g), V::set1_int(15)), V::shift_left(two, 4));
            const auto scale = V::float_of(V::add_int(code, V::set1_int(-32)));
            add_group<V, 8, 128>([&](auto s) { return V::look_up(four_bits<V, s()>(b.low[g], first), levels); },
                                 V::mul(d, scale), x, acc);
        }
    }
};

template <class V>
struct Q6_K {
    using Packed = packed::Q6_K;
    static constexpr TensorType type = TensorType::kQ6_K;
    static constexpr int groups = 8;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        const auto d = V::load(b.d + first);
#pragma GCC unroll 1
        for (int g = 0; g < groups; ++g, x.next_group()) {
            const auto scale = [&](int half) {
                return V::load_int(reinterpret_cast<const int8_t*>(b.s[2 * g + half]) + first);
            };
            const typename V::I scales[2] = {scale(0), scale(1)};
            add_halves<V, 6, 32>([&](auto s) { return six_bits<V, s()>(b.low[g], b.high[g], first); }, scales, d, x,
                                 acc);
        }
    }
};

template <class V>
struct Q3_K {
    using Packed = packed::Q3_K;
    static constexpr TensorType type = TensorType::kQ3_K;
    static constexpr int groups = 8;

    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        const auto d = V::load(b.d + first);
        const auto high = V::load_int(b.s[2] + first);
#pragma GCC unroll 1
        for (int g = 0; g < groups; ++g, x.next_group()) {
            const auto four = six_of<V>(V::load_int(b.s[g / 2 % 2] + first), 4 * (g / 4), high, 2 * (g / 2));
            const auto scale = [&](int half) {
                return V::add_int(byte_of<V>(four, 2 * (g % 2) + half), V::set1_int(-32));
            };
            const typename V::I scales[2] = {scale(0), scale(1)};
            add_halves<V, 3, 4>([&](auto s) { return three_bits<V, s()>(b.low[g], b.high[g], first); }, scales, d, x,
                                acc);
        }
    }
};

template <class V>
struct Q2_K {
    using Packed = packed::Q2_K;
    static constexpr TensorType type = TensorType::kQ2_K;
    static constexpr int groups = 8;

    // After the products, acc = fma(m[0] · Σ q + m[1] · Σ q, -dmin · d_x, acc), the sums each over 16 k and exact.
    template <int MR>
    [[gnu::always_inline]] static void add_block(const Packed& b, int first, GroupInputs& x, typename V::F (&acc)[MR]) {
        const auto d = V::load(b.d + first);
        const auto dmin = V::sub(V::zero(), V::load(b.dmin + first));
#pragma GCC unroll 1
        for (int g = 0; g < groups; ++g, x.next_group()) {
            const typename V::I sm[2] = {V::load_int(b.sm[2 * g] + first), V::load_int(b.sm[2 * g + 1] + first)};
            const auto low = V::set1_int(15);
            const typename V::I scales[2] = {V::and_int(sm[0], low), V::and_int(sm[1], low)};
            const typename V::I minima[2] = {V::shift_right(sm[0], 4), V::shift_right(sm[1], 4)};
            add_halves<V, 2, 0>([&](auto s) { return two_bits<V, s()>(b.low[g], first); }, scales, d, x, acc);
            unroll<MR>([&](auto m) __attribute__((always_inline)) {
                const auto sum = V::add_int(V::mul_int(minima[0], V::set1_int(x.half_isum[2 * m])),
                                            V::mul_int(minima[1], V::set1_int(x.half_isum[2 * m + 1])));
                acc[m] = V::fma(V::float_of(sum), V::mul(dmin, V::set1(x.scale[m])), acc[m]);
            });
        }
    }
};

}  // namespace
}  // namespace segue

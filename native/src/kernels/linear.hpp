// out = x · Wᵀ for packed matrices.
//
// Integer weights: the dot product inside a group of 32 is an exact integer; each output then takes the same chain
//   acc = fma(float(dot), d_w · d_x, acc); acc = fma(m_w, d_x · Σ q, acc)      (the second for kU4)
// over groups in ascending order, whatever the number of rows. Float weights: four chains, k mod 4, added in pairs.
#pragma once

#include "kernels/rows.hpp"
#include "kernels/table.hpp"
#include "kernels/unroll.hpp"

namespace segue {
namespace {

template <class V>
struct U4Format {
    static constexpr size_t block_bytes = kU4BlockBytes;
    using Dot = typename V::Dot;
    using F = typename V::F;

    static Dot begin(int32_t) { return V::begin_u4(); }
    static F end(Dot dot) { return V::end_u4(dot); }

    // dot[m] += the group's products. `first` is the first of the block's outputs; rows of x are 32 bytes apart.
    template <int MR>
    [[gnu::always_inline]] static inline void dots(const uint8_t* block, int first, const int8_t* x, Dot* dot) {
        unroll<4>([&](auto t) __attribute__((always_inline)) {
            const auto w = V::load_w4(block + 64 * t + 4 * first);
            const auto low = V::low_nibbles(w);
            const auto high = V::high_nibbles(w);
            unroll<MR>([&](auto m) { dot[m] = V::dot_u4(dot[m], low, x + 32 * m + 8 * t); });
            unroll<MR>([&](auto m) { dot[m] = V::dot_u4(dot[m], high, x + 32 * m + 8 * t + 4); });
        });
    }
    static F scales(const uint8_t* block, int first) {
        return V::load(reinterpret_cast<const Half*>(block + 256) + first);
    }
    static F add_minimum(const uint8_t* block, int first, float sum, F acc) {
        return V::fma(V::load(reinterpret_cast<const Half*>(block + 256) + kPanel + first), V::set1(sum), acc);
    }
};

template <class V>
struct I8Format {
    static constexpr size_t block_bytes = kI8BlockBytes;
    using Dot = typename V::Dot;
    using F = typename V::F;

    static Dot begin(int32_t isum) { return V::begin_i8(isum); }
    static F end(Dot dot) { return V::end_i8(dot); }

    template <int MR>
    [[gnu::always_inline]] static inline void dots(const uint8_t* block, int first, const int8_t* x, Dot* dot) {
        unroll<8>([&](auto s) __attribute__((always_inline)) {
            const auto w = V::load_w8(block + 64 * s + 4 * first);
            unroll<MR>([&](auto m) { dot[m] = V::dot_i8(dot[m], w, x + 32 * m + 4 * s); });
        });
    }
    static F scales(const uint8_t* block, int first) {
        return V::load(reinterpret_cast<const Half*>(block + 512) + first);
    }
    static F add_minimum(const uint8_t*, int, float, F acc) { return acc; }
};

// Stores (or adds to) what exists of `lanes` outputs of a row, from output `output` on.
template <class V>
inline void store_outputs(const LinearArgs& a, int row, int output, typename V::F acc) {
    float* out = a.out + static_cast<size_t>(row) * a.out_stride + output;
    const int left = a.w.outputs - output;
    if (left <= 0) return;
    if (a.bias != nullptr) acc = V::add(acc, V::load(a.bias + output));
    if (a.scale != 1.0f) acc = V::mul(acc, V::set1(a.scale));
    if (left >= V::lanes) {
        V::store(out, a.accumulate ? V::add(V::load(out), acc) : acc);
    } else {
        V::store_n(out, left, a.accumulate ? V::add(V::load_n(out, left), acc) : acc);
    }
}

// Asks for the block that is one panel further, while this one is worked on.
template <size_t block_bytes>
[[gnu::always_inline]] inline void prefetch_next_panel(const uint8_t* block, size_t panel_bytes) {
    for (size_t line = 0; line < block_bytes; line += 64) __builtin_prefetch(block + panel_bytes + line);
}

// MR rows of one row block by `lanes` outputs of one panel, from output `first` on.
template <class V, class Format, int MR>
void quant_tile(const LinearArgs& a, int panel, int first, int row) {
    using F = typename V::F;
    const int groups = a.quant.groups;
    const size_t group0 = static_cast<size_t>(row / kRowBlock) * static_cast<size_t>(groups) * kRowBlock +
                          static_cast<size_t>(row % kRowBlock);
    const int8_t* q = a.quant.q + group0 * kGroup;
    const float* scale = a.quant.scale + group0;
    const float* sum = a.quant.sum + group0;
    const int32_t* isum = a.quant.isum + group0;
    const uint8_t* block = a.w.data + static_cast<size_t>(panel) * a.w.panel_bytes;

    F acc[MR];
    unroll<MR>([&](auto m) { acc[m] = V::zero(); });
    const bool prefetch = first == 0 && row == a.row_begin;
    for (int g = 0; g < groups; ++g) {
        if (prefetch) prefetch_next_panel<Format::block_bytes>(block, a.w.panel_bytes);
        typename V::Dot dot[MR];
        unroll<MR>([&](auto m) { dot[m] = Format::begin(isum[m]); });
        Format::template dots<MR>(block, first, q, dot);
        const F d = Format::scales(block, first);
        unroll<MR>([&](auto m) {
            acc[m] = V::fma(Format::end(dot[m]), V::mul(d, V::set1(scale[m])), acc[m]);
            acc[m] = Format::add_minimum(block, first, sum[m], acc[m]);
        });
        block += Format::block_bytes;
        q += kRowBlock * kGroup;
        scale += kRowBlock;
        sum += kRowBlock;
        isum += kRowBlock;
    }
    const int output = panel * kPanel + first;
    unroll<MR>([&](auto m) { store_outputs<V>(a, row + m, output, acc[m]); });
}

// Splits [begin, end) into pieces of at most MR rows that do not straddle a row block.
template <int MR, class Visit>
inline void for_row_tiles(int begin, int end, const Visit& visit) {
    for (int row = begin; row < end;) {
        const int block_end = (row / kRowBlock + 1) * kRowBlock;
        const int left = (block_end < end ? block_end : end) - row;
        const int rows = left < MR ? left : MR;
        with_rows<MR>(rows, [&]<int N>() { visit.template operator()<N>(row); });
        row += rows;
    }
}

template <class V, class Format>
void linear_quant(const LinearArgs& a) {
    for (int panel = a.panel_begin; panel < a.panel_end; ++panel) {
        for (int first = 0; first < kPanel; first += V::lanes) {
            for_row_tiles<V::quant_rows>(a.row_begin, a.row_end,
                                         [&]<int MR>(int row) { quant_tile<V, Format, MR>(a, panel, first, row); });
        }
    }
}

template <class V, class T, int MR>
void float_tile(const LinearArgs& a, int panel, int first, int row) {
    using F = typename V::F;
    constexpr int kChains = 4;
    const T* w = reinterpret_cast<const T*>(a.w.data + static_cast<size_t>(panel) * a.w.panel_bytes) + first;
    const float* x = a.x + static_cast<size_t>(row) * a.x_stride;

    F acc[MR][kChains];
    for (int m = 0; m < MR; ++m) {
        for (int c = 0; c < kChains; ++c) acc[m][c] = V::zero();
    }
    int k = 0;
    for (; k + kChains <= a.w.inputs; k += kChains) {
        for (int c = 0; c < kChains; ++c) {
            const F wv = V::load(w + static_cast<size_t>(k + c) * kPanel);
            for (int m = 0; m < MR; ++m) {
                acc[m][c] = V::fma(wv, V::set1(x[static_cast<size_t>(m) * a.x_stride + k + c]), acc[m][c]);
            }
        }
    }
    for (int c = 0; k + c < a.w.inputs; ++c) {
        const F wv = V::load(w + static_cast<size_t>(k + c) * kPanel);
        for (int m = 0; m < MR; ++m) {
            acc[m][c] = V::fma(wv, V::set1(x[static_cast<size_t>(m) * a.x_stride + k + c]), acc[m][c]);
        }
    }
    const int output = panel * kPanel + first;
    for (int m = 0; m < MR; ++m) {
        const F total = V::add(V::add(acc[m][0], acc[m][1]), V::add(acc[m][2], acc[m][3]));
        store_outputs<V>(a, row + m, output, total);
    }
}

template <class V, class T>
void linear_float(const LinearArgs& a) {
    for (int panel = a.panel_begin; panel < a.panel_end; ++panel) {
        for (int first = 0; first < kPanel; first += V::lanes) {
            for_row_tiles<V::float_rows>(a.row_begin, a.row_end,
                                         [&]<int MR>(int row) { float_tile<V, T, MR>(a, panel, first, row); });
        }
    }
}

}  // namespace
}  // namespace segue

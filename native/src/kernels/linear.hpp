// out = x · Wᵀ for packed matrices.
//
// Integer weights: each output takes its format's chain (kernels/formats.hpp) over groups of 32 in ascending order,
// whatever the number of rows. Float weights: four chains, k mod 4, added in pairs.
#pragma once

#include "kernels/formats.hpp"
#include "kernels/rows.hpp"
#include "kernels/table.hpp"
#include "kernels/unroll.hpp"

namespace segue {
namespace {

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
template <class Block>
[[gnu::always_inline]] inline void prefetch_next_panel(const Block* block, size_t panel_bytes) {
    const uint8_t* next = reinterpret_cast<const uint8_t*>(block) + panel_bytes;
    for (size_t line = 0; line < sizeof(Block); line += 64) __builtin_prefetch(next + line);
}

// MR rows of one row block by `lanes` outputs of one panel, from output `first` on.
template <class V, class Format, int MR>
void quant_tile(const LinearArgs& a, int panel, int first, int row) {
    using F = typename V::F;
    using Block = typename Format::Packed;
    GroupInputs x = inputs_of(a.quant, row);
    const Block* block = reinterpret_cast<const Block*>(a.w.data + static_cast<size_t>(panel) * a.w.panel_bytes);

    F acc[MR];
    unroll<MR>([&](auto m) { acc[m] = V::zero(); });
    const bool prefetch = first == 0 && row == a.row_begin;
    for (int left = a.quant.groups / Format::groups; left > 0; --left, ++block) {
        if (prefetch) prefetch_next_panel(block, a.w.panel_bytes);
        Format::template add_block<MR>(*block, first, x, acc);
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

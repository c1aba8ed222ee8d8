// The kernel table of the vector type `Vec` that was included before this.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/linear.hpp"
#include "kernels/rows.hpp"

namespace segue {
namespace {

template <class... Formats>
constexpr void add_integer_formats(KernelTable& table) {
    ((table.linear[index_of(Formats::type)] = linear_quant<Vec, Formats>), ...);
}

constexpr KernelTable make_kernel_table() {
    KernelTable table{
        .name = Vec::name,
        .linear = {},
        .linear_scratch_bytes = 0,
        .rms_norm = rms_norm<Vec>,
        .layer_norm = layer_norm<Vec>,
        .activate = activate<Vec>,
        .glu = glu<Vec>,
        .soft_cap = soft_cap<Vec>,
        .quantise_row = quantise_row<Vec>,
        .rope = rope<Vec>,
        .store_kv_f16 = store_kv<Vec, Half>,
        .store_kv_f32 = store_kv<Vec, float>,
        .attention_f16 = attention<Vec, Half>,
        .attention_f32 = attention<Vec, float>,
        .merge_attention = merge_attention<Vec>,
        .argmax = argmax<Vec>,
    };
    table.linear[index_of(TensorType::kF32)] = linear_float<Vec, float>;
    table.linear[index_of(TensorType::kF16)] = linear_float<Vec, Half>;
    table.linear[index_of(TensorType::kBF16)] = linear_float<Vec, BFloat16>;
    add_integer_formats<Q4_0<Vec>, Q4_1<Vec>, Q5_0<Vec>, Q5_1<Vec>, Q8_0<Vec>, Q2_K<Vec>, Q3_K<Vec>, Q4_K<Vec>,
                        Q5_K<Vec>, Q6_K<Vec>, IQ4_NL<Vec>, IQ4_XS<Vec>, MXFP4<Vec>>(table);
    return table;
}

}  // namespace
}  // namespace segue

// The kernel table of the vector type `Vec` that was included before this.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/linear.hpp"
#include "kernels/rows.hpp"

namespace segue {
namespace {

constexpr KernelTable make_kernel_table() {
    return {
        .name = Vec::name,
        .linear = {linear_quant<Vec, U4Format<Vec>>, linear_quant<Vec, I8Format<Vec>>, linear_float<Vec, float>,
                   linear_float<Vec, Half>, linear_float<Vec, BFloat16>},
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
}

}  // namespace
}  // namespace segue

// The kernels' interface: one table of functions for each instruction set, all with the same meaning.
//
// Every kernel computes each output element in one order that depends on nothing but the model: not on how
// many rows a call has, which rows they are, or which panels of outputs it is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.hpp"
#include "half.hpp"

namespace segue {

constexpr int kPanel = 16;      // outputs in a panel of a packed matrix
constexpr int kGroup = 32;      // elements along K that share a scale
constexpr int kRowBlock = 16;   // rows of quantised activations stored together
constexpr int kTileKeys = 64;   // keys in an attention tile, at positions [64 t, 64 t + 64)
constexpr int kRangeTiles = 4;  // tiles in a range: the unit in which one query's keys may be split over threads
constexpr int kRangeKeys = kTileKeys * kRangeTiles;
constexpr int kMaxQueryRows = 48;  // query rows (queries × heads of one KV head) that an attention call takes

// GGML's numbers, as segue.weights.model_file.TensorType.
enum class TensorType {
    kF32 = 0,
    kF16 = 1,
    kQ4_0 = 2,
    kQ4_1 = 3,
    kQ5_0 = 6,
    kQ5_1 = 7,
    kQ8_0 = 8,
    kQ2_K = 10,
    kQ3_K = 11,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
    kIQ4_NL = 20,
    kIQ4_XS = 23,
    kBF16 = 30,
    kMXFP4 = 39,
};
constexpr size_t kTensorTypes = 40;
constexpr size_t index_of(TensorType type) { return static_cast<size_t>(type); }

// Whether products are computed in integers, from quantised activations.
constexpr bool is_integer(TensorType type) {
    return type != TensorType::kF32 && type != TensorType::kF16 && type != TensorType::kBF16;
}

// As in segue/models/program.py.
enum class Function { kSilu, kGelu, kGeluTanh, kRelu };

// A packed matrix [outputs, inputs] (kernels/packed.hpp); panels beyond `outputs` are padded with zeros.
struct MatrixView {
    const uint8_t* data;
    size_t panel_bytes;
    int outputs;
    int inputs;
};

// Activations as int8 in groups of 32 along K, x ≈ scale · q. Rows are stored in blocks of 16:
//   q     [block][group][16 rows][32]
//   scale [block][group][16 rows]
//   sum   [block][group][16 rows]   scale · Σ q
//   isum  [block][group][16 rows]   Σ q
//   half_isum [block][group][16 rows][2]   Σ q of each 16
struct QuantView {
    int8_t* q;
    float* scale;
    float* sum;
    int32_t* isum;
    int32_t* half_isum;
    int groups;
};

// out[r][n] (+)= scale · (Σ_k x[r][k] · w[n][k] + bias[n]) for rows [row_begin, row_end) and panels [panel_begin,
// panel_end) of outputs. Row r of `out` starts at out + r · out_stride. Integer formats read `quant`, float formats `x`
// (row stride x_stride).
struct LinearArgs {
    MatrixView w;
    QuantView quant;
    const float* x;
    size_t x_stride;
    float* out;
    size_t out_stride;
    int row_begin;
    int row_end;
    int panel_begin;
    int panel_end;
    const float* bias;  // [outputs, rounded up to a panel] or null
    float scale;
    bool accumulate;
    void* scratch;  // linear_scratch_bytes of the table, at a cache line's boundary
};

// One KV head of one sequence in the paged cache. Block b of this layer and head starts at base + b · block_stride
// (elements); in it K is [head_dim][block_size] and V, at + v_offset, is [block_size][v_stride].
struct KvView {
    const void* base;
    size_t block_stride;
    size_t v_offset;
    const int32_t* blocks;
    int block_size;
    int head_dim;
    int v_stride;
};

// Running state of the online softmax of one query row over some of its keys.
// Laid out as [rows] maxima, [rows] sums, [rows][v_stride] weighted sums of V.
struct SoftmaxState {
    float* max;
    float* sum;
    float* acc;
};

// Attention of `queries` consecutive positions from `position`, each with `heads` query heads, to one KV head.
// Query (i, h) is q[i · q_stride + h · head_dim ...], rotated and scaled; its result goes to the same place of `out`.
// It sees the keys from first_key on. Only ranges [range_begin, range_end) of keys are attended to. With `partial`, the
// state of the one range is stored there instead; `merge_attention` combines them.
struct AttentionArgs {
    KvView kv;
    const float* q;
    size_t q_stride;
    float* out;
    size_t out_stride;
    int queries;
    int heads;
    int position;
    int window;          // 0: none
    float softcap;       // 0: none
    const float* sinks;  // by head, or null
    int range_begin;
    int range_end;
    float* partial;
    float* scratch;  // attention_scratch_floats() of them
};

// The first key that a query at `position` sees.
constexpr int first_key(int position, int window) {
    return window > 0 && position >= window ? position + 1 - window : 0;
}

// Floats that one partial state of `rows` query rows takes.
constexpr size_t softmax_state_floats(int rows, int v_stride) {
    return static_cast<size_t>(rows) * static_cast<size_t>(v_stride + 2);
}

constexpr size_t attention_scratch_floats(int head_dim, int v_stride) {
    const size_t rows = kMaxQueryRows;
    return rows * static_cast<size_t>(head_dim)                                         // queries
           + 2 * rows * static_cast<size_t>(v_stride + 2)                               // two softmax states
           + rows * kTileKeys                                                           // scores
           + static_cast<size_t>(kTileKeys) * static_cast<size_t>(head_dim)             // K tile, transposed
           + static_cast<size_t>(kTileKeys) * static_cast<size_t>(v_stride)             // V tile
           + 2 * static_cast<size_t>(kTileKeys) * static_cast<size_t>(v_stride) + 256;  // gathered 16-bit tiles
}

// Merges the states of `ranges` consecutive ranges, stored one after the other at `partials`, into args.out.
struct MergeArgs {
    float* partials;  // the first is overwritten
    int first_range;
    int ranges;
    int window;
    const float* sinks;
    int v_stride;
    int head_dim;
    int queries;
    int heads;
    int position;
    float* out;
    size_t out_stride;
};

struct RopeArgs {
    const float* cos;  // [rope_dim], see RopeTable
    const float* sin;
    int rope_dim;
    int head_dim;
    bool interleaved;
};

struct KernelTable {
    const char* name;

    // By type: linear[index_of(type)].
    void (*linear[kTensorTypes])(const LinearArgs& args);
    size_t linear_scratch_bytes;

    // y = x / sqrt(mean(x²) + eps) · weight, over n elements.
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);
    // y = (x - mean(x)) / sqrt(var(x) + eps) · weight + bias, over n elements.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* y);
    // y = function(x[:n])
    void (*activate)(Function function, const float* x, int n, float* y);
    // y = function(x[:n]) · x[n:]
    void (*glu)(Function function, const float* x, int n, float* y);
    // x = cap · tanh(x / cap), over n elements.
    void (*soft_cap)(float* x, float cap, int n);
    // Quantises x [32 · quant.groups] as row `row`.
    void (*quantise_row)(const float* x, const QuantView& quant, int row);

    // Rotates `heads` heads at x in place and multiplies all their elements by `scale`.
    void (*rope)(float* x, int heads, float scale, const RopeArgs& args);
    // Stores a position's k and v [head_dim] in slot `slot` of a block (K transposed, V padded with zeros). What of k
    // is infinite there becomes NaN.
    void (*store_kv_f16)(const float* k, const float* v, const KvView& kv, void* block, int slot);
    void (*store_kv_f32)(const float* k, const float* v, const KvView& kv, void* block, int slot);

    void (*attention_f16)(const AttentionArgs& args);
    void (*attention_f32)(const AttentionArgs& args);
    void (*merge_attention)(const MergeArgs& args);

    // The lowest index of the largest of n > 0 logits, or -1 if one of them is not finite.
    int (*argmax)(const float* logits, int n);
};

const KernelTable& portable_kernels();
#if defined(__x86_64__)
const KernelTable& avx2_kernels();
const KernelTable& avx2_vnni_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_amx_kernels();
// Asks the system for the matrix registers; false where it has none.
bool request_amx();
#endif

}  // namespace segue

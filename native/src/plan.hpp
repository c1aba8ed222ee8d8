// A program compiled for the kernels.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "kv_cache.hpp"
#include "program.hpp"
#include "thread_pool.hpp"
#include "weights.hpp"

namespace segue {

// Index of a row buffer.
using BufferId = int;

// Where the input rows of a matrix come from: a buffer, perhaps through a norm or an activation.
struct Source {
    enum class Kind { kRows, kNorm, kSiluMul };
    Kind kind;
    BufferId buffer;
    int width;  // of the rows that come out
    const float* weight = nullptr;
    float eps = 0.0f;
};

struct LinearPart {
    const PackedMatrix* matrix;
    int first_output;
};

struct EmbedOp {
    const Tensor* weight;
    BufferId out;
};
// Rows of a source, stored: for what others than linear layers read.
struct StoreOp {
    Source source;
    BufferId out;
};
struct LinearOp {
    Source source;
    std::vector<LinearPart> parts;  // one, unless stacked weights have several formats
    BufferId out;
    bool accumulate;
};
struct AttentionOp {
    BufferId qkv;
    BufferId out;
    int layer;
    size_t heads;  // into Plan::heads
    size_t rope;   // into Plan::ropes
};
struct LogitsOp {
    Source source;
    std::vector<LinearPart> parts;
};
using PlanOp = std::variant<EmbedOp, StoreOp, LinearOp, AttentionOp, LogitsOp>;

// A program with its weights packed. Norms and activations that only linear layers read are part of those.
struct Plan {
    std::vector<PlanOp> ops;
    std::vector<int> widths;   // by buffer
    std::vector<bool> stored;  // by buffer: whether it exists in memory
    std::vector<KvLayer> kv_layers;
    std::vector<Heads> heads;          // those that differ
    std::vector<Rope> ropes;           // those that differ
    int max_inputs = 0;                // of any matrix
    size_t tail = 0;                   // first operation after the last attention: from here on only wanted rows count
    std::vector<BufferId> tail_reads;  // buffers whose rows from before it still count
    std::map<std::string, Tensor> tensors;
    std::vector<std::unique_ptr<float[]>> vectors;
    std::vector<std::unique_ptr<PackedMatrix>> matrices;
};

// Packs the weights and fuses operations. Raises ModelFileError for a tensor that is missing, has the wrong shape or
// cannot be computed with, and for operations that contradict each other.
Plan compile(const Program& program, std::map<std::string, Tensor> tensors, ThreadPool& pool);

}  // namespace segue

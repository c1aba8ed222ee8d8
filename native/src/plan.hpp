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
    enum class Kind { kRows, kRMSNorm, kLayerNorm, kActivation, kGLU };
    Kind kind;
    BufferId buffer;
    int width;  // of the rows that come out
    const float* weight = nullptr;
    const float* bias = nullptr;
    float eps = 0.0f;
    Function function = Function::kSilu;
};

struct LinearPart {
    const PackedMatrix* matrix;
    int first_output;
};

// scale · (x · Wᵀ + bias)
struct Products {
    std::vector<LinearPart> parts;  // one, unless stacked weights have several formats
    const float* bias;              // or null
    float scale;
};

struct EmbedOp {
    const Tensor* weight;
    BufferId out;
    float scale;
    const Tensor* positions;  // or null
    int first_position;
};
// Rows of a source, stored or added: for what others than linear layers read.
struct StoreOp {
    Source source;
    BufferId out;
    bool accumulate;
};
struct NormPartsOp {
    BufferId buffer;
    const float* weight;
    int first;
    int count;
    int width;
    float eps;
};
struct LinearOp {
    Source source;
    Products products;
    BufferId out;
    bool accumulate;
};
struct AttentionOp {
    BufferId qkv;
    BufferId out;
    int layer;
    size_t shape;  // into Plan::shapes
    size_t rope;   // into Plan::ropes
    float scale;
    float softcap;
    const float* sinks;
};
// One of the networks of an ExpertsOp.
struct Expert {
    Products gate_up;
    Products down;
};
struct ExpertsOp {
    Source source;
    Products router;
    std::vector<Expert> experts;
    BufferId out;
    int used;
    int width;  // of a network
    Function function;
};
struct LogitsOp {
    Source source;
    Products products;
    float softcap;
};
using PlanOp = std::variant<EmbedOp, StoreOp, NormPartsOp, LinearOp, AttentionOp, ExpertsOp, LogitsOp>;

// A program with its weights packed. Norms and activations that only linear layers read are part of those.
struct Plan {
    std::vector<PlanOp> ops;
    std::vector<int> widths;   // by buffer
    std::vector<bool> stored;  // by buffer: whether it exists in memory
    std::vector<KvLayer> kv_layers;
    std::vector<AttentionShape> shapes;  // those that differ
    std::vector<Rope> ropes;             // those that differ
    int max_inputs = 0;                  // of any matrix
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

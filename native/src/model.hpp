// A program compiled for the kernels, and its execution.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "kernels/table.hpp"
#include "kv_cache.hpp"
#include "rope_table.hpp"
#include "step.hpp"
#include "thread_pool.hpp"
#include "weights.hpp"

namespace segue {

struct ModelSizes {
    int vocab_size;
    int num_layers;
    int num_heads;
    int num_kv_heads;
    int head_dim;
    int max_model_len;
    double rope_theta;
    int rope_dim;
    bool rope_interleaved;
    std::vector<double> rope_factors;
};

// An operation as segue/models/program.py has it; each kind uses the fields it needs.
struct ProgramOp {
    enum class Kind { kEmbed, kRmsNorm, kLinear, kAttention, kSiluMul, kLogits };
    Kind kind;
    std::string x;
    std::string norm;
    std::vector<std::string> weights;
    std::string out;
    float eps = 0.0f;
    bool accumulate = false;
    int layer = 0;
};

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
};
struct LogitsOp {
    Source source;
    std::vector<LinearPart> parts;
};
using PlanOp = std::variant<EmbedOp, StoreOp, LinearOp, AttentionOp, LogitsOp>;

// A program with its weights packed. Norms and activations that only linear layers read are part of those.
struct Plan {
    std::vector<PlanOp> ops;
    std::vector<int> widths;           // by buffer
    std::vector<bool> stored;          // by buffer: whether it exists in memory
    int max_inputs = 0;                // of any matrix
    size_t tail = 0;                   // first operation after the last attention: from here on only wanted rows count
    std::vector<BufferId> tail_reads;  // buffers whose rows from before it still count
    std::map<std::string, Tensor> tensors;
    std::vector<std::unique_ptr<float[]>> vectors;
    std::vector<std::unique_ptr<PackedMatrix>> matrices;
};

// Packs the weights and fuses operations. Raises ModelFileError for a tensor that is missing, has the wrong shape or
// cannot be computed with.
Plan compile(const std::vector<ProgramOp>& program, const std::map<std::string, int>& widths,
             std::map<std::string, Tensor> tensors, const ModelSizes& sizes, ThreadPool& pool);

// Int8 and f32 rows for the linear kernels, for up to `rows` rows of up to `inputs` elements.
struct Activations {
    Buffer<int8_t> q;
    Buffer<float> scale;
    Buffer<float> sum;
    Buffer<int32_t> isum;
    Buffer<float> rows;
    size_t stride = 0;

    void reserve(int rows, int inputs);
    QuantView quant(int inputs);
};

// One thread's scratch.
struct Workspace {
    Buffer<float> row;
    Activations activations;
    Buffer<uint8_t> linear;
    Buffer<float> attention;
    std::vector<float> sampling;
    std::vector<float> masked;  // a row of logits without the ids that a mask excludes
};

class Model {
   public:
    // The memory of `tensors` must outlive the model.
    Model(ModelSizes sizes, const std::vector<ProgramOp>& program, const std::map<std::string, int>& widths,
          std::map<std::string, Tensor> tensors, const KernelTable& kernels, int threads, bool kv_f32);

    void allocate_kv(int64_t num_blocks, int64_t block_size) {
        kv_ = KvCache();
        kv_ = KvCache(kv_shape_, num_blocks, block_size);
    }
    void release_kv() { kv_ = KvCache(); }
    StepOutput forward(const StepInput& input) { return execute(input, kv_, nullptr); }
    // out [tokens, vocab]: the logits at every position, computed with a KV of their own.
    void logits(const std::vector<int32_t>& tokens, float* out);

    const ModelSizes& sizes() const { return sizes_; }
    const KvCache& kv() const { return kv_; }
    size_t kv_bytes_per_token() const { return kv_shape_.bytes_per_token(); }
    const char* isa() const { return kernels_.name; }
    int threads() const { return pool_.size(); }

   private:
    friend class Worker;

    // With logits_out, the logits of every input go there instead of being sampled.
    StepOutput execute(const StepInput& input, const KvCache& kv, float* logits_out);

    ModelSizes sizes_;
    KvShape kv_shape_;
    const KernelTable& kernels_;
    ThreadPool pool_;
    Plan plan_;
    RopeTable rope_;
    KvCache kv_;

    std::vector<Buffer<float>> rows_;    // by buffer
    std::vector<Workspace> workspaces_;  // by thread
    Activations shared_;
    Buffer<float> logits_;
    Buffer<float> partials_;
};

}  // namespace segue

// One step while it is computed: what its threads share.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "kernels/table.hpp"
#include "kv_cache.hpp"
#include "plan.hpp"
#include "rope_table.hpp"
#include "step.hpp"
#include "step_layout.hpp"
#include "thread_pool.hpp"

namespace segue {

constexpr int kSharedRows = 128;  // up to this many rows, threads share the outputs of a matrix
constexpr int kChunkRows = 256;   // the most rows a thread takes through a run of operations at once
constexpr int kLogitRows = 32;    // rows of logits computed together

inline size_t row_stride(int width) { return static_cast<size_t>(round_up(width, kPanel)) + kPanel; }

// Int8 and f32 rows for the linear kernels, for up to `rows` rows of up to `inputs` elements.
struct Activations {
    Buffer<int8_t> q;
    Buffer<float> scale;
    Buffer<float> sum;
    Buffer<int32_t> isum;
    Buffer<int32_t> half_isum;
    Buffer<float> rows;
    size_t stride = 0;

    void reserve(int rows, int inputs, bool floats);
    QuantView quant(int inputs) {
        return {q.data(), scale.data(), sum.data(), isum.data(), half_isum.data(), inputs / kGroup};
    }
};

// One of a row's experts.
struct Route {
    int expert;
    float weight;
};

// One thread's scratch.
struct Workspace {
    Buffer<float> row;
    Buffer<float> scores;       // of a router
    Buffer<float> gate_up;      // of an expert, and
    Buffer<float> expert_rows;  // what it gives
    Activations activations;
    Buffer<uint8_t> linear;
    Buffer<float> attention;
    std::vector<float> sampling;
    std::vector<float> masked;  // a row of logits without the ids that a mask excludes
};

// What steps compute in. Nothing in it outlives a step but the memory itself.
struct Scratch {
    Scratch(const Plan& plan, int vocab_size, const KernelTable& kernels, int threads);
    // Makes room for a step.
    void reserve(const Plan& plan, const StepLayout& layout);

    void reserve_experts(const ExpertsOp& op, const Plan& plan);

    std::vector<Buffer<float>> rows;    // by buffer
    std::vector<Workspace> workspaces;  // by thread
    Activations shared;
    Buffer<float> logits;
    Buffer<float> partials;
    std::vector<Route> routes;  // of up to kChunkRows rows, by expert
    Buffer<float> expert_rows;  // of the same experts
};

// A count that threads take numbers from, alone in its cache line.
struct alignas(64) Counter {
    std::atomic<int> value{0};
};

struct Execution {
    Execution(const Plan& plan, const std::vector<RopeTable>& ropes, const KernelTable& kernels, ThreadPool& pool,
              Scratch& scratch, const StepInput& input, const StepLayout& layout, const KvCache& kv, float* logits_out);

    size_t stride(BufferId buffer) const { return row_stride(plan.widths[static_cast<size_t>(buffer)]); }
    float* row(BufferId buffer, int r) const {
        return scratch.rows[static_cast<size_t>(buffer)].data() + static_cast<size_t>(r) * stride(buffer);
    }
    const int32_t* blocks_of(int sequence) const {
        return input.blocks.data() + input.sequences[static_cast<size_t>(sequence)].first_block;
    }

    const Plan& plan;
    const std::vector<RopeTable>& ropes;  // as Plan::ropes
    const KernelTable& kernels;
    ThreadPool& pool;
    Scratch& scratch;
    const StepInput& input;
    const StepLayout& layout;
    const KvCache& kv;
    float* logits_out;                          // the logits of every row go there, if not null
    std::vector<Counter> counters;              // by phase
    std::vector<std::vector<Counter>> missing;  // by shape and range group: ranges not finished
    StepOutput output;
};

// One thread's part of the step: computes its rows, and draws and scores what is wanted.
void work(Execution& run, int thread);

}  // namespace segue

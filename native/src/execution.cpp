#include "execution.hpp"

#include <algorithm>
#include <numeric>

namespace segue {

void Activations::reserve(int max_rows, int inputs, bool floats) {
    const size_t padded = static_cast<size_t>(round_up(max_rows, kRowBlock));
    const size_t groups = static_cast<size_t>(ceil_div(inputs, kGroup));
    stride = static_cast<size_t>(round_up(inputs, kPanel));
    q.reserve_zeroed(padded * groups * kGroup);
    scale.reserve_zeroed(padded * groups);
    sum.reserve_zeroed(padded * groups);
    isum.reserve_zeroed(padded * groups);
    half_isum.reserve_zeroed(2 * padded * groups);
    if (floats) rows.reserve_zeroed(static_cast<size_t>(max_rows) * stride);
}

Scratch::Scratch(const Plan& plan, int vocab_size, const KernelTable& kernels, int threads)
    : rows(plan.widths.size()), workspaces(static_cast<size_t>(threads)) {
    const bool floats = std::any_of(plan.matrices.begin(), plan.matrices.end(),
                                    [](const auto& matrix) { return !is_integer(matrix->type); });
    const int widest = std::accumulate(plan.widths.begin(), plan.widths.end(), 0,
                                       [](int most, int width) { return std::max(most, width); });
    for (Workspace& work : workspaces) {
        work.row.reserve_zeroed(static_cast<size_t>(widest) + kPanel);
        work.linear.reserve(kernels.linear_scratch_bytes);
        for (const KvLayer& layer : plan.kv_layers) {
            work.attention.reserve(attention_scratch_floats(layer.head_dim, layer.v_stride()));
        }
        work.activations.reserve(kChunkRows, plan.max_inputs, floats);
    }
    for (const PlanOp& op : plan.ops) {
        if (const auto* experts = std::get_if<ExpertsOp>(&op)) reserve_experts(*experts, plan);
    }
    shared.reserve(kSharedRows, plan.max_inputs, floats);
    logits.reserve(kLogitRows * row_stride(vocab_size));
}

void Scratch::reserve_experts(const ExpertsOp& op, const Plan& plan) {
    const size_t out = row_stride(plan.widths[static_cast<size_t>(op.out)]);
    const auto used = static_cast<size_t>(op.used);
    for (Workspace& work : workspaces) {
        work.row.reserve_zeroed(static_cast<size_t>(op.width) + kPanel);
        work.scores.reserve_zeroed(row_stride(static_cast<int>(op.experts.size())));
        work.gate_up.reserve_zeroed(kChunkRows * row_stride(2 * op.width));
        work.expert_rows.reserve_zeroed(kChunkRows * out);
    }
    routes.resize(std::max(routes.size(), kChunkRows * used));
    expert_rows.reserve_zeroed(kChunkRows * used * out);
}

void Scratch::reserve(const Plan& plan, const StepLayout& layout) {
    for (size_t b = 0; b < rows.size(); ++b) {
        if (plan.stored[b]) rows[b].reserve_zeroed(static_cast<size_t>(layout.rows) * row_stride(plan.widths[b]));
    }
    partials.reserve(layout.partial_floats);
}

Execution::Execution(const Plan& plan, const std::vector<RopeTable>& ropes, const KernelTable& kernels,
                     ThreadPool& pool, Scratch& scratch, const StepInput& input, const StepLayout& layout,
                     const KvCache& kv, float* logits_out)
    : plan(plan),
      ropes(ropes),
      kernels(kernels),
      pool(pool),
      scratch(scratch),
      input(input),
      layout(layout),
      kv(kv),
      logits_out(logits_out) {
    constexpr size_t kPhasesPerOp = 2;
    constexpr size_t kPhasesPerSlice = 3;
    constexpr size_t kOtherPhases = 2;  // copies of blocks and of wanted rows
    constexpr size_t kPhasesPerExpertChunk = 3;
    const auto num_experts = static_cast<size_t>(std::count_if(
        plan.ops.begin(), plan.ops.end(), [](const PlanOp& op) { return std::holds_alternative<ExpertsOp>(op); }));
    const auto chunks = static_cast<size_t>(ceil_div(layout.rows, kChunkRows));
    counters = std::vector<Counter>(kOtherPhases + kPhasesPerOp * plan.ops.size() +
                                    kPhasesPerExpertChunk * num_experts * chunks +
                                    kPhasesPerSlice * (layout.wanted.size() / kLogitRows + 1));
    for (const AttentionItems& items : layout.attention) {
        std::vector<Counter>& counts = missing.emplace_back(items.groups.size());
        for (size_t g = 0; g < counts.size(); ++g) counts[g].value = items.groups[g].ranges;
    }
    output.tokens.resize(layout.num_samples);
    output.logprobs.resize(layout.num_samples);
    output.prompt_logprobs.resize(input.targets.size());
    output.errors.resize(input.sequences.size());
}

}  // namespace segue

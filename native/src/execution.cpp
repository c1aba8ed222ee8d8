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
    if (floats) rows.reserve_zeroed(static_cast<size_t>(max_rows) * stride);
}

Scratch::Scratch(const Plan& plan, int vocab_size, const KernelTable& kernels, int threads)
    : rows(plan.widths.size()), workspaces(static_cast<size_t>(threads)) {
    const bool floats = std::any_of(plan.matrices.begin(), plan.matrices.end(),
                                    [](const auto& matrix) { return !is_integer(matrix->format); });
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
    shared.reserve(kSharedRows, plan.max_inputs, floats);
    logits.reserve(kLogitRows * row_stride(vocab_size));
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
    counters = std::vector<Counter>(kOtherPhases + kPhasesPerOp * plan.ops.size() +
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

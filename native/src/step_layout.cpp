#include "step_layout.hpp"

#include <algorithm>

namespace segue {
namespace {

void add_rows(const SequenceInput& seq, size_t index, bool all_wanted, StepLayout& to) {
    for (int i = 0; i < seq.num_inputs; ++i) {
        to.positions.push_back(seq.start + i);
        to.sequences.push_back(static_cast<int32_t>(index));
        const bool sampled = seq.sampling != nullptr && i >= seq.num_tokens() - 1;
        const bool scored = i < seq.num_targets;
        if (!sampled && !scored && !all_wanted) continue;
        to.wanted.push_back({
            .sequence = index,
            .row = seq.first_input + i,
            .position = seq.start + i,
            .sampled = sampled,
            .sample = to.num_samples,
            .num_drafts = i - (seq.num_tokens() - 1),
            .scored = scored,
            .target = static_cast<size_t>(seq.first_target + i),
        });
        to.num_samples += sampled ? 1 : 0;
    }
    to.end = std::max(to.end, seq.start + seq.num_inputs);
}

}  // namespace

StepLayout lay_out(const StepInput& input, const std::vector<AttentionShape>& shapes, int threads, bool all_wanted) {
    StepLayout layout;
    for (size_t s = 0; s < input.sequences.size(); ++s) add_rows(input.sequences[s], s, all_wanted, layout);
    layout.rows = static_cast<int>(layout.positions.size());
    std::vector<bool> wanted(layout.positions.size());
    for (const WantedRow& row : layout.wanted) wanted[static_cast<size_t>(row.row)] = true;
    for (const AttentionShape& shape : shapes) {
        layout.attention.push_back(cut_attention(input, shape, wanted, threads));
        layout.partial_floats = std::max(layout.partial_floats, layout.attention.back().partial_floats);
    }
    return layout;
}

}  // namespace segue

// What the threads of one step need to know before they begin, the same for every layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention_items.hpp"
#include "program.hpp"
#include "step.hpp"

namespace segue {

// A row whose logits are wanted.
struct WantedRow {
    size_t sequence;
    int row;
    int position;
    bool sampled;
    size_t sample;   // index among sampled rows
    int num_drafts;  // drafts before the id that is drawn
    bool scored;
    size_t target;  // index among targets
};

struct StepLayout {
    int rows = 0;
    int end = 0;                     // above the highest position
    std::vector<int32_t> positions;  // by row
    std::vector<int32_t> sequences;  // by row
    std::vector<WantedRow> wanted;   // by row, ascending
    size_t num_samples = 0;
    std::vector<AttentionItems> attention;  // by shape, as Plan::shapes
    size_t partial_floats = 0;              // the most that an attention needs
};

// With `all_wanted`, the logits of every row are wanted, and nothing is sampled.
StepLayout lay_out(const StepInput& input, const std::vector<AttentionShape>& shapes, int threads, bool all_wanted);

}  // namespace segue

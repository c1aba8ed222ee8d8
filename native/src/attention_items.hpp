// How a step's attention is cut into items that threads take.
#pragma once

#include <cstddef>
#include <vector>

#include "program.hpp"
#include "step.hpp"

namespace segue {

// A part of one attention: some queries of one sequence, some heads of one KV head, some ranges of keys.
struct AttentionItem {
    int sequence;
    int kv_head;
    int first_head;  // of the KV head's query heads
    int heads;
    int first_query;  // of the sequence's inputs
    int queries;
    int range_begin;
    int range_end;
    bool split;  // it is one range of group `group`
    size_t group;

    int rows() const { return heads * queries; }
};

// The ranges of the same queries, when different threads may take them; the last to finish merges.
struct RangeGroup {
    size_t first_partial;  // into the partials, floats
    int first_range;
    int ranges;
};

// The items of every layer with the same shape. Which they are changes no result.
struct AttentionItems {
    std::vector<AttentionItem> all;   // the longest first
    std::vector<AttentionItem> last;  // those with a wanted row: all that the last attention needs
    std::vector<RangeGroup> groups;
    size_t partial_floats = 0;
};

// `wanted` says of each row whether its logits are.
AttentionItems cut_attention(const StepInput& input, const AttentionShape& shape, const std::vector<bool>& wanted,
                             int threads);

}  // namespace segue

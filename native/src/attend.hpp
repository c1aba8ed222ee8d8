// Attention of one step over the paged KV memory.
#pragma once

#include "execution.hpp"

namespace segue {

// Rotates q and k of rows [begin, end) and stores k and v.
void store_kv_rows(const Execution& run, const AttentionOp& op, int begin, int end);

// Computes one item, and merges the ranges of its group if it is the last of them. `scratch`: Workspace::attention.
void attend_item(Execution& run, const AttentionOp& op, const AttentionItem& item, float* scratch);

}  // namespace segue

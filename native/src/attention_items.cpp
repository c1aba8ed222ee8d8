#include "attention_items.hpp"

#include <algorithm>

#include "kernels/table.hpp"

namespace segue {
namespace {

// Cuts one sequence's attention. `split_ranges`: also along the keys.
void cut_sequence(const SequenceInput& seq, int sequence, const AttentionShape& shape, bool split_ranges,
                  AttentionItems& to) {
    const Heads& heads = shape.heads;
    const int v_stride = round_up(heads.head_dim, kPanel);
    const int item_heads = std::min(heads.group(), kMaxQueryRows);
    const int item_queries = std::max(1, kMaxQueryRows / item_heads);
    for (int first = 0; first < seq.num_inputs; first += item_queries) {
        const int queries = std::min(item_queries, seq.num_inputs - first);
        const int begin = first_key(seq.start + first, shape.window) / kRangeKeys;
        const int end = (seq.start + first + queries - 1) / kRangeKeys + 1;
        for (int kv_head = 0; kv_head < heads.num_kv_heads; ++kv_head) {
            for (int head = 0; head < heads.group(); head += item_heads) {
                AttentionItem item{
                    .sequence = sequence,
                    .kv_head = kv_head,
                    .first_head = head,
                    .heads = std::min(item_heads, heads.group() - head),
                    .first_query = first,
                    .queries = queries,
                    .range_begin = begin,
                    .range_end = end,
                    .split = split_ranges && end - begin > 1,
                    .group = to.groups.size(),
                };
                if (!item.split) {
                    to.all.push_back(item);
                    continue;
                }
                to.groups.push_back({to.partial_floats, begin, end - begin});
                to.partial_floats += static_cast<size_t>(end - begin) * softmax_state_floats(item.rows(), v_stride);
                for (int range = begin; range < end; ++range) {
                    item.range_begin = range;
                    item.range_end = range + 1;
                    to.all.push_back(item);
                }
            }
        }
    }
}

}  // namespace

AttentionItems cut_attention(const StepInput& input, const AttentionShape& shape, const std::vector<bool>& wanted,
                             int threads) {
    constexpr int kItemsPerThread = 4;  // fewer than this: cut along the keys too
    AttentionItems items;
    const bool split_ranges = static_cast<int>(wanted.size()) * shape.heads.num_kv_heads < kItemsPerThread * threads;
    for (size_t s = 0; s < input.sequences.size(); ++s) {
        cut_sequence(input.sequences[s], static_cast<int>(s), shape, split_ranges, items);
    }
    const auto sequence_of = [&](const AttentionItem& item) -> const SequenceInput& {
        return input.sequences[static_cast<size_t>(item.sequence)];
    };
    const auto cost = [&](const AttentionItem& item) {
        const int keys = std::min(item.range_end * kRangeKeys, sequence_of(item).start + item.first_query);
        return static_cast<int64_t>(item.rows()) * (keys - item.range_begin * kRangeKeys + kTileKeys);
    };
    std::stable_sort(items.all.begin(), items.all.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
    for (const AttentionItem& item : items.all) {
        const auto first = wanted.begin() + sequence_of(item).first_input + item.first_query;
        if (std::find(first, first + item.queries, true) != first + item.queries) items.last.push_back(item);
    }
    return items;
}

}  // namespace segue

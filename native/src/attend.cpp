#include "attend.hpp"

namespace segue {

void store_kv_rows(const Execution& run, const AttentionOp& op, int begin, int end) {
    const Heads& heads = run.plan.shapes[op.shape].heads;
    const Rope& rope = run.plan.ropes[op.rope];
    const RopeTable& angles = run.ropes[op.rope];
    const auto store = run.kv.shape().f32 ? run.kernels.store_kv_f32 : run.kernels.store_kv_f16;
    const int block_size = run.kv.block_size();
    for (int r = begin; r < end; ++r) {
        const int position = run.layout.positions[static_cast<size_t>(r)];
        const RopeArgs args{angles.cos(position), angles.sin(position), rope.dim, heads.head_dim, rope.interleaved};
        float* q = run.row(op.qkv, r);
        float* k = q + heads.num_heads * heads.head_dim;
        const float* v = k + heads.num_kv_heads * heads.head_dim;
        run.kernels.rope(q, heads.num_heads, op.scale, args);
        run.kernels.rope(k, heads.num_kv_heads, 1.0f, args);
        const int32_t* blocks = run.blocks_of(run.layout.sequences[static_cast<size_t>(r)]);
        for (int h = 0; h < heads.num_kv_heads; ++h) {
            store(k + h * heads.head_dim, v + h * heads.head_dim, run.kv.view(op.layer, h, blocks),
                  run.kv.block(op.layer, h, blocks[position / block_size]), position % block_size);
        }
    }
}

void attend_item(Execution& run, const AttentionOp& op, const AttentionItem& item, float* scratch) {
    const auto& [heads, window] = run.plan.shapes[op.shape];
    const SequenceInput& seq = run.input.sequences[static_cast<size_t>(item.sequence)];
    const int head = item.kv_head * heads.group() + item.first_head;
    const int first_row = seq.first_input + item.first_query;
    AttentionArgs args{
        .kv = run.kv.view(op.layer, item.kv_head, run.blocks_of(item.sequence)),
        .q = run.row(op.qkv, first_row) + head * heads.head_dim,
        .q_stride = run.stride(op.qkv),
        .out = run.row(op.out, first_row) + head * heads.head_dim,
        .out_stride = run.stride(op.out),
        .queries = item.queries,
        .heads = item.heads,
        .position = seq.start + item.first_query,
        .window = window,
        .softcap = op.softcap,
        .sinks = op.sinks == nullptr ? nullptr : op.sinks + head,
        .range_begin = item.range_begin,
        .range_end = item.range_end,
        .partial = nullptr,
        .scratch = scratch,
    };
    const auto attention = run.kv.shape().f32 ? run.kernels.attention_f32 : run.kernels.attention_f16;
    if (!item.split) return attention(args);

    const RangeGroup& group = run.layout.attention[op.shape].groups[item.group];
    float* partials = run.scratch.partials.data() + group.first_partial;
    args.partial = partials + static_cast<size_t>(item.range_begin - group.first_range) *
                                  softmax_state_floats(item.rows(), args.kv.v_stride);
    attention(args);
    std::atomic<int>& missing = run.missing[op.shape][item.group].value;
    if (missing.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    missing.store(group.ranges, std::memory_order_relaxed);  // for the next layer
    run.kernels.merge_attention({
        .partials = partials,
        .first_range = group.first_range,
        .ranges = group.ranges,
        .window = window,
        .sinks = args.sinks,
        .v_stride = args.kv.v_stride,
        .head_dim = heads.head_dim,
        .queries = item.queries,
        .heads = item.heads,
        .position = args.position,
        .out = args.out,
        .out_stride = args.out_stride,
    });
}

}  // namespace segue

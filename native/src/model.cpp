// Executes a plan.
//
// Between two attentions every operation works on single rows. With many rows in a step, each thread takes chunks
// of rows through the whole run of operations; with few, all threads share the outputs of each matrix. Which of the
// two, and which thread does what, changes no result.
#include "model.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <numeric>

namespace segue {
namespace {

constexpr int kSharedRows = 128;         // up to this many rows, threads share the outputs of a matrix
constexpr int kPrivateRows = kRowBlock;  // up to this many, each thread prepares all input rows itself
constexpr int kChunkRows = 256;          // the most rows a thread takes through a run of operations at once
constexpr int kLogitRows = 32;           // rows of logits computed together
constexpr int kLogitsPadding = 16;       // keeps equal columns of rows out of one cache set

size_t row_stride(int width) { return static_cast<size_t>(round_up(width, kPanel)) + kPanel; }

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
    int ranges;
};

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

// What one execution needs to know, the same for every layer.
struct Step {
    int rows = 0;
    std::vector<int32_t> positions;         // by row
    std::vector<int32_t> sequences;         // by row
    std::vector<AttentionItem> items;       // the longest first
    std::vector<AttentionItem> last_items;  // those with a wanted row: all that the last attention needs
    std::vector<RangeGroup> groups;
    size_t partial_floats = 0;
    std::vector<WantedRow> wanted;
    size_t num_samples = 0;
};

void add_wanted_rows(const StepInput& input, size_t index, Step& step) {
    const SequenceInput& seq = input.sequences[index];
    for (int i = 0; i < seq.num_inputs; ++i) {
        const bool sampled = seq.sampling != nullptr && i >= seq.num_tokens() - 1;
        const bool scored = i < seq.num_targets;
        if (!sampled && !scored) continue;
        step.wanted.push_back({
            .sequence = index,
            .row = seq.first_input + i,
            .position = seq.start + i,
            .sampled = sampled,
            .sample = step.num_samples,
            .num_drafts = i - (seq.num_tokens() - 1),
            .scored = scored,
            .target = static_cast<size_t>(seq.first_target + i),
        });
        step.num_samples += sampled ? 1 : 0;
    }
}

// Cuts one sequence's attention into items. `split_ranges`: also along the keys.
void add_attention_items(const SequenceInput& seq, int sequence, const ModelSizes& sizes, bool split_ranges,
                         int v_stride, Step& step) {
    const int group_heads = sizes.num_heads / sizes.num_kv_heads;
    const int item_heads = std::min(group_heads, kMaxQueryRows);
    const int item_queries = std::max(1, kMaxQueryRows / item_heads);
    for (int first = 0; first < seq.num_inputs; first += item_queries) {
        const int queries = std::min(item_queries, seq.num_inputs - first);
        const int ranges = (seq.start + first + queries - 1) / kRangeKeys + 1;
        for (int kv_head = 0; kv_head < sizes.num_kv_heads; ++kv_head) {
            for (int head = 0; head < group_heads; head += item_heads) {
                AttentionItem item{sequence, kv_head, head, std::min(item_heads, group_heads - head), first, queries, 0,
                                   ranges,   false,   0};
                if (!split_ranges || ranges == 1) {
                    step.items.push_back(item);
                    continue;
                }
                item.split = true;
                item.group = step.groups.size();
                step.groups.push_back({step.partial_floats, ranges});
                step.partial_floats += static_cast<size_t>(ranges) * softmax_state_floats(item.rows(), v_stride);
                for (int range = 0; range < ranges; ++range) {
                    item.range_begin = range;
                    item.range_end = range + 1;
                    step.items.push_back(item);
                }
            }
        }
    }
}

Step plan_step(const StepInput& input, const ModelSizes& sizes, int v_stride, int threads) {
    constexpr int kItemsPerThread = 4;  // fewer than this: cut along the keys too
    Step step;
    for (size_t s = 0; s < input.sequences.size(); ++s) {
        const SequenceInput& seq = input.sequences[s];
        for (int i = 0; i < seq.num_inputs; ++i) {
            step.positions.push_back(seq.start + i);
            step.sequences.push_back(static_cast<int32_t>(s));
        }
        add_wanted_rows(input, s, step);
    }
    step.rows = static_cast<int>(step.positions.size());
    const bool split = step.rows * sizes.num_kv_heads < kItemsPerThread * threads;
    for (size_t s = 0; s < input.sequences.size(); ++s) {
        add_attention_items(input.sequences[s], static_cast<int>(s), sizes, split, v_stride, step);
    }
    const auto cost = [&](const AttentionItem& item) {
        const int keys = std::min(item.range_end * kRangeKeys,
                                  input.sequences[static_cast<size_t>(item.sequence)].start + item.first_query);
        return static_cast<int64_t>(item.rows()) * (keys - item.range_begin * kRangeKeys + kTileKeys);
    };
    std::stable_sort(step.items.begin(), step.items.end(),
                     [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
    return step;
}

// Which rows are wanted decides what the operations after the last attention, and that itself, need to compute.
void choose_last_items(const StepInput& input, Step& step) {
    std::vector<bool> wanted(static_cast<size_t>(step.rows));
    for (const WantedRow& row : step.wanted) wanted[static_cast<size_t>(row.row)] = true;
    for (const AttentionItem& item : step.items) {
        const auto first =
            wanted.begin() + input.sequences[static_cast<size_t>(item.sequence)].first_input + item.first_query;
        if (std::find(first, first + item.queries, true) != first + item.queries) step.last_items.push_back(item);
    }
}

// A count that threads take numbers from, alone in its cache line.
struct alignas(64) Counter {
    std::atomic<int> value{0};
};

bool draws_greedily(const SamplingSpec& spec, int position) {
    return spec.temperature == 0.0f && spec.repetition_penalty == 1.0f && spec.presence_penalty == 0.0f &&
           spec.frequency_penalty == 0.0f && spec.logit_bias.empty() &&
           (spec.banned.empty() || position >= spec.banned_until);
}

bool reads_integers(const std::vector<LinearPart>& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const LinearPart& part) {
        return part.matrix->format == WeightFormat::kU4 || part.matrix->format == WeightFormat::kI8;
    });
}

bool reads_floats(const std::vector<LinearPart>& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const LinearPart& part) {
        return part.matrix->format != WeightFormat::kU4 && part.matrix->format != WeightFormat::kI8;
    });
}

int count_panels(const std::vector<LinearPart>& parts) {
    return std::accumulate(parts.begin(), parts.end(), 0,
                           [](int sum, const LinearPart& part) { return sum + part.matrix->panels(); });
}

}  // namespace

// What all threads of one execution share.
struct Execution {
    const StepInput& input;
    const KvCache& kv;
    float* logits_out;
    Step step;
    std::vector<Counter> counters;  // by phase
    std::vector<Counter> missing;   // by range group: ranges not finished
    StepOutput output;
};

// One thread's part of an execution. All threads go through the same phases; inside a phase they take turns by its
// counter.
class Worker {
   public:
    Worker(Model& model, Execution& execution, int thread)
        : model_(model),
          kernels_(model.kernels_),
          run_(execution),
          step_(execution.step),
          work_(model.workspaces_[static_cast<size_t>(thread)]),
          threads_(model.pool_.size()),
          rows_(execution.step.rows) {}

    void run() {
        copy_blocks();
        const std::vector<PlanOp>& ops = model_.plan_.ops;
        for (size_t i = 0; i < ops.size();) {
            if (i == model_.plan_.tail) keep_wanted_rows();
            if (rows_ == 0) return;
            const bool by_rows = rows_ > kSharedRows;
            if (const auto* attention = std::get_if<AttentionOp>(&ops[i])) {
                if (!by_rows) store_kv(*attention);
                ++i;
                attend(*attention, i == model_.plan_.tail ? step_.last_items : step_.items);
            } else if (const auto* logits = std::get_if<LogitsOp>(&ops[i])) {
                compute_logits(*logits);
                ++i;
            } else {
                const size_t end = end_of_row_ops(i);
                if (by_rows) {
                    run_by_rows(i, end);
                } else {
                    for (size_t j = i; j < end; ++j) run_by_outputs(ops[j]);
                }
                i = end;
            }
        }
    }

   private:
    // Takes pieces of [0, count), `grain` at a time, until the phase has none left.
    template <class Visit>
    void share(int count, int grain, const Visit& visit) {
        Counter& counter = run_.counters[phase_++];
        for (int begin; (begin = counter.value.fetch_add(grain, std::memory_order_relaxed)) < count;) {
            visit(begin, std::min(begin + grain, count));
        }
    }
    // One piece for each thread: rows that lie side by side share cache lines, which must not go to and fro.
    template <class Visit>
    void share_rows(int rows, const Visit& visit) {
        share(rows, ceil_div(rows, threads_), visit);
    }
    void barrier() { model_.pool_.barrier(); }

    float* row(BufferId buffer, int r) {
        return model_.rows_[static_cast<size_t>(buffer)].data() + static_cast<size_t>(r) * stride(buffer);
    }
    size_t stride(BufferId buffer) const { return row_stride(model_.plan_.widths[static_cast<size_t>(buffer)]); }

    size_t end_of_row_ops(size_t i) const {
        const std::vector<PlanOp>& ops = model_.plan_.ops;
        while (i < ops.size() && !std::holds_alternative<AttentionOp>(ops[i]) &&
               !std::holds_alternative<LogitsOp>(ops[i])) {
            ++i;
        }
        return i;
    }

    // From here on row i of every buffer is that of wanted row i.
    void keep_wanted_rows() {
        const int wanted = static_cast<int>(step_.wanted.size());
        if (wanted < rows_) {
            const std::vector<BufferId>& buffers = model_.plan_.tail_reads;
            share(static_cast<int>(buffers.size()), 1, [&](int b, int) {
                const BufferId buffer = buffers[static_cast<size_t>(b)];
                for (int i = 0; i < wanted; ++i) {
                    const int from = step_.wanted[static_cast<size_t>(i)].row;
                    if (from != i) std::memcpy(row(buffer, i), row(buffer, from), stride(buffer) * sizeof(float));
                }
            });
            barrier();
        }
        rows_ = wanted;
    }

    void copy_blocks() {
        if (run_.input.copies.empty()) return;
        share(model_.sizes_.num_layers, 1, [&](int layer, int) { run_.kv.copy_blocks(layer, run_.input.copies); });
        barrier();
    }

    // ---- rows -------------------------------------------------------------------------------------------------

    void embed(const EmbedOp& op, int begin, int end) {
        const bool only_wanted = rows_ < step_.rows;
        for (int r = begin; r < end; ++r) {
            const int input = only_wanted ? step_.wanted[static_cast<size_t>(r)].row : r;
            dequantise_row(*op.weight, run_.input.tokens[static_cast<size_t>(input)], row(op.out, r));
        }
    }

    // A source's row r: in place, or computed into `scratch`.
    const float* source_row(const Source& source, int r, float* scratch) {
        const float* x = row(source.buffer, r);
        switch (source.kind) {
            case Source::Kind::kRows:
                return x;
            case Source::Kind::kNorm:
                kernels_.rms_norm(x, source.weight, source.eps, source.width, scratch);
                break;
            case Source::Kind::kSiluMul:
                kernels_.silu_mul(x, source.width, scratch);
                break;
        }
        return scratch;
    }

    void store_rows(const StoreOp& op, int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const float* x = source_row(op.source, r, work_.row.data());
            std::memcpy(row(op.out, r), x, static_cast<size_t>(op.source.width) * sizeof(float));
        }
    }

    // Row r of the source becomes row `at` of the activations.
    void prepare_row(const Source& source, const std::vector<LinearPart>& parts, int r, int at, Activations& to) {
        const float* x = source_row(source, r, work_.row.data());
        if (reads_integers(parts)) kernels_.quantise_row(x, to.quant(source.width), at);
        if (reads_floats(parts)) {
            std::memcpy(to.rows.data() + static_cast<size_t>(at) * to.stride, x,
                        static_cast<size_t>(source.width) * sizeof(float));
        }
    }

    // Outputs of panels [begin, end), counted over all parts, for `rows` prepared rows.
    void multiply(const Source& source, const std::vector<LinearPart>& parts, Activations& from, int rows, int begin,
                  int end, float* out, size_t out_stride, bool accumulate) {
        for (const LinearPart& part : parts) {
            const int panels = part.matrix->panels();
            if (begin < panels && end > 0) {
                kernels_.linear[static_cast<size_t>(part.matrix->format)]({
                    .w = part.matrix->view(),
                    .quant = from.quant(source.width),
                    .x = from.rows.data(),
                    .x_stride = from.stride,
                    .out = out + part.first_output,
                    .out_stride = out_stride,
                    .row_begin = 0,
                    .row_end = rows,
                    .panel_begin = std::max(begin, 0),
                    .panel_end = std::min(end, panels),
                    .accumulate = accumulate,
                    .scratch = work_.linear.data(),
                });
            }
            begin -= panels;
            end -= panels;
        }
    }

    // ---- many rows: each thread takes chunks of them through operations [begin, end) -----------------------------

    void run_by_rows(size_t begin, size_t end) {
        const std::vector<PlanOp>& ops = model_.plan_.ops;
        const int chunks = round_up(ceil_div(rows_, kChunkRows), threads_);
        share(rows_, round_up(ceil_div(rows_, chunks), kRowBlock), [&](int first, int last) {
            for (size_t i = begin; i < end; ++i) run_rows(ops[i], first, last);
            if (end < ops.size()) {
                if (const auto* attention = std::get_if<AttentionOp>(&ops[end])) store_kv_rows(*attention, first, last);
            }
        });
        barrier();
    }

    void run_rows(const PlanOp& op, int begin, int end) {
        if (const auto* embedding = std::get_if<EmbedOp>(&op)) {
            embed(*embedding, begin, end);
        } else if (const auto* stored = std::get_if<StoreOp>(&op)) {
            store_rows(*stored, begin, end);
        } else if (const auto* linear = std::get_if<LinearOp>(&op)) {
            for (int r = begin; r < end; ++r)
                prepare_row(linear->source, linear->parts, r, r - begin, work_.activations);
            multiply(linear->source, linear->parts, work_.activations, end - begin, 0, count_panels(linear->parts),
                     row(linear->out, begin), stride(linear->out), linear->accumulate);
        }
    }

    // ---- few rows: all threads share one operation's outputs -----------------------------------------------------

    void run_by_outputs(const PlanOp& op) {
        if (const auto* linear = std::get_if<LinearOp>(&op)) {
            Activations& from = prepare_shared(linear->source, linear->parts, 0, rows_);
            multiply_shared(linear->source, linear->parts, from, rows_, row(linear->out, 0), stride(linear->out),
                            linear->accumulate);
        } else {
            share_rows(rows_, [&](int begin, int end) { run_rows(op, begin, end); });
        }
        barrier();
    }

    // Prepares rows [first, first + rows): each thread all of them for itself, or together.
    Activations& prepare_shared(const Source& source, const std::vector<LinearPart>& parts, int first, int rows) {
        if (rows <= kPrivateRows) {
            for (int i = 0; i < rows; ++i) prepare_row(source, parts, first + i, i, work_.activations);
            return work_.activations;
        }
        // Whole row blocks, whose rows share cache lines.
        share(rows, round_up(ceil_div(rows, threads_), kRowBlock), [&](int begin, int end) {
            for (int i = begin; i < end; ++i) prepare_row(source, parts, first + i, i, model_.shared_);
        });
        barrier();
        return model_.shared_;
    }

    void multiply_shared(const Source& source, const std::vector<LinearPart>& parts, Activations& from, int rows,
                         float* out, size_t out_stride, bool accumulate) {
        constexpr int kPiecesPerThread = 6;
        const int panels = count_panels(parts);
        share(panels, std::max(1, panels / (threads_ * kPiecesPerThread)), [&](int begin, int end) {
            multiply(source, parts, from, rows, begin, end, out, out_stride, accumulate);
        });
    }

    // ---- attention ----------------------------------------------------------------------------------------------

    // Rotates q and k of rows [begin, end) and stores k and v.
    void store_kv_rows(const AttentionOp& op, int begin, int end) {
        const ModelSizes& sizes = model_.sizes_;
        const auto store = run_.kv.shape().f32 ? kernels_.store_kv_f32 : kernels_.store_kv_f16;
        const float scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
        for (int r = begin; r < end; ++r) {
            const int position = step_.positions[static_cast<size_t>(r)];
            const RopeArgs rope{model_.rope_.cos(position), model_.rope_.sin(position), sizes.rope_dim, sizes.head_dim,
                                sizes.rope_interleaved};
            float* q = row(op.qkv, r);
            float* k = q + sizes.num_heads * sizes.head_dim;
            const float* v = k + sizes.num_kv_heads * sizes.head_dim;
            kernels_.rope(q, sizes.num_heads, scale, rope);
            kernels_.rope(k, sizes.num_kv_heads, 1.0f, rope);
            const int32_t* blocks = sequence_blocks(step_.sequences[static_cast<size_t>(r)]);
            const int block_size = run_.kv.block_size();
            for (int h = 0; h < sizes.num_kv_heads; ++h) {
                store(k + h * sizes.head_dim, v + h * sizes.head_dim, run_.kv.view(op.layer, h, blocks),
                      run_.kv.block(op.layer, h, blocks[position / block_size]), position % block_size);
            }
        }
    }

    void store_kv(const AttentionOp& op) {
        share_rows(step_.rows, [&](int begin, int end) { store_kv_rows(op, begin, end); });
        barrier();
    }

    const int32_t* sequence_blocks(int sequence) const {
        return run_.input.blocks.data() + run_.input.sequences[static_cast<size_t>(sequence)].first_block;
    }

    void attend(const AttentionOp& op, const std::vector<AttentionItem>& items) {
        share(static_cast<int>(items.size()), 1, [&](int i, int) { attend_item(op, items[static_cast<size_t>(i)]); });
        barrier();
    }

    void attend_item(const AttentionOp& op, const AttentionItem& item) {
        const ModelSizes& sizes = model_.sizes_;
        const SequenceInput& seq = run_.input.sequences[static_cast<size_t>(item.sequence)];
        const int head = item.kv_head * (sizes.num_heads / sizes.num_kv_heads) + item.first_head;
        const int first_row = seq.first_input + item.first_query;
        AttentionArgs args{
            .kv = run_.kv.view(op.layer, item.kv_head, sequence_blocks(item.sequence)),
            .q = row(op.qkv, first_row) + head * sizes.head_dim,
            .q_stride = stride(op.qkv),
            .out = row(op.out, first_row) + head * sizes.head_dim,
            .out_stride = stride(op.out),
            .queries = item.queries,
            .heads = item.heads,
            .position = seq.start + item.first_query,
            .range_begin = item.range_begin,
            .range_end = item.range_end,
            .partial = nullptr,
            .scratch = work_.attention.data(),
        };
        const auto attention = run_.kv.shape().f32 ? kernels_.attention_f32 : kernels_.attention_f16;
        if (!item.split) return attention(args);

        const RangeGroup& group = step_.groups[item.group];
        float* partials = model_.partials_.data() + group.first_partial;
        args.partial =
            partials + static_cast<size_t>(item.range_begin) * softmax_state_floats(item.rows(), args.kv.v_stride);
        attention(args);
        std::atomic<int>& missing = run_.missing[item.group].value;
        if (missing.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        missing.store(group.ranges, std::memory_order_relaxed);  // for the next layer
        kernels_.merge_attention({
            .partials = partials,
            .ranges = group.ranges,
            .v_stride = args.kv.v_stride,
            .head_dim = sizes.head_dim,
            .queries = item.queries,
            .heads = item.heads,
            .position = args.position,
            .out = args.out,
            .out_stride = args.out_stride,
        });
    }

    // ---- logits -------------------------------------------------------------------------------------------------

    void compute_logits(const LogitsOp& op) {
        const size_t logits_stride = row_stride(model_.sizes_.vocab_size);
        const int count = static_cast<int>(step_.wanted.size());
        for (int first = 0; first < count; first += kLogitRows) {
            const int rows = std::min(kLogitRows, count - first);
            const WantedRow* wanted = step_.wanted.data() + first;
            Activations& from = prepare_shared(op.source, op.parts, first, rows);
            multiply_shared(op.source, op.parts, from, rows, model_.logits_.data(), logits_stride, false);
            barrier();
            share(rows, 1, [&](int i, int) {
                use_logits(wanted[i], {model_.logits_.data() + static_cast<size_t>(i) * logits_stride,
                                       static_cast<size_t>(model_.sizes_.vocab_size)});
            });
            barrier();
        }
    }

    void use_logits(const WantedRow& wanted, std::span<const float> logits) {
        if (run_.logits_out != nullptr) {
            std::memcpy(run_.logits_out + static_cast<size_t>(wanted.row) * logits.size(), logits.data(),
                        logits.size_bytes());
            return;
        }
        // The one place where a thread of the pool allocates: no exception may leave it.
        SequenceError error;
        try {
            error = sample_and_score(wanted, logits);
        } catch (const std::bad_alloc&) {
            error = SequenceError::kNoMemory;
        }
        if (error != SequenceError::kNone) {
            std::atomic_ref(run_.output.errors[wanted.sequence]).store(error, std::memory_order_relaxed);
        }
    }

    SequenceError sample_and_score(const WantedRow& wanted, std::span<const float> logits) {
        const SequenceInput& seq = run_.input.sequences[wanted.sequence];
        const SamplingSpec* spec = wanted.sampled ? seq.sampling.get() : nullptr;
        int32_t greedy = -1;
        if (spec != nullptr && draws_greedily(*spec, wanted.position + 1) && mask_of(wanted, seq).empty()) {
            greedy = kernels_.argmax(logits.data(), static_cast<int>(logits.size()));
            if (greedy < 0) return SequenceError::kNotFinite;
        } else if (!all_finite(logits)) {
            return SequenceError::kNotFinite;
        }
        if (wanted.scored) {
            run_.output.prompt_logprobs[wanted.target] =
                row_logprobs(logits, run_.input.targets[wanted.target], seq.num_prompt_logprobs);
        }
        if (spec == nullptr) return SequenceError::kNone;
        const int32_t id = greedy >= 0 ? greedy : draw(wanted, seq, *spec, logits);
        run_.output.tokens[wanted.sample] = id;
        if (spec->num_logprobs >= 0) {
            run_.output.logprobs[wanted.sample] =
                std::make_unique<TokenLogprobs>(row_logprobs(logits, id, spec->num_logprobs));
        }
        return SequenceError::kNone;
    }

    // Which ids the row may draw; empty: all.
    static std::span<const uint8_t> mask_of(const WantedRow& wanted, const SequenceInput& seq) {
        if (seq.masks.empty()) return {};
        return seq.masks[static_cast<size_t>(wanted.num_drafts)];
    }

    int32_t draw(const WantedRow& wanted, const SequenceInput& seq, const SamplingSpec& spec,
                 std::span<const float> logits) {
        const size_t later_drafts = static_cast<size_t>(seq.num_drafts - wanted.num_drafts);
        const size_t known = seq.history.empty() ? 0 : seq.history.size() - later_drafts;
        const std::span<const uint8_t> mask = mask_of(wanted, seq);
        if (!mask.empty()) {
            work_.masked.assign(logits.begin(), logits.end());
            for (size_t id = 0; id < logits.size(); ++id) {
                if ((mask[id / 8] >> (id % 8) & 1) == 0) work_.masked[id] = -std::numeric_limits<float>::infinity();
            }
            logits = work_.masked;
        }
        return sample_row(logits, spec, wanted.position + 1, {seq.history.data(), known}, work_.sampling);
    }

    Model& model_;
    const KernelTable& kernels_;
    Execution& run_;
    const Step& step_;
    Workspace& work_;
    int threads_;
    int rows_;  // of the buffers
    size_t phase_ = 0;
};

void Activations::reserve(int max_rows, int inputs) {
    const size_t padded = static_cast<size_t>(round_up(max_rows, kRowBlock));
    const size_t groups = static_cast<size_t>(ceil_div(inputs, kGroup));
    stride = static_cast<size_t>(round_up(inputs, kPanel));
    q.reserve_zeroed(padded * groups * kGroup);
    scale.reserve_zeroed(padded * groups);
    sum.reserve_zeroed(padded * groups);
    isum.reserve_zeroed(padded * groups);
}

QuantView Activations::quant(int inputs) { return {q.data(), scale.data(), sum.data(), isum.data(), inputs / kGroup}; }

Model::Model(ModelSizes sizes, const std::vector<ProgramOp>& program, const std::map<std::string, int>& widths,
             std::map<std::string, Tensor> tensors, const KernelTable& kernels, int threads, bool kv_f32)
    : sizes_(std::move(sizes)),
      kv_shape_{sizes_.num_layers, sizes_.num_kv_heads, sizes_.head_dim, kv_f32},
      kernels_(kernels),
      pool_(threads),
      plan_(compile(program, widths, std::move(tensors), sizes_, pool_)),
      rope_(sizes_.rope_theta, sizes_.rope_dim, sizes_.rope_interleaved, sizes_.rope_factors),
      rows_(plan_.widths.size()),
      workspaces_(static_cast<size_t>(threads)) {
    bool floats = false;
    for (const auto& matrix : plan_.matrices) {
        floats = floats || (matrix->format != WeightFormat::kU4 && matrix->format != WeightFormat::kI8);
    }
    const auto reserve = [&](Activations& activations, int rows) {
        activations.reserve(rows, plan_.max_inputs);
        if (floats) activations.rows.reserve_zeroed(static_cast<size_t>(rows) * activations.stride);
    };
    for (Workspace& work : workspaces_) {
        work.row.reserve_zeroed(static_cast<size_t>(*std::max_element(plan_.widths.begin(), plan_.widths.end())) +
                                kPanel);
        work.linear.reserve(kernels_.linear_scratch_bytes);
        work.attention.reserve(attention_scratch_floats(sizes_.head_dim, kv_shape_.v_stride()));
        reserve(work.activations, kChunkRows);
    }
    reserve(shared_, kSharedRows);
    logits_.reserve(kLogitRows * row_stride(sizes_.vocab_size));
}

StepOutput Model::execute(const StepInput& input, const KvCache& kv, float* logits_out) {
    Execution run{input, kv, logits_out, plan_step(input, sizes_, kv_shape_.v_stride(), pool_.size()), {}, {}, {}};
    if (logits_out != nullptr) {
        run.step.wanted.clear();
        for (int r = 0; r < run.step.rows; ++r) run.step.wanted.push_back({0, r, r, false, 0, 0, false, 0});
    }
    choose_last_items(input, run.step);
    for (size_t b = 0; b < rows_.size(); ++b) {
        if (plan_.stored[b]) rows_[b].reserve_zeroed(static_cast<size_t>(run.step.rows) * row_stride(plan_.widths[b]));
    }
    partials_.reserve(run.step.partial_floats);
    int last = 0;
    for (const SequenceInput& seq : input.sequences) last = std::max(last, seq.start + seq.num_inputs);
    rope_.extend(last);

    constexpr size_t kPhasesPerOp = 2;
    constexpr size_t kPhasesPerSlice = 3;
    constexpr size_t kOtherPhases = 2;  // copies of blocks and of wanted rows
    run.counters = std::vector<Counter>(kOtherPhases + kPhasesPerOp * plan_.ops.size() +
                                        kPhasesPerSlice * (run.step.wanted.size() / kLogitRows + 1));
    run.missing = std::vector<Counter>(run.step.groups.size());
    for (size_t g = 0; g < run.step.groups.size(); ++g) run.missing[g].value = run.step.groups[g].ranges;
    run.output.tokens.resize(run.step.num_samples);
    run.output.logprobs.resize(run.step.num_samples);
    run.output.prompt_logprobs.resize(input.targets.size());
    run.output.errors.resize(input.sequences.size());
    if (run.step.rows > 0 || !input.copies.empty()) {
        pool_.run([&](int thread) { Worker(*this, run, thread).run(); });
    }
    return std::move(run.output);
}

void Model::logits(const std::vector<int32_t>& tokens, float* out) {
    constexpr int kStepRows = 512;
    const int total = static_cast<int>(tokens.size());
    const KvCache kv(kv_shape_, 1, round_up(total, kPanel));
    for (int first = 0; first < total; first += kStepRows) {
        StepInput input;
        const int rows = std::min(kStepRows, total - first);
        input.tokens.assign(tokens.begin() + first, tokens.begin() + first + rows);
        input.blocks = {0};
        input.sequences.push_back({.index = 0,
                                   .start = first,
                                   .first_input = 0,
                                   .num_inputs = rows,
                                   .num_drafts = 0,
                                   .first_block = 0,
                                   .sampling = nullptr,
                                   .history = {},
                                   .masks = {}});
        execute(input, kv, out + static_cast<size_t>(first) * static_cast<size_t>(sizes_.vocab_size));
    }
}

}  // namespace segue

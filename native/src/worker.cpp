// Computes a step.
//
// Between two attentions every operation but experts works on single rows. With many rows in a step, each thread
// takes chunks of rows through the whole run of operations; with few, all threads share the outputs of each matrix.
// Which of the two, and which thread does what, changes no result.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>

#include "attend.hpp"
#include "execution.hpp"
#include "use_logits.hpp"

namespace segue {
namespace {

constexpr int kPrivateRows = kRowBlock;  // up to this many, each thread prepares all input rows itself

bool reads_integers(const std::vector<LinearPart>& parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [](const LinearPart& part) { return is_integer(part.matrix->type); });
}

bool reads_floats(const std::vector<LinearPart>& parts) {
    return std::any_of(parts.begin(), parts.end(),
                       [](const LinearPart& part) { return !is_integer(part.matrix->type); });
}

int count_panels(const std::vector<LinearPart>& parts) {
    return std::accumulate(parts.begin(), parts.end(), 0,
                           [](int sum, const LinearPart& part) { return sum + part.matrix->panels(); });
}

int outputs_of(const std::vector<LinearPart>& parts) {
    return parts.back().first_output + parts.back().matrix->outputs;
}

// The experts with the largest scores, by number, and the softmax of these. Of equal scores the first counts as larger.
// A score that is not finite makes all weights NaN, which is found in the logits.
void choose_experts(std::span<const float> scores, std::span<Route> routes) {
    const bool finite = std::all_of(scores.begin(), scores.end(), [](float score) { return std::isfinite(score); });
    for (size_t i = 0; i < routes.size(); ++i) {
        const auto is_taken = [&](int expert) {
            return std::any_of(routes.begin(), routes.begin() + static_cast<std::ptrdiff_t>(i),
                               [&](const Route& route) { return route.expert == expert; });
        };
        int best = -1;
        for (int e = 0; e < static_cast<int>(scores.size()); ++e) {
            const bool is_larger =
                best < 0 || (finite && scores[static_cast<size_t>(e)] > scores[static_cast<size_t>(best)]);
            if (!is_taken(e) && is_larger) best = e;
        }
        routes[i] = {best, scores[static_cast<size_t>(best)]};
    }
    const float largest = routes.front().weight;
    std::sort(routes.begin(), routes.end(), [](const Route& a, const Route& b) { return a.expert < b.expert; });
    float sum = 0.0f;
    for (Route& route : routes) sum += route.weight = std::exp(route.weight - largest);
    for (Route& route : routes) route.weight = finite ? route.weight / sum : std::numeric_limits<float>::quiet_NaN();
}

// One thread's part of an execution. All threads go through the same phases; inside a phase they take turns by its
// counter.
class Worker {
   public:
    Worker(Execution& run, int thread)
        : run_(run),
          plan_(run.plan),
          layout_(run.layout),
          work_(run.scratch.workspaces[static_cast<size_t>(thread)]),
          threads_(run.pool.size()),
          rows_(run.layout.rows) {}

    void run() {
        copy_blocks();
        const std::vector<PlanOp>& ops = plan_.ops;
        for (size_t i = 0; i < ops.size();) {
            if (i == plan_.tail) keep_wanted_rows();
            if (rows_ == 0) return;
            const bool by_rows = rows_ > kSharedRows;
            if (const auto* attention = std::get_if<AttentionOp>(&ops[i])) {
                if (!by_rows) store_kv(*attention);
                ++i;
                const AttentionItems& items = layout_.attention[attention->shape];
                attend(*attention, i == plan_.tail ? items.last : items.all);
            } else if (const auto* experts = std::get_if<ExpertsOp>(&ops[i])) {
                compute_experts(*experts);
                ++i;
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
    void barrier() { run_.pool.barrier(); }

    size_t end_of_row_ops(size_t i) const {
        const std::vector<PlanOp>& ops = plan_.ops;
        while (i < ops.size() && !std::holds_alternative<AttentionOp>(ops[i]) &&
               !std::holds_alternative<ExpertsOp>(ops[i]) && !std::holds_alternative<LogitsOp>(ops[i])) {
            ++i;
        }
        return i;
    }

    // From here on row i of every buffer is that of wanted row i.
    void keep_wanted_rows() {
        const int wanted = static_cast<int>(layout_.wanted.size());
        if (wanted < rows_) {
            const std::vector<BufferId>& buffers = plan_.tail_reads;
            share(static_cast<int>(buffers.size()), 1, [&](int b, int) {
                const BufferId buffer = buffers[static_cast<size_t>(b)];
                for (int i = 0; i < wanted; ++i) {
                    const int from = layout_.wanted[static_cast<size_t>(i)].row;
                    if (from != i)
                        std::memcpy(run_.row(buffer, i), run_.row(buffer, from), run_.stride(buffer) * sizeof(float));
                }
            });
            barrier();
        }
        rows_ = wanted;
    }

    void copy_blocks() {
        if (run_.input.copies.empty()) return;
        share(static_cast<int>(plan_.kv_layers.size()), 1,
              [&](int layer, int) { run_.kv.copy_blocks(layer, run_.input.copies); });
        barrier();
    }

    // ---- rows -------------------------------------------------------------------------------------------------

    void embed(const EmbedOp& op, int begin, int end) {
        const bool only_wanted = rows_ < layout_.rows;
        for (int r = begin; r < end; ++r) {
            const int input = only_wanted ? layout_.wanted[static_cast<size_t>(r)].row : r;
            float* out = run_.row(op.out, r);
            dequantise_row(*op.weight, run_.input.tokens[static_cast<size_t>(input)], out);
            const int width = plan_.widths[static_cast<size_t>(op.out)];
            if (op.scale != 1.0f) {
                for (int i = 0; i < width; ++i) out[i] *= op.scale;
            }
            if (op.positions != nullptr) {
                const int position = layout_.positions[static_cast<size_t>(input)] + op.first_position;
                dequantise_row(*op.positions, position, work_.row.data());
                for (int i = 0; i < width; ++i) out[i] += work_.row[i];
            }
        }
    }

    // A source's row r: in place, or computed into `scratch`.
    const float* source_row(const Source& source, int r, float* scratch) {
        const float* x = run_.row(source.buffer, r);
        switch (source.kind) {
            case Source::Kind::kRows:
                return x;
            case Source::Kind::kRMSNorm:
                run_.kernels.rms_norm(x, source.weight, source.eps, source.width, scratch);
                break;
            case Source::Kind::kLayerNorm:
                run_.kernels.layer_norm(x, source.weight, source.bias, source.eps, source.width, scratch);
                break;
            case Source::Kind::kActivation:
                run_.kernels.activate(source.function, x, source.width, scratch);
                break;
            case Source::Kind::kGLU:
                run_.kernels.glu(source.function, x, source.width, scratch);
                break;
        }
        return scratch;
    }

    void store_rows(const StoreOp& op, int begin, int end) {
        for (int r = begin; r < end; ++r) {
            const float* x = source_row(op.source, r, work_.row.data());
            float* out = run_.row(op.out, r);
            if (op.accumulate) {
                for (int i = 0; i < op.source.width; ++i) out[i] += x[i];
            } else {
                std::memcpy(out, x, static_cast<size_t>(op.source.width) * sizeof(float));
            }
        }
    }

    void norm_parts(const NormPartsOp& op, int begin, int end) {
        for (int r = begin; r < end; ++r) {
            float* part = run_.row(op.buffer, r) + op.first;
            for (int i = 0; i < op.count; ++i, part += op.width) {
                run_.kernels.rms_norm(part, op.weight, op.eps, op.width, part);
            }
        }
    }

    // Row r of the source becomes row `at` of the activations.
    void prepare_row(const Source& source, const std::vector<LinearPart>& parts, int r, int at, Activations& to) {
        prepare(source_row(source, r, work_.row.data()), source.width, parts, at, to);
    }
    void prepare(const float* x, int width, const std::vector<LinearPart>& parts, int at, Activations& to) {
        if (reads_integers(parts)) run_.kernels.quantise_row(x, to.quant(width), at);
        if (reads_floats(parts)) {
            std::memcpy(to.rows.data() + static_cast<size_t>(at) * to.stride, x,
                        static_cast<size_t>(width) * sizeof(float));
        }
    }

    // Outputs of panels [begin, end), counted over all parts, for `rows` prepared rows.
    void multiply(int inputs, const Products& products, Activations& from, int rows, int begin, int end, float* out,
                  size_t out_stride, bool accumulate) {
        for (const LinearPart& part : products.parts) {
            const int panels = part.matrix->panels();
            if (begin < panels && end > 0) {
                run_.kernels.linear[index_of(part.matrix->type)]({
                    .w = part.matrix->view(),
                    .quant = from.quant(inputs),
                    .x = from.rows.data(),
                    .x_stride = from.stride,
                    .out = out + part.first_output,
                    .out_stride = out_stride,
                    .row_begin = 0,
                    .row_end = rows,
                    .panel_begin = std::max(begin, 0),
                    .panel_end = std::min(end, panels),
                    .bias = products.bias == nullptr ? nullptr : products.bias + part.first_output,
                    .scale = products.scale,
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
        const std::vector<PlanOp>& ops = plan_.ops;
        const int chunks = round_up(ceil_div(rows_, kChunkRows), threads_);
        share(rows_, round_up(ceil_div(rows_, chunks), kRowBlock), [&](int first, int last) {
            for (size_t i = begin; i < end; ++i) run_rows(ops[i], first, last);
            if (end < ops.size()) {
                if (const auto* attention = std::get_if<AttentionOp>(&ops[end]))
                    store_kv_rows(run_, *attention, first, last);
            }
        });
        barrier();
    }

    void run_rows(const PlanOp& op, int begin, int end) {
        if (const auto* embedding = std::get_if<EmbedOp>(&op)) {
            embed(*embedding, begin, end);
        } else if (const auto* stored = std::get_if<StoreOp>(&op)) {
            store_rows(*stored, begin, end);
        } else if (const auto* parts = std::get_if<NormPartsOp>(&op)) {
            norm_parts(*parts, begin, end);
        } else if (const auto* linear = std::get_if<LinearOp>(&op)) {
            for (int r = begin; r < end; ++r)
                prepare_row(linear->source, linear->products.parts, r, r - begin, work_.activations);
            multiply(linear->source.width, linear->products, work_.activations, end - begin, 0,
                     count_panels(linear->products.parts), run_.row(linear->out, begin), run_.stride(linear->out),
                     linear->accumulate);
        }
    }

    // ---- few rows: all threads share one operation's outputs -----------------------------------------------------

    void run_by_outputs(const PlanOp& op) {
        if (const auto* linear = std::get_if<LinearOp>(&op)) {
            Activations& from = prepare_shared(linear->source, linear->products.parts, 0, rows_);
            multiply_shared(linear->source, linear->products, from, rows_, run_.row(linear->out, 0),
                            run_.stride(linear->out), linear->accumulate);
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
            for (int i = begin; i < end; ++i) prepare_row(source, parts, first + i, i, run_.scratch.shared);
        });
        barrier();
        return run_.scratch.shared;
    }

    void multiply_shared(const Source& source, const Products& products, Activations& from, int rows, float* out,
                         size_t out_stride, bool accumulate) {
        constexpr int kPiecesPerThread = 6;
        const int panels = count_panels(products.parts);
        share(panels, std::max(1, panels / (threads_ * kPiecesPerThread)), [&](int begin, int end) {
            multiply(source.width, products, from, rows, begin, end, out, out_stride, accumulate);
        });
    }

    // ---- attention ----------------------------------------------------------------------------------------------

    void store_kv(const AttentionOp& op) {
        share_rows(rows_, [&](int begin, int end) { store_kv_rows(run_, op, begin, end); });
        barrier();
    }

    void attend(const AttentionOp& op, const std::vector<AttentionItem>& items) {
        share(static_cast<int>(items.size()), 1,
              [&](int i, int) { attend_item(run_, op, items[static_cast<size_t>(i)], work_.attention.data()); });
        barrier();
    }

    // ---- experts: threads share them, and the rows before and after -----------------------------------------------

    void compute_experts(const ExpertsOp& op) {
        for (int first = 0; first < rows_; first += kChunkRows) {
            const int rows = std::min(kChunkRows, rows_ - first);
            share_rows(rows, [&](int begin, int end) {
                for (int r = begin; r < end; ++r) route(op, first + r, routes_of(op, r));
            });
            barrier();
            share(static_cast<int>(op.experts.size()), 1,
                  [&](int expert, int) { run_expert(op, expert, first, rows); });
            barrier();
            share_rows(rows, [&](int begin, int end) {
                for (int r = begin; r < end; ++r) add_experts(op, r, run_.row(op.out, first + r));
            });
            barrier();
        }
    }

    std::span<Route> routes_of(const ExpertsOp& op, int r) {
        const auto used = static_cast<size_t>(op.used);
        return std::span(run_.scratch.routes).subspan(static_cast<size_t>(r) * used, used);
    }

    // Row r's experts and their weights.
    void route(const ExpertsOp& op, int r, std::span<Route> routes) {
        const std::vector<LinearPart>& parts = op.router.parts;
        prepare_row(op.source, parts, r, 0, work_.activations);
        multiply(op.source.width, op.router, work_.activations, 1, 0, count_panels(parts), work_.scores.data(), 0,
                 false);
        choose_experts({work_.scores.data(), op.experts.size()}, routes);
    }

    // One expert's rows, for those of rows [first, first + rows) that go through it.
    void run_expert(const ExpertsOp& op, int expert, int first, int rows) {
        const Expert& own = op.experts[static_cast<size_t>(expert)];
        const size_t inner_stride = row_stride(2 * op.width);
        const size_t stride = run_.stride(op.out);
        int count = 0;
        for_routes(op, expert, rows, [&](int i) {
            prepare_row(op.source, own.gate_up.parts, first + i / op.used, count++, work_.activations);
        });
        if (count == 0) return;
        multiply(op.source.width, own.gate_up, work_.activations, count, 0, count_panels(own.gate_up.parts),
                 work_.gate_up.data(), inner_stride, false);
        for (int i = 0; i < count; ++i) {
            const float* inner = work_.gate_up.data() + static_cast<size_t>(i) * inner_stride;
            run_.kernels.glu(op.function, inner, op.width, work_.row.data());
            prepare(work_.row.data(), op.width, own.down.parts, i, work_.activations);
        }
        multiply(op.width, own.down, work_.activations, count, 0, count_panels(own.down.parts),
                 work_.expert_rows.data(), stride, false);
        const float* from = work_.expert_rows.data();
        for_routes(op, expert, rows, [&](int i) {
            std::memcpy(run_.scratch.expert_rows.data() + static_cast<size_t>(i) * stride, from,
                        stride * sizeof(float));
            from += stride;
        });
    }

    // Visits the numbers of the routes that lead to an expert.
    template <class Visit>
    void for_routes(const ExpertsOp& op, int expert, int rows, const Visit& visit) {
        for (int i = 0; i < rows * op.used; ++i) {
            if (run_.scratch.routes[static_cast<size_t>(i)].expert == expert) visit(i);
        }
    }

    void add_experts(const ExpertsOp& op, int r, float* out) {
        const size_t stride = run_.stride(op.out);
        const float* from = run_.scratch.expert_rows.data() + static_cast<size_t>(r * op.used) * stride;
        for (const Route& route : routes_of(op, r)) {
            for (int i = 0; i < plan_.widths[static_cast<size_t>(op.out)]; ++i) out[i] += route.weight * from[i];
            from += stride;
        }
    }

    // ---- logits -------------------------------------------------------------------------------------------------

    void compute_logits(const LogitsOp& op) {
        const int vocab = outputs_of(op.products.parts);
        const size_t logits_stride = row_stride(vocab);
        const int count = static_cast<int>(layout_.wanted.size());
        for (int first = 0; first < count; first += kLogitRows) {
            const int rows = std::min(kLogitRows, count - first);
            const WantedRow* wanted = layout_.wanted.data() + first;
            Activations& from = prepare_shared(op.source, op.products.parts, first, rows);
            multiply_shared(op.source, op.products, from, rows, run_.scratch.logits.data(), logits_stride, false);
            barrier();
            share(rows, 1, [&](int i, int) {
                float* logits = run_.scratch.logits.data() + static_cast<size_t>(i) * logits_stride;
                if (op.softcap > 0.0f) run_.kernels.soft_cap(logits, op.softcap, vocab);
                use_logits(run_, wanted[i], {logits, static_cast<size_t>(vocab)}, work_);
            });
            barrier();
        }
    }

    Execution& run_;
    const Plan& plan_;
    const StepLayout& layout_;
    Workspace& work_;
    int threads_;
    int rows_;  // of the buffers
    size_t phase_ = 0;
};

}  // namespace

void work(Execution& run, int thread) { Worker(run, thread).run(); }

}  // namespace segue

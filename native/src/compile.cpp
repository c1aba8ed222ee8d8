// From a program to a plan: checks shapes, packs weights, fuses norms and activations into linear layers.
#include <algorithm>
#include <set>

#include "model.hpp"

namespace segue {
namespace {

class Compiler {
   public:
    Compiler(const std::vector<ProgramOp>& program, const std::map<std::string, int>& widths, const ModelSizes& sizes,
             ThreadPool& pool, Plan& plan)
        : program_(program), sizes_(sizes), pool_(pool), plan_(plan) {
        for (const auto& [name, width] : widths) {
            buffers_[name] = static_cast<BufferId>(plan.widths.size());
            plan.widths.push_back(width);
            plan.stored.push_back(false);
        }
    }

    void compile() {
        for (size_t i = 0; i < program_.size(); ++i) compile_op(i);
        find_tail();
    }

   private:
    using Kind = ProgramOp::Kind;

    void compile_op(size_t i) {
        const ProgramOp& op = program_[i];
        switch (op.kind) {
            case Kind::kEmbed:
                plan_.ops.push_back(EmbedOp{&matrix(op.weights.at(0), width(op.out)), store(op.out)});
                check_rows(op.weights[0], sizes_.vocab_size);
                return;
            case Kind::kRmsNorm:
            case Kind::kSiluMul: {
                const Source source = make_source(op);
                if (only_linear_reads(i)) {
                    sources_[op.out] = source;
                } else {
                    sources_.erase(op.out);
                    plan_.ops.push_back(StoreOp{source, store(op.out)});
                }
                return;
            }
            case Kind::kLinear: {
                const Source source = source_of(op.x);
                sources_.erase(op.out);
                plan_.ops.push_back(LinearOp{source, pack_stack(op.weights, source.width, width(op.out)), store(op.out),
                                             op.accumulate});
                return;
            }
            case Kind::kAttention:
                if (width(op.x) != (sizes_.num_heads + 2 * sizes_.num_kv_heads) * sizes_.head_dim ||
                    width(op.out) != sizes_.num_heads * sizes_.head_dim) {
                    throw ModelFileError("attention: the buffers' widths do not fit the number of heads");
                }
                // The executor stores k and v at the end of the row operations before.
                if (plan_.ops.empty() || std::holds_alternative<AttentionOp>(plan_.ops.back())) {
                    throw ModelFileError("attention: nothing is computed for it");
                }
                plan_.ops.push_back(AttentionOp{stored(op.x), store(op.out), op.layer});
                return;
            case Kind::kLogits: {
                const Source source{Source::Kind::kNorm, stored(op.x), width(op.x), norm_weight(op.norm, width(op.x)),
                                    op.eps};
                plan_.ops.push_back(LogitsOp{source, pack_stack(op.weights, source.width, sizes_.vocab_size)});
                return;
            }
        }
    }

    void find_tail() {
        for (size_t i = 0; i < plan_.ops.size(); ++i) {
            if (std::holds_alternative<AttentionOp>(plan_.ops[i])) plan_.tail = i + 1;
        }
        std::set<BufferId> written;
        std::set<BufferId> reads;
        const auto read = [&](BufferId id) {
            if (!written.contains(id)) reads.insert(id);
        };
        for (size_t i = plan_.tail; i < plan_.ops.size(); ++i) {
            if (const auto* linear = std::get_if<LinearOp>(&plan_.ops[i])) {
                read(linear->source.buffer);
                if (linear->accumulate) read(linear->out);
                written.insert(linear->out);
            } else if (const auto* stored = std::get_if<StoreOp>(&plan_.ops[i])) {
                read(stored->source.buffer);
                written.insert(stored->out);
            } else if (const auto* logits = std::get_if<LogitsOp>(&plan_.ops[i])) {
                read(logits->source.buffer);
            } else if (const auto* embedding = std::get_if<EmbedOp>(&plan_.ops[i])) {
                written.insert(embedding->out);
            }
        }
        plan_.tail_reads.assign(reads.begin(), reads.end());
    }

    Source make_source(const ProgramOp& op) {
        if (op.kind == Kind::kRmsNorm) {
            if (width(op.x) != width(op.out)) throw ModelFileError("norm: the buffers' widths differ");
            return {Source::Kind::kNorm, stored(op.x), width(op.out), norm_weight(op.weights.at(0), width(op.x)),
                    op.eps};
        }
        if (width(op.x) != 2 * width(op.out)) throw ModelFileError("silu_mul: the input must be twice as wide");
        return {Source::Kind::kSiluMul, stored(op.x), width(op.out)};
    }

    // Whether what op i writes is read by linear layers only, and its own input stays as it is until the last of them.
    bool only_linear_reads(size_t i) const {
        bool input_changed = false;
        for (size_t j = i + 1; j < program_.size(); ++j) {
            const ProgramOp& later = program_[j];
            if (later.x == program_[i].out && (later.kind != Kind::kLinear || input_changed)) return false;
            if (later.accumulate && later.out == program_[i].out) return false;
            if (later.out == program_[i].out) return true;
            input_changed = input_changed || later.out == program_[i].x;
        }
        return true;
    }

    Source source_of(const std::string& x) {
        const auto found = sources_.find(x);
        return found != sources_.end() ? found->second : Source{Source::Kind::kRows, stored(x), width(x)};
    }

    BufferId buffer(const std::string& name) const {
        const auto found = buffers_.find(name);
        if (found == buffers_.end()) throw ModelFileError("the program has no buffer " + name);
        return found->second;
    }
    int width(const std::string& name) const { return plan_.widths[static_cast<size_t>(buffer(name))]; }
    BufferId store(const std::string& name) {
        plan_.stored[static_cast<size_t>(buffer(name))] = true;
        return buffer(name);
    }
    BufferId stored(const std::string& name) const {
        if (!plan_.stored[static_cast<size_t>(buffer(name))]) {
            throw ModelFileError("the program reads buffer " + name + " before it is written");
        }
        return buffer(name);
    }

    const Tensor& tensor(const std::string& name) const {
        const auto found = plan_.tensors.find(name);
        if (found == plan_.tensors.end()) throw ModelFileError("the model has no tensor " + name);
        return found->second;
    }
    const Tensor& matrix(const std::string& name, int inputs) const {
        const Tensor& t = tensor(name);
        if (t.columns != inputs) {
            throw ModelFileError(name + ": rows of " + std::to_string(t.columns) + " elements, expected " +
                                 std::to_string(inputs));
        }
        return t;
    }
    void check_rows(const std::string& name, int64_t rows) const {
        if (tensor(name).rows != rows) {
            throw ModelFileError(name + ": " + std::to_string(tensor(name).rows) + " rows, expected " +
                                 std::to_string(rows));
        }
    }

    const float* norm_weight(const std::string& name, int size) {
        const Tensor& t = matrix(name, size);
        check_rows(name, 1);
        plan_.vectors.push_back(std::make_unique<float[]>(static_cast<size_t>(size)));
        dequantise_row(t, 0, plan_.vectors.back().get());
        return plan_.vectors.back().get();
    }

    std::vector<LinearPart> pack_stack(const std::vector<std::string>& names, int inputs, int outputs) {
        std::vector<LinearPart> parts;
        int64_t rows = 0;
        for (size_t i = 0; i < names.size();) {
            const int64_t first = rows;
            std::vector<Tensor> same;
            for (; i < names.size(); ++i) {
                const Tensor& t = matrix(names[i], inputs);
                if (!same.empty() && format_of(t.type) != format_of(same.front().type)) break;
                same.push_back(t);
                rows += t.rows;
            }
            plan_.matrices.push_back(std::make_unique<PackedMatrix>(pack(same, pool_)));
            parts.push_back({plan_.matrices.back().get(), static_cast<int>(first)});
        }
        if (rows != outputs) {
            throw ModelFileError(names.at(0) + " and what is stacked on it: " + std::to_string(rows) +
                                 " rows, expected " + std::to_string(outputs));
        }
        plan_.max_inputs = std::max(plan_.max_inputs, inputs);
        return parts;
    }

    const std::vector<ProgramOp>& program_;
    const ModelSizes& sizes_;
    ThreadPool& pool_;
    Plan& plan_;
    std::map<std::string, BufferId> buffers_;
    std::map<std::string, Source> sources_;  // fused, by the buffer that the program names
};

}  // namespace

Plan compile(const std::vector<ProgramOp>& program, const std::map<std::string, int>& widths,
             std::map<std::string, Tensor> tensors, const ModelSizes& sizes, ThreadPool& pool) {
    Plan plan;
    plan.tensors = std::move(tensors);
    Compiler(program, widths, sizes, pool, plan).compile();
    return plan;
}

}  // namespace segue

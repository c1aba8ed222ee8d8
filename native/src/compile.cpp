// From a program to a plan: checks shapes, packs weights, fuses norms and activations into linear layers.
#include <algorithm>
#include <set>

#include "plan.hpp"

namespace segue {
namespace {

// What an operation reads and writes; null: nothing of the program's buffers.
const std::string* input_of(const program::Op& op) {
    return std::visit(
        [](const auto& o) -> const std::string* {
            if constexpr (requires { o.x; }) return &o.x;
            return nullptr;
        },
        op);
}

const std::string* output_of(const program::Op& op) {
    return std::visit(
        [](const auto& o) -> const std::string* {
            if constexpr (requires { o.out; }) return &o.out;
            return nullptr;
        },
        op);
}

bool is(const std::string* name, const std::string& other) { return name != nullptr && *name == other; }

// Index of `value` in `values`, appended if it is not there.
template <class T>
size_t index_of(std::vector<T>& values, const T& value) {
    const auto found = std::find(values.begin(), values.end(), value);
    if (found != values.end()) return static_cast<size_t>(found - values.begin());
    values.push_back(value);
    return values.size() - 1;
}

class Compiler {
   public:
    Compiler(const Program& program, ThreadPool& pool, Plan& plan) : program_(program), pool_(pool), plan_(plan) {
        for (const auto& [name, width] : program.widths) {
            buffers_[name] = static_cast<BufferId>(plan.widths.size());
            plan.widths.push_back(width);
            plan.stored.push_back(false);
        }
    }

    void compile() {
        for (at_ = 0; at_ < program_.ops.size(); ++at_) {
            std::visit([&](const auto& op) { add(op); }, program_.ops[at_]);
        }
        find_tail();
    }

   private:
    void add(const program::Embed& op) {
        plan_.ops.push_back(EmbedOp{&matrix(op.weight, width(op.out)), store(op.out)});
        check_rows(op.weight, program_.vocab_size);
    }

    void add(const program::RMSNorm& op) {
        if (width(op.x) != width(op.out)) throw ModelFileError("norm: the buffers' widths differ");
        add_source(op, {Source::Kind::kNorm, stored(op.x), width(op.out), norm_weight(op.weight, width(op.x)), op.eps});
    }

    void add(const program::SiluMul& op) {
        if (width(op.x) != 2 * width(op.out)) throw ModelFileError("silu_mul: the input must be twice as wide");
        add_source(op, {Source::Kind::kSiluMul, stored(op.x), width(op.out)});
    }

    // Rows computed from rows: part of the linear layers that read them, or stored.
    template <class Op>
    void add_source(const Op& op, const Source& source) {
        if (only_linear_reads(op)) {
            sources_[op.out] = source;
        } else {
            sources_.erase(op.out);
            plan_.ops.push_back(StoreOp{source, store(op.out)});
        }
    }

    void add(const program::Linear& op) {
        if (op.weights.empty()) throw ModelFileError("linear: it has no weights");
        const Source source = source_of(op.x);
        sources_.erase(op.out);
        plan_.ops.push_back(
            LinearOp{source, pack_stack(op.weights, source.width, width(op.out)), store(op.out), op.accumulate});
    }

    void add(const program::Attention& op) {
        check_heads(op.heads);
        check_rope(op.rope, op.heads);
        const int query_width = op.heads.num_heads * op.heads.head_dim;
        if (width(op.x) != query_width + 2 * op.heads.num_kv_heads * op.heads.head_dim ||
            width(op.out) != query_width) {
            throw ModelFileError("attention: the buffers' widths do not fit the number of heads");
        }
        if (op.layer != static_cast<int>(plan_.kv_layers.size())) {
            throw ModelFileError("attention: its layers must be numbered from 0 in order, this one is " +
                                 std::to_string(op.layer));
        }
        // The executor stores k and v at the end of the row operations before.
        if (plan_.ops.empty() || std::holds_alternative<AttentionOp>(plan_.ops.back())) {
            throw ModelFileError("attention: nothing is computed for it");
        }
        plan_.kv_layers.push_back({op.heads.num_kv_heads, op.heads.head_dim});
        plan_.ops.push_back(AttentionOp{stored(op.x), store(op.out), op.layer, index_of(plan_.heads, op.heads),
                                        index_of(plan_.ropes, op.rope)});
    }

    void add(const program::Logits& op) {
        const Source source{Source::Kind::kNorm, stored(op.x), width(op.x), norm_weight(op.norm, width(op.x)), op.eps};
        plan_.ops.push_back(LogitsOp{source, pack_stack({op.weight}, source.width, program_.vocab_size)});
    }

    static void check_heads(const Heads& heads) {
        if (heads.num_heads < 1 || heads.num_kv_heads < 1 || heads.head_dim < 1) {
            throw ModelFileError("attention: the numbers of its heads and their size must be 1 or more");
        }
        if (heads.num_heads % heads.num_kv_heads != 0) {
            throw ModelFileError("attention: " + std::to_string(heads.num_heads) + " heads cannot share " +
                                 std::to_string(heads.num_kv_heads) + " KV heads evenly");
        }
    }

    static void check_rope(const Rope& rope, const Heads& heads) {
        if (rope.dim < 2 || rope.dim % 2 != 0 || rope.dim > heads.head_dim) {
            throw ModelFileError("attention: " + std::to_string(rope.dim) + " dimensions of heads of " +
                                 std::to_string(heads.head_dim) + " cannot be rotated in pairs");
        }
        if (!rope.factors.empty() && rope.factors.size() != static_cast<size_t>(rope.dim / 2)) {
            throw ModelFileError("attention: " + std::to_string(rope.factors.size()) + " RoPE factors for " +
                                 std::to_string(rope.dim / 2) + " pairs");
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

    // Whether what the operation at hand writes is read by linear layers only, and its own input stays as it is until
    // the last of them.
    template <class Op>
    bool only_linear_reads(const Op& op) const {
        bool input_changed = false;
        for (size_t i = at_ + 1; i < program_.ops.size(); ++i) {
            const program::Op& later = program_.ops[i];
            const auto* linear = std::get_if<program::Linear>(&later);
            if (is(input_of(later), op.out) && (linear == nullptr || input_changed)) return false;
            if (is(output_of(later), op.out)) return linear == nullptr || !linear->accumulate;
            input_changed = input_changed || is(output_of(later), op.x);
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

    const Program& program_;
    size_t at_ = 0;  // the operation at hand
    ThreadPool& pool_;
    Plan& plan_;
    std::map<std::string, BufferId> buffers_;
    std::map<std::string, Source> sources_;  // fused, by the buffer that the program names
};

}  // namespace

Plan compile(const Program& program, std::map<std::string, Tensor> tensors, ThreadPool& pool) {
    Plan plan;
    plan.tensors = std::move(tensors);
    Compiler(program, pool, plan).compile();
    return plan;
}

}  // namespace segue

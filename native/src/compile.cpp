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
            if constexpr (std::is_same_v<std::decay_t<decltype(o)>, program::NormParts>) return &o.x;
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
        const Tensor* positions = nullptr;
        if (!op.positions.empty()) {
            positions = &matrix(op.positions, width(op.out));
            check_rows(op.positions, op.first_position + program_.max_model_len);
        }
        plan_.ops.push_back(
            EmbedOp{&matrix(op.weight, width(op.out)), store(op.out), op.scale, positions, op.first_position});
        check_rows(op.weight, program_.vocab_size);
    }

    void add(const program::RMSNorm& op) {
        check_same_width(op);
        const int n = width(op.x);
        const Source source{.kind = Source::Kind::kRMSNorm,
                            .buffer = stored(op.x),
                            .width = n,
                            .weight = vector(op.weight, n),
                            .eps = op.eps};
        if (op.accumulate) {
            plan_.ops.push_back(StoreOp{source, stored(op.out), true});
        } else {
            add_source(op, source);
        }
    }

    void add(const program::LayerNorm& op) {
        check_same_width(op);
        const int n = width(op.x);
        add_source(op, {.kind = Source::Kind::kLayerNorm,
                        .buffer = stored(op.x),
                        .width = n,
                        .weight = vector(op.weight, n),
                        .bias = vector(op.bias, n),
                        .eps = op.eps});
    }

    void add(const program::NormParts& op) {
        if (op.first < 0 || op.count < 1 || op.width < 1 || op.first + op.count * op.width > width(op.x)) {
            throw ModelFileError("norm: the parts do not fit into the row");
        }
        plan_.ops.push_back(
            NormPartsOp{stored(op.x), vector(op.weight, op.width), op.first, op.count, op.width, op.eps});
    }

    void add(const program::Activation& op) {
        check_same_width(op);
        add_source(op, {.kind = Source::Kind::kActivation,
                        .buffer = stored(op.x),
                        .width = width(op.out),
                        .function = op.function});
    }

    void add(const program::GLU& op) {
        if (width(op.x) != 2 * width(op.out)) throw ModelFileError("glu: the input must be twice as wide");
        add_source(
            op, {.kind = Source::Kind::kGLU, .buffer = stored(op.x), .width = width(op.out), .function = op.function});
    }

    template <class Op>
    void check_same_width(const Op& op) const {
        if (width(op.x) != width(op.out)) throw ModelFileError(op.x + " and " + op.out + ": their widths differ");
    }

    // Rows computed from rows: part of the linear layers that read them, or stored.
    template <class Op>
    void add_source(const Op& op, const Source& source) {
        if (only_linear_reads(op)) {
            sources_[op.out] = source;
        } else {
            sources_.erase(op.out);
            plan_.ops.push_back(StoreOp{source, store(op.out), false});
        }
    }

    void add(const program::Linear& op) {
        if (op.weights.empty()) throw ModelFileError("linear: it has no weights");
        const Source source = source_of(op.x);
        sources_.erase(op.out);
        std::vector<Tensor> stack;
        for (const std::string& name : op.weights) stack.push_back(matrix(name, source.width));
        const Products products{pack_stack(stack, source.width, width(op.out)), bias(op), op.scale};
        plan_.ops.push_back(LinearOp{source, products, store(op.out), op.accumulate});
    }

    // The biases of stacked weights, one after the other; null: none has one.
    const float* bias(const program::Linear& op) {
        if (op.biases.empty()) return nullptr;
        if (op.biases.size() != op.weights.size()) throw ModelFileError("linear: not one bias for each of its weights");
        float* values = new_vector(width(op.out));
        for (size_t i = 0; i < op.weights.size(); ++i) {
            const int64_t outputs = tensor(op.weights[i]).rows;
            if (!op.biases[i].empty()) {
                dequantise_row(checked_vector(op.biases[i], static_cast<int>(outputs)), 0, values);
            }
            values += outputs;
        }
        return plan_.vectors.back().get();
    }

    void add(const program::Attention& op) {
        const Heads& heads = op.shape.heads;
        check_heads(heads);
        check_rope(op.rope, heads);
        if (op.shape.window < 0) throw ModelFileError("attention: its window is negative");
        const int query_width = heads.num_heads * heads.head_dim;
        if (width(op.x) != query_width + 2 * heads.num_kv_heads * heads.head_dim || width(op.out) != query_width) {
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
        plan_.kv_layers.push_back({heads.num_kv_heads, heads.head_dim});
        plan_.ops.push_back(AttentionOp{stored(op.x), store(op.out), op.layer, index_of(plan_.shapes, op.shape),
                                        index_of(plan_.ropes, op.rope), op.scale, op.softcap,
                                        op.sinks.empty() ? nullptr : vector(op.sinks, heads.num_heads)});
    }

    void add(const program::Experts& op) {
        if (op.count < 1 || op.used < 1 || op.used > op.count || op.width < 1) {
            throw ModelFileError("experts: " + std::to_string(op.used) + " of " + std::to_string(op.count) +
                                 ", networks of " + std::to_string(op.width));
        }
        const Source source = source_of(op.x);
        const auto products = [&](const std::vector<Tensor>& stack, int inputs, int outputs) {
            return Products{pack_stack(stack, inputs, outputs), nullptr, 1.0f};
        };
        const Products router = products({matrix(op.router, source.width)}, source.width, op.count);
        ExpertsOp experts{source, router, {}, stored(op.out), op.used, op.width, op.function};
        for (int e = 0; e < op.count; ++e) {
            const Tensor gate = one_of(op.gate, op.count, e, source.width);
            const Tensor up = one_of(op.up, op.count, e, source.width);
            const Tensor down = one_of(op.down, op.count, e, op.width);
            if (gate.rows != op.width) throw ModelFileError(op.gate + ": its networks have another width");
            experts.experts.push_back(
                {products({gate, up}, source.width, 2 * op.width), products({down}, op.width, width(op.out))});
        }
        plan_.ops.push_back(std::move(experts));
    }

    // Matrix `index` of the `count` of a tensor.
    Tensor one_of(const std::string& name, int count, int index, int inputs) const {
        Tensor t = matrix(name, inputs);
        if (t.rows % count != 0) throw ModelFileError(name + ": its rows are not those of " + std::to_string(count));
        t.rows /= count;
        t.data = t.row(t.rows * index);
        return t;
    }

    void add(const program::Logits& op) {
        const Source source = source_of(op.x);
        const Products products{pack_stack({matrix(op.weight, source.width)}, source.width, program_.vocab_size),
                                nullptr, op.scale};
        plan_.ops.push_back(LogitsOp{source, products, op.softcap});
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
        if (rope.dim < 0 || rope.dim % 2 != 0 || rope.dim > heads.head_dim) {
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
                if (stored->accumulate) read(stored->out);
                written.insert(stored->out);
            } else if (const auto* parts = std::get_if<NormPartsOp>(&plan_.ops[i])) {
                read(parts->buffer);
                written.insert(parts->buffer);
            } else if (const auto* experts = std::get_if<ExpertsOp>(&plan_.ops[i])) {
                read(experts->source.buffer);
                read(experts->out);
                written.insert(experts->out);
            } else if (const auto* logits = std::get_if<LogitsOp>(&plan_.ops[i])) {
                read(logits->source.buffer);
            } else if (const auto* embedding = std::get_if<EmbedOp>(&plan_.ops[i])) {
                written.insert(embedding->out);
            }
        }
        plan_.tail_reads.assign(reads.begin(), reads.end());
    }

    // Whether what the operation at hand writes is read by linear layers, experts and logits only, and its own input
    // stays as it is until the last of them.
    template <class Op>
    bool only_linear_reads(const Op& op) const {
        bool input_changed = false;
        for (size_t i = at_ + 1; i < program_.ops.size(); ++i) {
            const program::Op& later = program_.ops[i];
            const auto* linear = std::get_if<program::Linear>(&later);
            const bool multiplies = linear != nullptr || std::holds_alternative<program::Experts>(later) ||
                                    std::holds_alternative<program::Logits>(later);
            if (is(input_of(later), op.out) && (!multiplies || input_changed)) return false;
            if (is(output_of(later), op.out)) return linear == nullptr || !linear->accumulate;
            input_changed = input_changed || is(output_of(later), op.x);
        }
        return true;
    }

    Source source_of(const std::string& x) {
        const auto found = sources_.find(x);
        if (found != sources_.end()) return found->second;
        return {.kind = Source::Kind::kRows, .buffer = stored(x), .width = width(x)};
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

    const Tensor& checked_vector(const std::string& name, int size) const {
        check_rows(name, 1);
        return matrix(name, size);
    }
    // Zeros, and as many more as a panel's padding.
    float* new_vector(int size) {
        plan_.vectors.push_back(std::make_unique<float[]>(static_cast<size_t>(size) + kPanel));
        return plan_.vectors.back().get();
    }
    const float* vector(const std::string& name, int size) {
        const Tensor& t = checked_vector(name, size);
        float* values = new_vector(size);
        dequantise_row(t, 0, values);
        return values;
    }

    std::vector<LinearPart> pack_stack(const std::vector<Tensor>& stack, int inputs, int outputs) {
        std::vector<LinearPart> parts;
        int64_t rows = 0;
        for (size_t i = 0; i < stack.size();) {
            const int64_t first = rows;
            std::vector<Tensor> same;
            for (; i < stack.size(); ++i) {
                const Tensor& t = stack[i];
                if (!same.empty() && t.type != same.front().type) break;
                same.push_back(t);
                rows += t.rows;
            }
            plan_.matrices.push_back(std::make_unique<PackedMatrix>(pack(same, pool_)));
            parts.push_back({plan_.matrices.back().get(), static_cast<int>(first)});
        }
        if (rows != outputs) {
            throw ModelFileError(stack.at(0).name + " and what is stacked on it: " + std::to_string(rows) +
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

// The Python module segue._native: reads a program and steps from Python objects, runs them without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <type_traits>
#include <vector>

#include "isa.hpp"
#include "model.hpp"
#include "step_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace segue {

void bind_sampling(nb::module_& m);

namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Raises the error of segue.errors with this name.
void raise_segue_error(const char* name, nb::handle args) {
    PyErr_SetObject(nb::module_::import_("segue.errors").attr(name).ptr(), args.ptr());
}

void translate_error(const std::exception_ptr& error, void*) {
    try {
        std::rethrow_exception(error);
    } catch (const ModelFileError& e) {
        raise_segue_error("ModelFileError", nb::str(e.what()));
    } catch (const CapacityError& e) {
        raise_segue_error("CapacityError", nb::str(e.what()));
    } catch (const ParameterError& e) {
        raise_segue_error("ParameterError", nb::make_tuple(e.parameter.c_str(), e.value.c_str(), e.what()));
    }
}

// nanobind's own conversions to strings and containers end the process when memory runs out; these raise.
std::string to_string(const nb::str& text) { return text.c_str(); }

template <class T>
std::vector<T> to_vector(const nb::list& items) {
    std::vector<T> values;
    for (const nb::handle item : items) {
        if constexpr (std::is_same_v<T, std::string>) {
            values.push_back(to_string(nb::cast<nb::str>(item)));
        } else {
            values.push_back(nb::cast<T>(item));
        }
    }
    return values;
}

std::map<std::string, int> to_map(const nb::dict& items) {
    std::map<std::string, int> values;
    for (const auto [name, value] : items) values.emplace(to_string(nb::cast<nb::str>(name)), nb::cast<int>(value));
    return values;
}

// A program and its tensors, while Python hands them over.
struct ModelBuilder {
    std::vector<ProgramOp> program;
    std::map<std::string, Tensor> tensors;
    std::vector<nb::object> keep_alive;

    void add_tensor(const nb::str& name_, const nb::list& shape_, int type, nb::object data) {
        const std::string name = to_string(name_);
        const auto shape = to_vector<int64_t>(shape_);
        const auto bytes = nb::cast<Bytes>(data);
        Tensor tensor{name, static_cast<TensorType>(type), shape.size() == 1 ? 1 : shape.at(0), shape.back(),
                      bytes.data()};
        if (shape.size() > 2) throw ModelFileError(name + ": tensors of more than two dimensions are not supported");
        if (static_cast<size_t>(tensor.rows) * row_bytes(tensor.type, tensor.columns) != bytes.size()) {
            throw ModelFileError(name + ": " + std::to_string(bytes.size()) + " bytes do not fit its shape");
        }
        tensors.insert_or_assign(name, tensor);
        keep_alive.push_back(std::move(data));
    }

    void add(ProgramOp op) { program.push_back(std::move(op)); }
};

// A model and the Python objects it depends on.
struct PyModel {
    std::vector<nb::object> keep_alive;
    Model model;

    PyModel(ModelBuilder& builder, ModelSizes sizes, const nb::dict& widths, const nb::str& isa, int threads,
            bool kv_f32)
        : keep_alive(builder.keep_alive),
          model(std::move(sizes), builder.program, to_map(widths), builder.tensors, choose_kernels(to_string(isa)),
                threads, kv_f32) {}

    nb::tuple forward(nb::handle seqs, nb::handle copies) {
        const StepInput input = read_step(seqs, copies, model);
        StepOutput output;
        {
            nb::gil_scoped_release release;
            output = model.forward(input);
        }
        return write_output(input, output);
    }

    nb::ndarray<nb::numpy, float, nb::ndim<2>> logits(nb::handle token_ids) {
        const std::vector<int32_t> tokens = read_ids(token_ids, model.sizes().vocab_size, "token_ids");
        const size_t vocab = static_cast<size_t>(model.sizes().vocab_size);
        if (tokens.size() > static_cast<size_t>(model.sizes().max_model_len)) {
            throw nb::value_error("token_ids: more than max_model_len");
        }
        auto out = std::make_unique<float[]>(tokens.size() * vocab);
        {
            nb::gil_scoped_release release;
            model.logits(tokens, out.get());
        }
        nb::capsule owner(out.get(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
        float* data = out.release();
        return {data, {tokens.size(), vocab}, owner};
    }
};

void bind_builder(nb::module_& m) {
    using Kind = ProgramOp::Kind;
    nb::class_<ModelBuilder>(m, "ModelBuilder")
        .def(nb::init<>())
        .def("tensor", &ModelBuilder::add_tensor, "name"_a, "shape"_a, "type"_a, "data"_a)
        .def(
            "embed",
            [](ModelBuilder& b, const nb::str& weight, const nb::str& out) {
                b.add({.kind = Kind::kEmbed,
                       .x = {},
                       .norm = {},
                       .weights = {to_string(weight)},
                       .out = to_string(out)});
            },
            "weight"_a, "out"_a)
        .def(
            "rms_norm",
            [](ModelBuilder& b, const nb::str& x, const nb::str& weight, const nb::str& out, float eps) {
                b.add({.kind = Kind::kRmsNorm,
                       .x = to_string(x),
                       .norm = {},
                       .weights = {to_string(weight)},
                       .out = to_string(out),
                       .eps = eps});
            },
            "x"_a, "weight"_a, "out"_a, "eps"_a)
        .def(
            "linear",
            [](ModelBuilder& b, const nb::str& x, const nb::list& weights, const nb::str& out, bool accumulate) {
                b.add({.kind = Kind::kLinear,
                       .x = to_string(x),
                       .norm = {},
                       .weights = to_vector<std::string>(weights),
                       .out = to_string(out),
                       .accumulate = accumulate});
            },
            "x"_a, "weights"_a, "out"_a, "accumulate"_a)
        .def(
            "attention",
            [](ModelBuilder& b, const nb::str& qkv, const nb::str& out, int layer) {
                b.add({.kind = Kind::kAttention,
                       .x = to_string(qkv),
                       .norm = {},
                       .weights = {},
                       .out = to_string(out),
                       .layer = layer});
            },
            "qkv"_a, "out"_a, "layer"_a)
        .def(
            "silu_mul",
            [](ModelBuilder& b, const nb::str& x, const nb::str& out) {
                b.add({.kind = Kind::kSiluMul, .x = to_string(x), .norm = {}, .weights = {}, .out = to_string(out)});
            },
            "x"_a, "out"_a)
        .def(
            "logits",
            [](ModelBuilder& b, const nb::str& x, const nb::str& norm, float eps, const nb::str& weight) {
                b.add({.kind = Kind::kLogits,
                       .x = to_string(x),
                       .norm = to_string(norm),
                       .weights = {to_string(weight)},
                       .out = {},
                       .eps = eps});
            },
            "x"_a, "norm"_a, "eps"_a, "weight"_a);
}

void bind_model(nb::module_& m) {
    nb::class_<PyModel>(m, "Model")
        .def(
            "__init__",
            [](PyModel* self, ModelBuilder& builder, const nb::dict& widths, int vocab_size, int num_layers,
               int num_heads, int num_kv_heads, int head_dim, int max_model_len, double rope_theta, int rope_dim,
               bool rope_interleaved, const nb::list& rope_factors, const nb::str& isa, int threads, bool kv_f32) {
                ModelSizes sizes{vocab_size,       num_layers, num_heads,     num_kv_heads,
                                 head_dim,         max_model_len, rope_theta, rope_dim,
                                 rope_interleaved, to_vector<double>(rope_factors)};
                new (self) PyModel(builder, std::move(sizes), widths, isa, threads, kv_f32);
            },
            "builder"_a, nb::kw_only(), "widths"_a, "vocab_size"_a, "num_layers"_a, "num_heads"_a, "num_kv_heads"_a,
            "head_dim"_a, "max_model_len"_a, "rope_theta"_a, "rope_dim"_a, "rope_interleaved"_a, "rope_factors"_a,
            "isa"_a, "threads"_a, "kv_f32"_a)
        .def(
            "allocate_kv",
            [](PyModel& self, int64_t num_blocks, int64_t block_size) {
                self.model.allocate_kv(num_blocks, block_size);
            },
            "num_blocks"_a, "block_size"_a)
        .def("release_kv", [](PyModel& self) { self.model.release_kv(); })
        .def("forward", &PyModel::forward, "seqs"_a, "copies"_a)
        .def("logits", &PyModel::logits, "token_ids"_a)
        .def_prop_ro("kv_bytes_per_token", [](const PyModel& self) { return self.model.kv_bytes_per_token(); })
        .def_prop_ro("isa", [](const PyModel& self) { return self.model.isa(); })
        .def_prop_ro("threads", [](const PyModel& self) { return self.model.threads(); });
}

}  // namespace
}  // namespace segue

NB_MODULE(_native, m) {
    nb::register_exception_translator(segue::translate_error);
    segue::bind_builder(m);
    segue::bind_model(m);
    segue::bind_sampling(m);
    m.def("available_cpus", &segue::available_cpus);
}

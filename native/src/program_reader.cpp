#include "program_reader.hpp"

#include <nanobind/ndarray.h>

#include <string_view>

#include "from_python.hpp"

namespace nb = nanobind;

namespace segue {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int int_of(nb::handle object, const char* name) { return to_int(get(object, name), name); }
double double_of(nb::handle object, const char* name) { return to_double(get(object, name), name); }
float float_of(nb::handle object, const char* name) { return static_cast<float>(double_of(object, name)); }
bool bool_of(nb::handle object, const char* name) { return to_bool(get(object, name), name); }
std::string string_of(nb::handle object, const char* name) { return to_string(get(object, name), name); }

std::vector<std::string> strings_of(nb::handle object, const char* name) {
    std::vector<std::string> values;
    for_each(get(object, name), name, [&](nb::handle item) { values.push_back(to_string(item, name)); });
    return values;
}

// None is the value that means "none".
template <class T, class Read>
T or_none(nb::handle object, const char* name, T none, const Read& read) {
    return get(object, name).is_none() ? none : read(object, name);
}
std::string name_of(nb::handle object, const char* name) { return or_none(object, name, std::string(), string_of); }
float cap_of(nb::handle object, const char* name) { return or_none(object, name, 0.0f, float_of); }

// One for each weight, empty where it has none.
std::vector<std::string> biases_of(nb::handle op) {
    std::vector<std::string> values;
    for_each(get(op, "biases"), "biases",
             [&](nb::handle item) { values.push_back(item.is_none() ? std::string() : to_string(item, "biases")); });
    return values;
}

Function function_of(nb::handle op) {
    const std::string name = string_of(op, "function");
    if (name == "silu") return Function::kSilu;
    if (name == "gelu") return Function::kGelu;
    if (name == "gelu_tanh") return Function::kGeluTanh;
    if (name == "relu") return Function::kRelu;
    throw Refusal("function", "there is no " + name);
}

AttentionShape shape_of(nb::handle op) {
    return {{int_of(op, "num_heads"), int_of(op, "num_kv_heads"), int_of(op, "head_dim")},
            or_none(op, "window", 0, int_of)};
}

Rope rope_of(nb::handle op) {
    const nb::object rope = get(op, "rope");
    if (rope.is_none()) return {1.0, 0, false, {}, 1.0};
    Rope read{
        double_of(rope, "theta"), int_of(rope, "dim"), bool_of(rope, "interleaved"), {}, double_of(rope, "scale")};
    for_each(get(rope, "factors"), "factors",
             [&](nb::handle item) { read.factors.push_back(to_double(item, "factors")); });
    return read;
}

program::Op read_embed(nb::handle op) {
    return program::Embed{string_of(op, "weight"), string_of(op, "out"), float_of(op, "scale"),
                          name_of(op, "positions"), int_of(op, "first_position")};
}

program::Op read_rms_norm(nb::handle op) {
    return program::RMSNorm{string_of(op, "x"), string_of(op, "weight"), string_of(op, "out"), float_of(op, "eps"),
                            bool_of(op, "accumulate")};
}

program::Op read_layer_norm(nb::handle op) {
    return program::LayerNorm{string_of(op, "x"), string_of(op, "weight"), string_of(op, "bias"), string_of(op, "out"),
                              float_of(op, "eps")};
}

program::Op read_norm_parts(nb::handle op) {
    return program::NormParts{string_of(op, "x"),  string_of(op, "weight"), int_of(op, "first"),
                              int_of(op, "count"), int_of(op, "width"),     float_of(op, "eps")};
}

program::Op read_linear(nb::handle op) {
    return program::Linear{string_of(op, "x"),   strings_of(op, "weights"),
                           string_of(op, "out"), bool_of(op, "accumulate"),
                           biases_of(op),        float_of(op, "scale")};
}

program::Op read_attention(nb::handle op) {
    return program::Attention{string_of(op, "qkv"), string_of(op, "out"),  int_of(op, "layer"),   shape_of(op),
                              rope_of(op),          float_of(op, "scale"), cap_of(op, "softcap"), name_of(op, "sinks")};
}

program::Op read_activation(nb::handle op) {
    return program::Activation{string_of(op, "x"), string_of(op, "out"), function_of(op)};
}

program::Op read_glu(nb::handle op) { return program::GLU{string_of(op, "x"), string_of(op, "out"), function_of(op)}; }

program::Op read_experts(nb::handle op) {
    return program::Experts{string_of(op, "x"),    string_of(op, "router"), string_of(op, "gate"), string_of(op, "up"),
                            string_of(op, "down"), string_of(op, "out"),    int_of(op, "count"),   int_of(op, "used"),
                            int_of(op, "width"),   function_of(op)};
}

program::Op read_logits(nb::handle op) {
    return program::Logits{string_of(op, "x"), string_of(op, "weight"), float_of(op, "scale"), cap_of(op, "softcap")};
}

// How each type of operation is read, by the name of its dataclass.
using Reader = program::Op (*)(nb::handle op);
constexpr std::pair<std::string_view, Reader> kReaders[] = {
    {"Embed", read_embed},           {"RMSNorm", read_rms_norm}, {"LayerNorm", read_layer_norm},
    {"NormParts", read_norm_parts},  {"Linear", read_linear},    {"Attention", read_attention},
    {"Activation", read_activation}, {"GLU", read_glu},          {"Experts", read_experts},
    {"Logits", read_logits},
};

// Returns read(), or raises ModelFileError that says what of `object` cannot be read.
template <class Read>
auto read_or_refuse(nb::handle object, const Read& read) {
    const std::string type = Py_TYPE(object.ptr())->tp_name;
    try {
        return read();
    } catch (const Refusal& refusal) {
        throw ModelFileError(type + ": " + refusal.what());
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_AttributeError)) throw;
        PyObject* text = PyObject_Str(error.value().ptr());
        if (text == nullptr) throw nb::python_error();
        throw ModelFileError(type + ": " + to_string(nb::steal(text), "error"));
    }
}

program::Op read_op(nb::handle op) {
    const std::string_view type = Py_TYPE(op.ptr())->tp_name;
    for (const auto& [name, reader] : kReaders) {
        if (name == type) return read_or_refuse(op, [&] { return reader(op); });
    }
    throw ModelFileError("the native runtime has no operation " + std::string(type));
}

std::map<std::string, int> read_widths(nb::handle widths) {
    std::map<std::string, int> by_name;
    if (!PyDict_Check(widths.ptr())) throw Refusal("widths", "expected a dict");
    PyObject* name = nullptr;
    PyObject* width = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(widths.ptr(), &position, &name, &width);) {
        by_name.emplace(to_string(name, "widths"), to_int(width, "widths"));
    }
    return by_name;
}

void read_tensor(nb::handle object, Tensors& to) {
    const std::string name = string_of(object, "name");
    std::vector<int64_t> shape;
    for_each(get(object, "shape"), "shape", [&](nb::handle size) { shape.push_back(to_int64(size, "shape")); });
    if (shape.empty() || shape.size() > 3) {
        throw ModelFileError(name + ": only tensors of one to three dimensions are supported");
    }
    int64_t rows = 1;  // of all matrices together, where there are several
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
    nb::object data = get(object, "data");
    const auto bytes = nb::cast<Bytes>(data);
    const Tensor tensor{name, static_cast<TensorType>(int_of(object, "type")), rows, shape.back(), bytes.data()};
    if (static_cast<size_t>(tensor.rows) * row_bytes(tensor.type, tensor.columns) != bytes.size()) {
        throw ModelFileError(name + ": " + std::to_string(bytes.size()) + " bytes do not fit its shape");
    }
    to.by_name.insert_or_assign(name, tensor);
    to.keep_alive.push_back(std::move(data));
}

}  // namespace

Program read_program(nb::handle program) {
    return read_or_refuse(program, [&] {
        Program read{
            {}, read_widths(get(program, "widths")), int_of(program, "vocab_size"), int_of(program, "max_model_len")};
        for_each(get(program, "ops"), "ops", [&](nb::handle op) { read.ops.push_back(read_op(op)); });
        return read;
    });
}

Tensors read_tensors(nb::handle tensors) {
    Tensors read;
    for_each(tensors, "tensors",
             [&](nb::handle tensor) { read_or_refuse(tensor, [&] { read_tensor(tensor, read); }); });
    return read;
}

}  // namespace segue

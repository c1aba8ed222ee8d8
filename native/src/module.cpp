// The Python module segue._native: reads a program and steps from Python objects, runs them without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "from_python.hpp"
#include "isa.hpp"
#include "model.hpp"
#include "program_reader.hpp"
#include "step_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace segue {

void bind_sampling(nb::module_& m);

namespace {

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

// A model and the Python objects it depends on.
struct PyModel {
    std::vector<nb::object> keep_alive;
    Model model;

    PyModel(nb::handle program, Tensors tensors, const std::string& isa, int threads, bool kv_f32)
        : keep_alive(std::move(tensors.keep_alive)),
          model(read_program(program), std::move(tensors.by_name), choose_kernels(isa), threads, kv_f32) {}

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
        const std::vector<int32_t> tokens = read_ids(token_ids, model.vocab_size(), "token_ids");
        const size_t vocab = static_cast<size_t>(model.vocab_size());
        if (tokens.size() > static_cast<size_t>(model.max_model_len())) {
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

void bind_model(nb::module_& m) {
    nb::class_<PyModel>(m, "Model")
        .def(
            "__init__",
            [](PyModel* self, nb::handle program, nb::handle tensors, nb::handle isa, int threads, bool kv_f32) {
                new (self) PyModel(program, read_tensors(tensors), to_string(isa, "isa"), threads, kv_f32);
            },
            "program"_a, "tensors"_a, nb::kw_only(), "isa"_a, "threads"_a, "kv_f32"_a)
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
    segue::bind_model(m);
    segue::bind_sampling(m);
    m.def("available_cpus", &segue::available_cpus);
}

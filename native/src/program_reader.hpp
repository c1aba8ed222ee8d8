// Programs and tensors, from Python's objects (segue/models/program.py, segue/weights/model_file.py).
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <string>
#include <vector>

#include "program.hpp"
#include "weights.hpp"

namespace segue {

// Raises ModelFileError for an operation that is not known, or one without an attribute that it needs.
Program read_program(nanobind::handle program);

struct Tensors {
    std::map<std::string, Tensor> by_name;
    std::vector<nanobind::object> keep_alive;  // own the bytes
};

// Raises ModelFileError for a tensor whose bytes do not fit its shape.
Tensors read_tensors(nanobind::handle tensors);

}  // namespace segue

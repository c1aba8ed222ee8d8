// Tensors as stored in a model file, and their packed form for the kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common.hpp"
#include "kernels/table.hpp"
#include "thread_pool.hpp"

namespace segue {

// Bytes that `inputs` elements of a row take. Raises ModelFileError when they do not fill whole blocks or the type is
// unknown.
size_t row_bytes(TensorType type, int64_t inputs);

// A tensor of a mapped file; `data` is valid as long as the file is.
struct Tensor {
    std::string name;
    TensorType type;
    int64_t rows;  // 1 for a vector
    int64_t columns;
    const uint8_t* data;

    const uint8_t* row(int64_t i) const { return data + static_cast<size_t>(i) * row_bytes(type, columns); }
};

// Writes a row's elements [columns] as f32.
void dequantise_row(const Tensor& tensor, int64_t row, float* out);

// Tensors of one type stacked along their rows, in panels of 16 outputs (kernels/packed.hpp).
struct PackedMatrix {
    TensorType type;
    int outputs;
    int inputs;
    size_t panel_bytes;
    Buffer<uint8_t> data;

    int panels() const { return ceil_div(outputs, kPanel); }
    MatrixView view() const { return {data.data(), panel_bytes, outputs, inputs}; }
};

PackedMatrix pack(const std::vector<Tensor>& stack, ThreadPool& pool);

}  // namespace segue

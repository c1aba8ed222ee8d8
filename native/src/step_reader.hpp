// Steps between Python's objects (segue/contract/step.py) and the native runtime's arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "model.hpp"
#include "sample.hpp"
#include "step.hpp"

namespace segue {

// Ids of any sequence, each checked to be in [0, limit). Raises ValueError, naming `what`.
std::vector<int32_t> read_ids(nanobind::handle sequence, int limit, const char* what);

// Sampling as numbers, read once for each vocabulary. Raises ValueError, naming the field.
std::shared_ptr<const SamplingSpec> read_sampling(nanobind::handle sampling, int vocab_size);

// Reads a list of SeqStep. One that does not fit the model or its KV memory is refused, the others are read. Raises
// ValueError for copies of blocks that do not exist.
StepInput read_step(nanobind::handle seqs, nanobind::handle copies, const Model& model);

// (tokens, {row: logprobs}, {sequence: [logprobs]}, {sequence: error}); logprobs are the fields of TokenLogprobs.
nanobind::tuple write_output(const StepInput& input, const StepOutput& output);

}  // namespace segue

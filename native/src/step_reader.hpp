// Steps between Python's objects (segue/runtime/contract.py) and the native runtime's arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "model.hpp"
#include "step.hpp"

namespace segue {

// Ids of any sequence, each checked to be in [0, limit). Raises ValueError, naming `what`.
std::vector<int32_t> read_ids(nanobind::handle sequence, int limit, const char* what);

class StepReader {
   public:
    // Reads a list of SeqStep. Raises ValueError where it does not fit the model or its KV memory.
    StepInput read(nanobind::handle seqs, nanobind::handle copies, const Model& model);

   private:
    struct Spec {
        nanobind::object sampling;  // kept alive, so that its address stays its own
        std::shared_ptr<const SamplingSpec> spec;
    };

    void read_sequence(nanobind::handle seq, const Model& model, StepInput& input);
    std::shared_ptr<const SamplingSpec> spec_of(nanobind::handle sampling, int vocab_size);

    std::unordered_map<PyObject*, Spec> specs_;  // by identity: Sampling is frozen
};

// (tokens, {row: logprobs}, {sequence: [logprobs]}, {sequence}); logprobs are the fields of TokenLogprobs.
nanobind::tuple write_output(const StepInput& input, const StepOutput& output);

}  // namespace segue

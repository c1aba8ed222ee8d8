// One step as the native runtime sees it: plain arrays, checked at the border.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sample.hpp"

namespace segue {

// One sequence's part of a step; see SeqStep in segue/contract/step.py. Its inputs are
// StepInput.tokens[first_input, first_input + num_inputs): its tokens, then its drafts.
struct SequenceInput {
    int index;  // in the step
    int start;
    int first_input;
    int num_inputs;
    int num_drafts;
    int first_block;                               // into StepInput.blocks
    std::shared_ptr<const SamplingSpec> sampling;  // null: nothing is sampled
    std::vector<int32_t> history;  // ids at positions [0, start + tokens), where sampling needs them; then the drafts
    // By sampled row: bit i % 8 of byte i / 8 says whether id i may be drawn; no bytes: all may. No rows: all may.
    std::vector<std::vector<uint8_t>> masks;
    int first_target = 0;  // into StepInput.targets
    int num_targets = 0;
    int num_prompt_logprobs = 0;

    int num_tokens() const { return num_inputs - num_drafts; }
    int num_samples() const { return sampling == nullptr ? 0 : 1 + num_drafts; }
};

struct StepInput {
    std::vector<SequenceInput> sequences;              // those that are computed
    std::vector<std::pair<int, std::string>> refused;  // index in the step, and why, in one line
    std::vector<int32_t> tokens;
    std::vector<int32_t> blocks;
    std::vector<int32_t> targets;
    std::vector<std::pair<int32_t, int32_t>> copies;
};

enum class SequenceError : uint8_t { kNone, kNotFinite, kNoMemory };

struct StepOutput {
    std::vector<int32_t> tokens;                           // by sampled row
    std::vector<std::unique_ptr<TokenLogprobs>> logprobs;  // by sampled row; null where not asked for
    std::vector<TokenLogprobs> prompt_logprobs;            // by target
    std::vector<SequenceError> errors;                     // by sequence
};

}  // namespace segue

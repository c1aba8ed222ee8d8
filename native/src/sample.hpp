// Drawing a token id from a row of logits, and log-probabilities of a row.
//
// The Python twin, written to be read, is segue/sample/reference.py; it is the definition, and both draw the
// same id. Nothing here depends on the machine: no libm but one double-precision log, no sum whose order
// matters for the id drawn.

#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace segue {

// `segue/contract/step.py: Sampling`, as numbers.
struct SamplingSpec {
    float temperature = 0.0f;  // 0: greedy
    int32_t top_k = 0;         // 0: all
    float top_p = 1.0f;
    float min_p = 0.0f;
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    int32_t output_start = 0;  // position of the first output token
    std::vector<std::pair<int32_t, float>> logit_bias;
    std::vector<int32_t> banned;  // cannot be drawn for positions below `banned_until`
    int32_t banned_until = 0;
    uint64_t seed = 0;
    int32_t num_logprobs = -1;  // -1: none
};

struct TokenLogprobs {
    float logprob;                    // nats
    int32_t rank;                     // 1 + how many ids are strictly more likely
    std::vector<int32_t> top_ids;     // most likely first; among equals the lower id first
    std::vector<float> top_logprobs;  // of top_ids
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// The id drawn for `position` from logits [vocab]. `history` holds the ids at all positions below, or nothing
// when the spec has no penalties. `scratch` grows to 3 · vocab and can be reused. When every id is banned (or
// -inf), the id is 0; with a NaN or +inf among the logits it is some id in [0, vocab).
int32_t sample_row(std::span<const float> logits, const SamplingSpec& spec, int32_t position,
                   std::span<const int32_t> history, std::vector<float>& scratch);

// Log-probability and rank of `token` under logits [vocab], and the `num_top` most likely ids (at most vocab).
TokenLogprobs row_logprobs(std::span<const float> logits, int32_t token, int32_t num_top);

// False when there is a NaN or an infinity.
bool all_finite(std::span<const float> logits);

}  // namespace segue

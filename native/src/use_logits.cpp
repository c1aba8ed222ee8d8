#include "use_logits.hpp"

#include <cstring>
#include <limits>
#include <new>

namespace segue {
namespace {

bool draws_greedily(const SamplingSpec& spec, int position) {
    return spec.temperature == 0.0f && spec.repetition_penalty == 1.0f && spec.presence_penalty == 0.0f &&
           spec.frequency_penalty == 0.0f && spec.logit_bias.empty() &&
           (spec.banned.empty() || position >= spec.banned_until);
}

// Which ids the row may draw; empty: all.
std::span<const uint8_t> mask_of(const WantedRow& wanted, const SequenceInput& seq) {
    if (seq.masks.empty()) return {};
    return seq.masks[static_cast<size_t>(wanted.num_drafts)];
}

int32_t draw(const WantedRow& wanted, const SequenceInput& seq, const SamplingSpec& spec, std::span<const float> logits,
             Workspace& work) {
    const size_t later_drafts = static_cast<size_t>(seq.num_drafts - wanted.num_drafts);
    const size_t known = seq.history.empty() ? 0 : seq.history.size() - later_drafts;
    const std::span<const uint8_t> mask = mask_of(wanted, seq);
    if (!mask.empty()) {
        work.masked.assign(logits.begin(), logits.end());
        for (size_t id = 0; id < logits.size(); ++id) {
            if ((mask[id / 8] >> (id % 8) & 1) == 0) work.masked[id] = -std::numeric_limits<float>::infinity();
        }
        logits = work.masked;
    }
    return sample_row(logits, spec, wanted.position + 1, {seq.history.data(), known}, work.sampling);
}

SequenceError sample_and_score(Execution& run, const WantedRow& wanted, std::span<const float> logits,
                               Workspace& work) {
    const SequenceInput& seq = run.input.sequences[wanted.sequence];
    const SamplingSpec* spec = wanted.sampled ? seq.sampling.get() : nullptr;
    int32_t greedy = -1;
    if (spec != nullptr && draws_greedily(*spec, wanted.position + 1) && mask_of(wanted, seq).empty()) {
        greedy = run.kernels.argmax(logits.data(), static_cast<int>(logits.size()));
        if (greedy < 0) return SequenceError::kNotFinite;
    } else if (!all_finite(logits)) {
        return SequenceError::kNotFinite;
    }
    if (wanted.scored) {
        run.output.prompt_logprobs[wanted.target] =
            row_logprobs(logits, run.input.targets[wanted.target], seq.num_prompt_logprobs);
    }
    if (spec == nullptr) return SequenceError::kNone;
    const int32_t id = greedy >= 0 ? greedy : draw(wanted, seq, *spec, logits, work);
    run.output.tokens[wanted.sample] = id;
    if (spec->num_logprobs >= 0) {
        run.output.logprobs[wanted.sample] =
            std::make_unique<TokenLogprobs>(row_logprobs(logits, id, spec->num_logprobs));
    }
    return SequenceError::kNone;
}

}  // namespace

void use_logits(Execution& run, const WantedRow& wanted, std::span<const float> logits, Workspace& work) {
    if (run.logits_out != nullptr) {
        std::memcpy(run.logits_out + static_cast<size_t>(wanted.row) * logits.size(), logits.data(),
                    logits.size_bytes());
        return;
    }
    // The one place where a thread of the pool allocates: no exception may leave it.
    SequenceError error;
    try {
        error = sample_and_score(run, wanted, logits, work);
    } catch (const std::bad_alloc&) {
        error = SequenceError::kNoMemory;
    }
    if (error != SequenceError::kNone) {
        std::atomic_ref(run.output.errors[wanted.sequence]).store(error, std::memory_order_relaxed);
    }
}

}  // namespace segue

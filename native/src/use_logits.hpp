// What becomes of a row of logits: an id is drawn from it, and the prompt is scored.
#pragma once

#include <span>

#include "execution.hpp"

namespace segue {

// Writes what row `wanted` gives, or its sequence's error, to run.output.
void use_logits(Execution& run, const WantedRow& wanted, std::span<const float> logits, Workspace& work);

}  // namespace segue

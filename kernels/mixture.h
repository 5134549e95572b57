// Layers with several MLPs, the experts, of which each token goes through those that a router scores best.
#pragma once
#include "executor.h"

namespace bitnet {

// Floats a token that a mixture takes beside what the caller laid out.
int64_t mixture_floats(const Mixture& mixture);
// Its steps, in order; that room begins at `offset` floats a token.
std::vector<std::unique_ptr<Step>> mixture_steps(Mixture mixture, int64_t offset);

}  // namespace bitnet

// Products of layers with ternary matrices that have one scale.
#pragma once
#include "executor.h"

namespace bitnet {

std::unique_ptr<Step> ternary_step(const TernaryWeight* weight, Codes x, Rows out, const Rows* residual);

}  // namespace bitnet

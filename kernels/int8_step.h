// The product with a matrix of int8 weights that has a scale a row: the quantised head's layout and kernels.
#pragma once
#include "executor.h"
#include "quantised_head.h"

namespace bitnet {

std::unique_ptr<Step> int8_step(const QuantisedHead* weight, Codes x, Rows out, const Rows* residual);

}  // namespace bitnet

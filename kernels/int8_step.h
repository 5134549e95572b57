// The product with a matrix of int8 weights that has a scale a row: the quantised head's layout and kernels.
#pragma once
#include "executor.h"
#include "quantised_head.h"

namespace bitnet {

// So many tokens at a time, where there is no matrix product: their sums fit into the registers.
constexpr int64_t kMaxInt8Tokens = 8;

std::unique_ptr<Step> int8_step(const QuantisedHead* weight, Codes x, Rows out, const Rows* residual);

}  // namespace bitnet

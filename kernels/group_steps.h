// The product with a ternary matrix that has a scale for each group of columns, in two steps.
#pragma once
#include "executor.h"

namespace bitnet {

// The sums of each token's codes over the groups, which stand in the arena at `sums_offset` floats a token.
std::unique_ptr<Step> group_sums_step(const TernaryWeight* weight, Codes x, int64_t sums_offset);
std::unique_ptr<Step> group_product_step(const TernaryWeight* weight, Codes x, int64_t sums_offset, Rows out,
                                         const Rows* residual);

}  // namespace bitnet

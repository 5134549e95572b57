// Products with matrices of floats.
#pragma once
#include "executor.h"

namespace bitnet {

std::unique_ptr<Step> dense_step(const DenseWeight* weight, Rows x, Rows out, const Rows* residual);

}  // namespace bitnet

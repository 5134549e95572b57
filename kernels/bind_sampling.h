#pragma once

#include <nanobind/nanobind.h>

// Adds SamplingRule, RowSampler and sampling_noise to the module: see bind_sampling.cpp.
void bind_sampling(nanobind::module_& m);

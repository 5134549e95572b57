#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>

#include "bind_arrays.h"
#include "sampling.h"

namespace bitnet {

using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require_ids(const int32_t* ids, size_t count, size_t vocab_size);

// The rule that a tuple holds.
const SamplingRule& rule_in(nb::handle object);

// What Python says of a draw, checked; the rule and the arrays must outlive it.
Draw checked_draw(size_t vocab_size, const SamplingRule& rule, const Array1i& tokens, size_t num_prompt, bool ban_ends,
                  const NoiseKey& key, const std::optional<Mask>& mask = {});

}  // namespace bitnet

// Adds SamplingRule, RowSampler and sampling_noise to the module: see bind_sampling.cpp.
void bind_sampling(nanobind::module_& m);

#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "bind_arrays.h"
#include "executor.h"
#include "float_mode.h"
#include "quantised_head.h"

namespace bitnet {

// The scores of a head in fewer bits; the head itself is not needed once this is made.
struct BoundHead {
    std::unique_ptr<QuantisedHead> head;
    BoundHead(const Dense& dense, int bits, Executor& executor) {
        require(bits == 6 || bits == 8, "a quantised head has 6 or 8 bits");
        const ReleasedGil release;
        head = std::make_unique<QuantisedHead>(dense.weight, bits, executor);
    }
    void scores(Executor& executor, Floats x, FloatsOut out) const {
        require(int64_t(x.shape(1)) == head->columns(), "x has another width than the head");
        require(out.shape(0) == x.shape(0) && int64_t(out.shape(1)) == head->rows(), "out is [inputs, rows]");
        require_aligned(x);
        require_aligned(out);
        const ReleasedGil release;
        const FloatMode mode;
        head->scores(executor, x.data(), int64_t(x.shape(0)), out.data());
    }
};

}  // namespace bitnet

void bind_heads(nanobind::module_& m);

#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "bind_arrays.h"
#include "weights.h"

namespace bitnet {

// A weight as Python holds it. Packing moves its memory, without the GIL: meanwhile nobody else reads or packs it, and
// nobody packs it while a program multiplies with it. Who does so is counted under the GIL.
class BoundWeight : public TernaryWeight {
  public:
    using TernaryWeight::TernaryWeight;
    // While one lives a thread packs the weight, and while the others do threads read some; these throw
    // std::invalid_argument where both would meet.
    class Packing;
    class Reading;

  private:
    bool is_packing_ = false;
    int num_reading_ = 0;
};

class BoundWeight::Packing {
  public:
    explicit Packing(BoundWeight& weight) : weight_(weight) {
        require(!weight.is_packing_, "another thread is packing this weight");
        require(!weight.num_reading_, "a program is running with this weight");
        weight.is_packing_ = true;
    }
    ~Packing() { weight_.is_packing_ = false; }
    Packing(const Packing&) = delete;

  private:
    BoundWeight& weight_;
};

class BoundWeight::Reading {
  public:
    // The weights outlive it.
    explicit Reading(std::span<BoundWeight* const> weights) : weights_(weights) {
        for (const BoundWeight* weight : weights_)
            require(!weight->is_packing_, "another thread is packing this weight");
        for (BoundWeight* weight : weights_) weight->num_reading_++;
    }
    ~Reading() {
        for (BoundWeight* weight : weights_) weight->num_reading_--;
    }
    Reading(const Reading&) = delete;

  private:
    std::span<BoundWeight* const> weights_;
};

}  // namespace bitnet

// Adds Arena and TernaryWeight to the module.
void bind_weights(nanobind::module_& m);

// The scales of groups of columns: of 32 rows side by side, for each group.
#pragma once
#include <functional>

#include "kernels.h"
#include "memory.h"

namespace bitnet {

class GroupScales {
  public:
    GroupScales() = default;
    explicit GroupScales(int64_t count);
    // To write them: all in 32 bits, until `settle`.
    float* floats();
    // Moves them to where they stay, in 16 bits where these hold all of them exactly, as GGUF files have them.
    void settle(const std::function<Memory(int64_t)>& take);
    ScaleLines from(int64_t index) const { return {memory_.data() + index * (is_half_ ? 2 : 4), is_half_}; }
    int64_t bytes() const { return memory_.bytes(); }

  private:
    int64_t count_ = 0;
    bool is_half_ = false;
    Memory memory_;
};

}  // namespace bitnet

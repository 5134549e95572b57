// A table of embeddings in int8: a number is its code times the scale of its row, max |w| / 127.
#pragma once
#include <vector>

#include "executor.h"

namespace bitnet {

class Int8Table {
  public:
    // Throws std::invalid_argument where a weight is not finite.
    Int8Table(const DenseWeight& table, Executor& executor);
    const DenseWeight& codes() const { return codes_; }
    const float* scales() const { return scales_.data(); }
    int64_t bytes() const { return codes_.rows * (codes_.row_bytes() + 4); }

  private:
    void round_row(const float* row, int64_t index);

    Memory memory_;
    DenseWeight codes_;
    std::vector<float> scales_;
};

}  // namespace bitnet

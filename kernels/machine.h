// What this machine can do at most: memory read and int8 multiply-adds a second, by all threads at once.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "weights.h"

namespace bitnet {

class Limits {
  public:
    // Takes and touches `bytes` of memory to read; only if it is far larger than the caches does it tell the memory's
    // speed.
    Limits(int64_t bytes, int num_threads);

    // Bytes a second of plain sequential reading, each thread its own share. Takes some 60 ms, as int8_peak does.
    double read_bandwidth();
    // Multiply-adds a second from registers; throws std::invalid_argument for a path that this machine lacks.
    double int8_peak(const std::string& isa);

  private:
    double median_rate(const std::function<int64_t(int)>& work);

    int num_threads_;
    Memory memory_;
    std::vector<int64_t> next_chunks_;  // where each thread goes on, lest it read what is still in a cache
};

}  // namespace bitnet

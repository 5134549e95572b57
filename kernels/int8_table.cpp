#include "int8_table.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "ternary_table.h"

namespace bitnet {

Int8Table::Int8Table(const DenseWeight& table, Executor& executor)
    : memory_(table.rows * table.columns),
      codes_{memory_.data(), Dtype::i8, table.rows, table.columns},
      scales_(size_t(table.rows)) {
    executor.each(table.rows, 4 * table.columns, 64, [&](int64_t first, int64_t last, int) {
        std::vector<float> row(size_t(table.columns));
        for (int64_t r = first; r < last; r++) {
            read_row(executor.kernels(), table, r, row.data());
            round_row(row.data(), r);
        }
    });
}

void Int8Table::round_row(const float* row, int64_t index) {
    uint32_t largest_bits = 0;  // magnitudes ascend as their bits do, and what is not finite is above all others
    for (int64_t k = 0; k < codes_.columns; k++) {
        uint32_t bits;
        std::memcpy(&bits, row + k, 4);
        largest_bits = std::max(largest_bits, bits & 0x7fffffff);
    }
    if (largest_bits >= 0x7f800000) throw std::invalid_argument("a weight is NaN or infinite");
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    const float scale = largest > 1e-30f ? largest / 127.0f : 1.0f;  // else all codes are 0
    constexpr float kWhole = 12582912.0f;                            // half to even, for what is below 2^22
    int8_t* codes = reinterpret_cast<int8_t*>(memory_.data()) + index * codes_.columns;
    for (int64_t k = 0; k < codes_.columns; k++) codes[k] = int8_t(row[k] / scale + kWhole - kWhole);
    scales_[size_t(index)] = scale;
}

}  // namespace bitnet

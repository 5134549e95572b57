// Plain C++: runs anywhere, and is the oracle that every other path is held to.
#include "lanes_generic.h"
#include "verbs.h"

namespace {

void ternary_tile(const uint8_t* weights, const int8_t* codes, int steps, int tokens, int32_t* acc) {
    std::memset(acc, 0, sizeof(int32_t) * kGroupRows * size_t(tokens));
    for (int step = 0; step < steps; step++)
        for (int row = 0; row < kGroupRows; row++)
            for (int i = 0; i < kStepColumns; i++) {
                const int field = i / 4, j = i % 4;
                const int code = weights[step * kStepBytes + 4 * row + j] >> (2 * field) & 3;
                for (int t = 0; t < tokens; t++)
                    acc[t * kGroupRows + row] += code * codes[((step * 4 + field) * tokens + t) * 4 + j];
            }
}

int64_t int8_peak(int64_t iterations) {
    int32_t sum = 0;
    volatile int8_t w = 1, a = 3;  // the compiler cannot know the sum
    for (int64_t i = 0; i < iterations; i++) sum += w * a;
    volatile int32_t sink = sum;
    (void)sink;
    return iterations;
}

}  // namespace

const bitnet::Kernels* bitnet::generic_kernels() {
    static constexpr Kernels kernels = [] {
        Kernels own = make_kernels("generic", ternary_tile, int8_peak);
        own.rough_inputs = 1;
        own.cost_of_help = 1'000'000;
        return own;
    }();
    return &kernels;
}

// Checks and times products of int8 weights, as the executor runs them.
#include <cstdio>

#include "executor.h"
#include "ladder.h"
#include "quantised_head.h"

namespace bitnet {

// With and without a residual, on two threads.
Result check_int8(const Kernels& kernels, Random random) {
    const int64_t rows = 1 + random.below(60), columns = 1 + random.below(300), tokens = 1 + random.below(40);
    const int64_t padded = (columns + 63) / 64 * 64, begin = (columns + 15) / 16 * 16;
    const auto w = floats(random, rows * columns), x = floats(random, tokens * columns);
    Executor executor(kernels.name, 2);
    const QuantisedHead weight({w.data(), Dtype::f32, rows, columns}, 8, executor);
    const Codes codes{begin, padded};
    const Rows sums{Base::arena, begin + codes.floats(), rows, 0, rows};
    Program program(sums.offset + rows);
    program.rows_to_codes({{Base::input, 0, columns, 0, columns}, nullptr, Activation::none, nullptr, 0.0f}, codes);
    program.int8(&weight, codes, sums, nullptr);
    program.int8(&weight, codes, {Base::output, 0, rows, 0, rows}, &sums);
    std::vector<float> out(size_t(tokens * rows));
    executor.run(program, tokens, nullptr, x.data(), out.data());
    Result result;
    append(result, out);
    return result;
}

// The gate and up projections of Llama 3.2 1B: 16384 x 2048, one thread, beside the same in bfloat16.
void time_int8(const Kernels& kernels) {
    constexpr int64_t rows = 16384, columns = 2048, most = 128;
    Random random{4};
    Executor executor(kernels.name, 1);
    std::vector<uint16_t> w(size_t(rows * columns));
    for (uint16_t& each : w) each = uint16_t(0x3f80 | (random.next() & 0x807f));
    const DenseWeight dense{w.data(), Dtype::bf16, rows, columns};
    const QuantisedHead weight(dense, 8, executor);
    const Rows x{Base::input, 0, columns, 0, columns}, out{Base::output, 0, rows, 0, rows};
    Program rounded(columns / 4 + 16), exact(0);
    rounded.rows_to_codes({x, nullptr, Activation::none, nullptr, 0.0f}, {0, columns});
    rounded.int8(&weight, {0, columns}, out, nullptr);
    exact.dense(&dense, x, out, nullptr);
    const auto inputs = floats(random, most * columns);
    std::vector<float> outputs(size_t(most * rows));
    for (const int64_t tokens : {1, 3, 8, 12, 128}) {
        const auto t = medians_in_turns({[&] { executor.run(rounded, tokens, nullptr, inputs.data(), outputs.data()); },
                                         [&] { executor.run(exact, tokens, nullptr, inputs.data(), outputs.data()); }});
        const double macs = double(rows * columns * tokens);
        std::printf("%-8s int8 %3d tokens: %6.1f GMAC/s, %5.1f GB/s of weights, %4.1f times as fast as bf16\n",
                    kernels.name, int(tokens), macs / t[0] / 1e9, double(weight.bytes()) / t[0] / 1e9, t[1] / t[0]);
    }
}

}  // namespace bitnet

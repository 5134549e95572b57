// The ladder's part about ternary matrices with a scale for each group of columns.
#include <cstdio>
#include <deque>

#include "executor.h"
#include "ladder.h"

namespace bitnet {

namespace {

TernaryWeight grouped_weight(Random& random, int64_t rows, int64_t columns, int64_t group_columns,
                             bool has_zeros = true) {
    std::vector<uint8_t> c(size_t(rows * columns));
    for (uint8_t& x : c) x = uint8_t(has_zeros ? random.below(3) - 1 : 2 * random.below(2) - 1);
    TernaryWeight weight(columns, {rows}, Format::u2, group_columns);
    if (group_columns)
        weight.pack(0, c.data(), Layout::codes, floats(random, rows * weight.column_groups()).data());
    else
        weight.pack(0, c.data(), Layout::codes, 1.0f);
    return weight;
}

Codes codes_of(int64_t columns) { return {0, (columns + 15) / 16 * 16}; }

int64_t arena_floats(int64_t columns) { return codes_of(columns).floats(); }

// Quantises the input and multiplies it by the weight; where `residual`, the product is added to the input.
void product(Program& program, const TernaryWeight& weight, bool residual) {
    const int64_t columns = weight.columns(), rows = weight.rows();
    const Rows x{Base::input, 0, columns, 0, columns}, added{Base::input, 0, columns, 0, rows};
    const Codes codes = codes_of(columns);
    program.rows_to_codes({x, nullptr, Activation::none, nullptr, 0.0f}, codes);
    program.ternary(&weight, codes, {Base::output, 0, rows, 0, rows}, residual ? &added : nullptr);
}

}  // namespace

Result check_groups(const Kernels& kernels, Random random) {
    const int rows = 1 + random.below(random.below(4) ? 70 : 1100), tokens = 1 + random.below(40);
    const bool has_zeros = random.below(2);
    const int whole = has_zeros ? 1 : 2 * kStepColumns, columns = (rows + random.below(400) + whole) / whole * whole;
    const TernaryWeight weight = grouped_weight(random, rows, columns, random.below(2) ? 64 : 128, has_zeros);
    Program program(arena_floats(columns));
    product(program, weight, random.below(2));
    const auto x = floats(random, tokens * columns);
    std::vector<float> out(size_t(tokens * rows));
    Executor(kernels.name, 1 + random.below(2)).run(program, tokens, nullptr, x.data(), out.data());
    Result result;
    append(result, out);
    return result;
}

// The gate and up projections of BitNet b1.58 2B-4T beside the same with one scale, and of -1 and +1 alone, one thread.
void time_groups(const Kernels& kernels) {
    Random random{4};
    constexpr int64_t rows = 13824, columns = 2560;
    const TernaryWeight plain = grouped_weight(random, rows, columns, 0),
                        fine = grouped_weight(random, rows, columns, 64),
                        coarse = grouped_weight(random, rows, columns, 128),
                        signs = grouped_weight(random, rows, columns, 128, false);
    std::deque<Program> programs;  // which cannot be moved
    for (const TernaryWeight* weight : {&plain, &fine, &coarse, &signs})
        product(programs.emplace_back(arena_floats(columns)), *weight, false);
    Executor executor(kernels.name, 1);
    for (const int tokens : {1, 2, 4, 8, 12, 16, 24, 32, 128}) {
        const auto x = floats(random, tokens * columns);
        std::vector<float> out(size_t(tokens * rows));
        std::vector<std::function<void()>> works;
        for (const Program& program : programs)
            works.push_back([&] { executor.run(program, tokens, nullptr, x.data(), out.data()); });
        const auto t = medians_in_turns(works);
        const double macs = double(rows * columns) * tokens / 1e9;
        std::printf("%-8s one scale, groups of 64, of 128, and those in one bit, %3d tokens: %6.1f", kernels.name,
                    tokens, macs / t[0]);
        for (size_t i = 1; i < t.size(); i++) std::printf(", %6.1f (%.2f)", macs / t[i], t[0] / t[i]);
        std::printf(" GMAC/s\n");
    }
}

}  // namespace bitnet

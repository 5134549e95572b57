// Checks and times products of many tokens.
#include <algorithm>
#include <cstring>

#include "executor.h"
#include "ladder.h"

namespace bitnet {

namespace {

constexpr int kList = kPairList + 1;

int num_tiles(const Kernels& kernels, int tokens) {
    const int most = kernels.many_product ? kernels.many_tile : kMaxTileTokens;
    return (tokens + most - 1) / most;
}

// Codes of one token after the other to tiles of tokens.
std::vector<int8_t> in_tiles(const std::vector<int8_t>& codes, int padded, int tokens, int tiles) {
    std::vector<int8_t> tiled(codes.size());
    for (int i = 0; i < tiles; i++) {
        const int first = tokens * i / tiles, count = tokens * (i + 1) / tiles - first;
        for (int t = 0; t < count; t++)
            for (int k = 0; k < padded; k++)
                tiled[size_t(first * padded + k / 4 * 4 * count + 4 * t + k % 4)] =
                    codes[size_t((first + t) * padded + k)];
    }
    return tiled;
}

}  // namespace

// One group times many tokens, by the path's product for them; in half of the cases many codes do not fit into pairs.
Result check_many(const Kernels& kernels, Random random) {
    const bool is_t5 = random.below(2);
    const int steps = is_t5 ? kBlockSteps * (1 + random.below(22)) : 1 + random.below(110);
    const int columns = steps * kStepColumns, padded = (columns + 63) / 64 * 64, tokens = 1 + random.below(40);
    const TernaryWeight weight = ternary_weight(random, kGroupRows, columns, is_t5 ? Format::t5 : Format::u2);
    auto a = codes(random, padded * tokens);
    const int rarity = random.below(2) ? 1 + random.below(20) : 400;
    constexpr int8_t kFar[][2] = {{127, -128}, {127, -127}, {127, 127}};
    const auto& far = kFar[random.below(3)];
    for (int64_t i = 0; i < int64_t(a.size()); i++) {
        a[size_t(i)] = std::clamp<int8_t>(a[size_t(i)], -126, 126);
        if (!random.below(rarity)) a[size_t(i)] = far[random.below(2)];
        if (i % padded >= columns) a[size_t(i)] = 0;
    }
    const int tiles = num_tiles(kernels, tokens);
    std::vector<int32_t> acc(size_t(tokens * kGroupRows)), offsets(static_cast<size_t>(tokens));
    std::vector<uint16_t> lists(size_t(tokens * kList));
    std::vector<uint8_t> expanded(size_t(steps * kStepBytes));
    if (is_t5) expand_blocks(weight.group_data(0), steps / kBlockSteps, expanded.data());
    const bool stays_t5 = is_t5 && kernels.block_tile;
    const uint8_t* w = is_t5 && !stays_t5 ? expanded.data() : weight.group_data(0);
    for (int t = 0; kernels.pair_row && t < tokens; t++)
        kernels.pair_row(a.data() + t * padded, padded, random.below(2), &offsets[size_t(t)],
                         &lists[size_t(t * kList)]);
    const auto tiled = in_tiles(a, padded, tokens, tiles);
    const ManyTask task{w,     stays_t5, steps, tiled.data(),   padded,       tokens,
                        tiles, 0,        tiles, offsets.data(), lists.data(), acc.data()};
    if (kernels.many_product) kernels.many_product(task);
    for (int i = 0; !kernels.many_product && i < tiles; i++) {
        const int first = tokens * i / tiles, count = tokens * (i + 1) / tiles - first;
        (stays_t5 ? kernels.block_tile : kernels.ternary_tile)(w, tiled.data() + first * padded,
                                                               stays_t5 ? steps / kBlockSteps : steps, count,
                                                               acc.data() + first * kGroupRows);
    }
    Result result;
    append(result, acc);
    return result;
}

// The product of a matrix, two groups at a time as the executor does them, weights in the second cache and in memory.
static void time_matrix(const Kernels& kernels) {
    Random random{1};
    constexpr int columns = 2560, steps = columns / kStepColumns, most_tokens = 128;
    const auto a = codes(random, columns * most_tokens + 64);
    const auto* lines = reinterpret_cast<const int8_t*>((uintptr_t(a.data()) + 63) / 64 * 64);
    const Memory sums(2 * most_tokens * kGroupRows * 4);  // lines of 64 bytes, as an executor's
    auto* acc = reinterpret_cast<int32_t*>(sums.data());
    for (const bool is_t5 : {false, true})
        for (const int groups : {32, 6912}) {
            const int steps_each = is_t5 ? steps / kBlockSteps * 4 : steps;
            const auto source = weights(random, int64_t(groups) * steps_each * kStepBytes);
            const Memory w(int64_t(source.size()) + 65536);  // what is fetched ahead of the last ones is there too
            std::memcpy(w.data(), source.data(), source.size());
            for (const int tokens : {1, 4, 6, 8, 12, 16, 24, 32, 48, 64, most_tokens}) {
                const double t = median_seconds([&] {
                    for (int g = 0; g < groups; g += 2)
                        kernels.matrix_product({w.data() + int64_t(g) * steps_each * kStepBytes, is_t5, 2, steps_each,
                                                lines, columns, tokens, acc, most_tokens});
                });
                const double macs = double(groups) * kGroupRows * columns * tokens;
                std::printf("%-8s %s %6.1f MB, %d tokens as a matrix: %6.1f GMAC/s, %5.1f GB/s of weights\n",
                            kernels.name, is_t5 ? "T5" : "U2", double(w.bytes()) / 1e6, tokens, macs / t / 1e9,
                            double(w.bytes()) / t / 1e9);
            }
        }
}

// As time_ternary, weights in the second cache.
void time_many(const Kernels& kernels) {
    if (kernels.matrix_product) time_matrix(kernels);
    if (!kernels.many_product) return;
    const double most = peak(kernels);
    Random random{1};
    constexpr int columns = 2560, steps = columns / kStepColumns, groups = 32, most_tokens = 512;
    const auto a = codes(random, columns * most_tokens);
    const auto w = weights(random, groups * steps * kStepBytes);
    const std::vector<int32_t> offsets(most_tokens);
    const std::vector<uint16_t> lists(most_tokens * kList);
    std::vector<int32_t> acc(most_tokens * kGroupRows);
    for (const bool is_t5 : {false, true}) {
        if (is_t5 && !kernels.block_tile) continue;
        const int64_t group_bytes = is_t5 ? steps / kBlockSteps * kBlockBytes : steps * kStepBytes;
        for (const int tokens : {6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 128, most_tokens}) {
            const double t = median_seconds([&] {
                for (int g = 0; g < groups; g++)
                    kernels.many_product({w.data() + g * group_bytes, is_t5, steps, a.data(), columns, tokens,
                                          num_tiles(kernels, tokens), 0, num_tiles(kernels, tokens), offsets.data(),
                                          lists.data(), acc.data()});
            });
            const double macs = double(groups) * kGroupRows * columns * tokens;
            std::printf("%-8s %s unpacked once, %d tokens: %6.1f GMAC/s (%.0f%% of the peak)\n", kernels.name,
                        is_t5 ? "T5" : "U2", tokens, macs / t / 1e9, 100 * macs / t / most);
        }
    }
}

}  // namespace bitnet

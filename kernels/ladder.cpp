// Checks every path of this machine against the generic one, and times them: `ladder check`, `ladder time [path]`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels.h"
#include "weights.h"

using namespace bitnet;

namespace {

struct Random {  // splitmix64
    uint64_t state;
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
    int below(int n) { return int(next() % uint64_t(n)); }
    float value() { return float(int64_t(next() >> 40) - (1 << 23)) / float(1 << 21); }  // -4 .. 4
};

std::vector<float> floats(Random& random, int64_t count) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& x : v) x = random.value();
    return v;
}

std::vector<uint8_t> bytes(Random& random, int64_t count) {
    std::vector<uint8_t> v(static_cast<size_t>(count));
    for (uint8_t& x : v) x = uint8_t(random.next());
    return v;
}

std::vector<int8_t> codes(Random& random, int64_t count) {
    std::vector<int8_t> v(static_cast<size_t>(count));
    for (int8_t& x : v) x = int8_t(random.below(255) - 127);
    return v;
}

std::vector<uint8_t> weights(Random& random, int64_t count) {  // no invalid code
    std::vector<uint8_t> v = bytes(random, count);
    for (uint8_t& x : v) x = uint8_t(x & ~(x >> 1 & 0x55));
    return v;
}

// A check runs one verb with one path, from a seed, and returns the bytes of all its results.
using Result = std::vector<uint8_t>;
using Check = std::function<Result(const Kernels&, Random)>;

template <class T>
void append(Result& result, const std::vector<T>& values) {
    const auto* p = reinterpret_cast<const uint8_t*>(values.data());
    result.insert(result.end(), p, p + values.size() * sizeof(T));
}

Result check_ternary(const Kernels& kernels, Random random) {
    const int steps = 1 + random.below(70), tokens = 1 + random.below(kMaxTileTokens);
    const auto w = weights(random, steps * kStepBytes);
    const auto a = codes(random, steps * kStepColumns * tokens);
    std::vector<int32_t> acc(size_t(tokens * kGroupRows)), sums(static_cast<size_t>(tokens));
    kernels.ternary_tile(w.data(), a.data(), steps, tokens, acc.data());
    for (int32_t& sum : sums) sum = random.below(5000);
    const auto scales = floats(random, tokens), residual = floats(random, tokens * 40);
    std::vector<float> out(size_t(tokens * 40));
    const int rows = 1 + random.below(kGroupRows);
    kernels.ternary_store(acc.data(), tokens, rows, 0.7f, scales.data(), sums.data(), out.data(), 40,
                          random.below(2) ? residual.data() : nullptr, 40);
    Result result;
    append(result, acc);
    append(result, out);
    return result;
}

Result check_screen(const Kernels& kernels, Random random) {
    const int steps = 1 + random.below(40), vectors = 2 * (1 + random.below(4));
    const auto w = bytes(random, steps * kScreenStepBytes);
    const auto a = codes(random, steps * kStepColumns * vectors);
    std::vector<int32_t> acc(size_t(vectors * kScreenRows));
    kernels.screen(w.data(), a.data(), steps, vectors, acc.data());
    Result result;
    append(result, acc);
    return result;
}

Result check_row(const Kernels& kernels, Random random) {
    const int width = 1 + random.below(200), padded = (width + 15) / 16 * 16, stride = 1 + random.below(8);
    const auto x = floats(random, width), up = floats(random, width), norm = floats(random, width);
    std::vector<float> out(static_cast<size_t>(width)), scratch(static_cast<size_t>(padded));
    std::vector<int8_t> quantised(size_t(padded * stride));
    float inverse_scale = 0;
    int32_t sum = 0;
    RowTask task{};
    task.x = x.data();
    if (random.below(2)) task.up = up.data();
    task.activation = task.up ? Activation(1 + random.below(2)) : Activation::none;
    if (!task.up || random.below(2)) task.weight = norm.data();
    task.eps = 1e-5f;
    task.width = width;
    task.scratch = scratch.data();
    const bool to_codes = random.below(2);
    task.out = to_codes ? nullptr : out.data();
    task.codes = to_codes ? quantised.data() : nullptr;
    task.lane_stride = stride;
    task.padded_width = padded;
    task.inverse_scale = &inverse_scale;
    task.code_sum = &sum;
    kernels.row(task);
    Result result;
    append(result, out);
    append(result, quantised);
    append(result, std::vector<float>{inverse_scale, float(sum)});
    return result;
}

Result check_dense(const Kernels& kernels, Random random) {
    const int rows = 1 + random.below(20), columns = 1 + random.below(150), tokens = 1 + random.below(9);
    const Dtype dtype = Dtype(random.below(3));
    const auto wide = floats(random, rows * columns);
    auto narrow = bytes(random, rows * columns * 2);
    for (size_t i = 1; i < narrow.size(); i += 2) narrow[i] &= 0xbf;  // no infinities, nothing huge
    const auto x = floats(random, tokens * columns), residual = floats(random, tokens * rows);
    std::vector<float> out(size_t(tokens * rows)), row(static_cast<size_t>(columns));
    DenseTask task{};
    task.weight = dtype == Dtype::f32 ? static_cast<const void*>(wide.data()) : narrow.data();
    task.dtype = dtype;
    task.rows = rows;
    task.columns = columns;
    task.x = x.data();
    task.x_stride = columns;
    task.tokens = tokens;
    task.out = out.data();
    task.out_stride = task.residual_stride = rows;
    task.residual = random.below(2) ? residual.data() : nullptr;
    kernels.dense(task);
    kernels.embed(task.weight, dtype, columns, row.data());
    Result result;
    append(result, out);
    append(result, row);
    return result;
}

Result check_attention(const Kernels& kernels, Random random) {
    const int kv_heads = 1 + random.below(2), dim = 2 * (1 + random.below(40)), heads = 1 + random.below(6);
    const CacheLayout layout = cache_layout(random.below(2) ? Dtype::bf16 : Dtype::f32, kv_heads, dim);
    const int length = 1 + random.below(700), blocks = (length + kBlockTokens - 1) / kBlockTokens;
    Memory cache(blocks * layout.block_bytes);
    std::vector<int32_t> table;
    for (int i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
    for (int t = 0; t < length; t++) {
        auto k = floats(random, kv_heads * dim), v = floats(random, kv_heads * dim);
        const auto angles = floats(random, dim);
        kernels.rope(k.data(), kv_heads, dim, angles.data(), angles.data() + dim / 2);
        kernels.cache_write(layout, cache.data() + table[size_t(t / kBlockTokens)] * layout.block_bytes,
                            t % kBlockTokens, k.data(), v.data());
    }
    const auto q = floats(random, heads * dim);
    std::vector<float> out(size_t(heads * dim)), scratch(size_t(8 * layout.padded_dim + 4 * kBlockTokens));
    kernels.attend({layout, cache.data(), table.data(), length, random.below(kv_heads), heads, q.data(), out.data(),
                    0.125f, scratch.data()});
    Result result(cache.data(), cache.data() + cache.bytes());
    append(result, out);
    return result;
}

int check_all() {
    const std::pair<const char*, Check> checks[] = {{"ternary", check_ternary},
                                                    {"row", check_row},
                                                    {"dense", check_dense},
                                                    {"screen", check_screen},
                                                    {"attention", check_attention}};
    int count, failed = 0, passed = 0;
    const Kernels* const* paths = available_kernels(&count);
    for (int i = 0; i < count; i++)
        for (const auto& [verb, check] : checks)
            for (uint64_t seed = 0; seed < 60; seed++) {
                const bool same = check(*paths[i], {seed}) == check(*generic_kernels(), {seed});
                (same ? passed : failed)++;
                if (!same) std::printf("%s: %s differs from generic with seed %d\n", paths[i]->name, verb, int(seed));
            }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median_seconds(const std::function<void()>& work) {
    std::vector<double> times;
    work();
    for (int i = 0; i < 9; i++) {
        const double start = seconds();
        work();
        times.push_back(seconds() - start);
    }
    std::nth_element(times.begin(), times.begin() + 4, times.end());
    return times[4];
}

double peak(const Kernels& kernels) {
    int64_t done = 0;
    const double t = median_seconds([&] { done = kernels.int8_peak(2000000); });
    std::printf("%-8s peak from registers: %.1f GMAC/s\n", kernels.name, double(done) / t / 1e9);
    return double(done) / t;
}

// The gate and up projections of BitNet b1.58 2B-4T: 13824 x 2560, one thread, weights in cache or in memory.
void time_ternary(const Kernels& kernels, double most) {
    Random random{1};
    const int steps = 2560 / kStepColumns;
    const auto a = codes(random, steps * kStepColumns * kMaxTileTokens);
    for (const int groups : {32, 6912}) {  // 0.7 MB and 142 MB
        const auto source = weights(random, int64_t(groups) * steps * kStepBytes);
        const Memory w(int64_t(source.size()));  // in huge pages, as the executor's weights are
        std::memcpy(w.data(), source.data(), source.size());
        for (const int tokens : {1, 2, 3, 4, 6, 8, 10, 12}) {
            int32_t acc[kMaxTileTokens * kGroupRows];
            const double t = median_seconds([&] {
                for (int g = 0; g < groups; g++)
                    kernels.ternary_tile(w.data() + int64_t(g) * steps * kStepBytes, a.data(), steps, tokens, acc);
            });
            const double macs = double(groups) * kGroupRows * 2560 * tokens;
            std::printf("%-8s ternary %6.1f MB, %d tokens: %6.1f GMAC/s (%.0f%% of the peak), %5.1f GB/s of weights\n",
                        kernels.name, double(w.bytes()) / 1e6, tokens, macs / t / 1e9, 100 * macs / t / most,
                        double(w.bytes()) / t / 1e9);
        }
    }
}

void time_dense(const Kernels& kernels) {
    Random random{2};
    const int64_t rows = 40000, columns = 2560;
    const std::vector<uint16_t> w(size_t(rows * columns), 0x3f80);
    const auto x = floats(random, 4 * columns);
    std::vector<float> out(size_t(4 * rows));
    for (const int tokens : {1, 4}) {
        const double t = median_seconds([&] {
            kernels.dense(
                {w.data(), Dtype::bf16, rows, int(columns), x.data(), columns, tokens, out.data(), rows, nullptr, 0});
        });
        std::printf("%-8s bf16 head %d tokens: %5.1f GFMA/s, %5.1f GB/s\n", kernels.name, tokens,
                    double(rows * columns) * tokens / t / 1e9, double(w.size()) * 2 / t / 1e9);
    }
}

void time_attention(const Kernels& kernels) {
    Random random{3};
    const CacheLayout layout = cache_layout(Dtype::bf16, 5, 128);
    const int length = 2048, blocks = length / kBlockTokens;
    Memory cache(blocks * layout.block_bytes);
    std::vector<int32_t> table;
    for (int i = 0; i < blocks; i++) table.push_back(i);
    const auto q = floats(random, 4 * 128);
    std::vector<float> out(4 * 128), scratch(size_t(8 * layout.padded_dim + 4 * kBlockTokens));
    const double t = median_seconds([&] {
        for (int head = 0; head < 5; head++)
            kernels.attend(
                {layout, cache.data(), table.data(), length, head, 4, q.data(), out.data(), 0.088f, scratch.data()});
    });
    std::printf("%-8s attention, a layer of 20 / 5 heads of 128 at 2,048: %.0f us\n", kernels.name, t * 1e6);
}

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "check") return check_all();
    if (what != "time") return std::fprintf(stderr, "usage: ladder check | ladder time [path]\n"), 2;
    int count;
    const Kernels* const* paths = available_kernels(&count);
    for (int i = 0; i < count; i++) {
        if (argc > 2 && std::strcmp(argv[2], paths[i]->name)) continue;
        time_ternary(*paths[i], peak(*paths[i]));
        time_dense(*paths[i]);
        time_attention(*paths[i]);
    }
    return 0;
}

// What the checks and timings of the ladder share: random data, results to compare, and a median.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels.h"
#include "weights.h"

namespace bitnet {

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

inline std::vector<float> floats(Random& random, int64_t count) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& x : v) x = random.value();
    return v;
}

inline std::vector<uint8_t> bytes(Random& random, int64_t count) {
    std::vector<uint8_t> v(static_cast<size_t>(count));
    for (uint8_t& x : v) x = uint8_t(random.next());
    return v;
}

inline std::vector<int8_t> codes(Random& random, int64_t count) {
    std::vector<int8_t> v(static_cast<size_t>(count));
    for (int8_t& x : v) x = int8_t(random.below(255) - 127);
    return v;
}

inline std::vector<uint8_t> weights(Random& random, int64_t count) {  // no invalid code
    std::vector<uint8_t> v = bytes(random, count);
    for (uint8_t& x : v) x = uint8_t(x & ~(x >> 1 & 0x55));
    return v;
}

inline TernaryWeight ternary_weight(Random& random, int64_t rows, int64_t columns, Format format) {
    const auto w = floats(random, rows * columns);
    std::vector<int8_t> c(w.size());
    const float scale = ternarize(w.data(), Dtype::f32, rows * columns, c.data());
    TernaryWeight weight(columns, {rows}, format);
    weight.pack(0, reinterpret_cast<const uint8_t*>(c.data()), Layout::codes, scale);
    return weight;
}

// A check runs one verb with one path, from a seed, and returns the bytes of all its results.
using Result = std::vector<uint8_t>;
using Check = std::function<Result(const Kernels&, Random)>;

template <class T>
void append(Result& result, const std::vector<T>& values) {
    const size_t before = result.size(), bytes = values.size() * sizeof(T);
    result.resize(before + bytes);
    std::memcpy(result.data() + before, values.data(), bytes);
}

inline double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The median of each kind of work, done in turns, so that what else the machine does falls on all of them.
inline std::vector<double> medians_in_turns(const std::vector<std::function<void()>>& works) {
    std::vector<std::vector<double>> times(works.size());
    for (int round = 0; round < 10; round++)
        for (size_t i = 0; i < works.size(); i++) {
            const double start = seconds();
            works[i]();
            if (round) times[i].push_back(seconds() - start);  // the first one warms up
        }
    std::vector<double> medians;
    for (auto& each : times) {
        std::nth_element(each.begin(), each.begin() + 4, each.end());
        medians.push_back(each[4]);
    }
    return medians;
}

inline double median_seconds(const std::function<void()>& work) { return medians_in_turns({work})[0]; }

// int8 multiply-adds a second from registers, which is also printed.
inline double peak(const Kernels& kernels) {
    int64_t done = 0;
    const double t = median_seconds([&] { done = kernels.int8_peak(2000000); });
    std::printf("%-8s peak from registers: %.1f GMAC/s\n", kernels.name, double(done) / t / 1e9);
    return double(done) / t;
}

// ladder_many.cpp
Result check_many(const Kernels& kernels, Random random);
void time_many(const Kernels& kernels);

// ladder_groups.cpp
Result check_groups(const Kernels& kernels, Random random);
void time_groups(const Kernels& kernels);

// ladder_int8.cpp
Result check_int8(const Kernels& kernels, Random random);
void time_int8(const Kernels& kernels);

// ladder_floats.cpp
void time_floats(const Kernels& kernels);

}  // namespace bitnet

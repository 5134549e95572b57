#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "kernels.h"

namespace bitnet {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;
constexpr std::chrono::milliseconds kRound{12};
constexpr int64_t kChunk = 1 << 18;
constexpr int64_t kAhead = 4096;  // the distance at which the kernels prefetch
constexpr int64_t kIterations = 2000;

uint64_t read_chunk(const uint8_t* data) {
    uint64_t sums[8] = {};
    for (const uint8_t* line = data; line < data + kChunk; line += 64) {
        __builtin_prefetch(line + kAhead, 0, 2);
        uint64_t words[8];
        std::memcpy(words, line, 64);
        for (int i = 0; i < 8; i++) sums[i] += words[i];
    }
    uint64_t sum = 0;
    for (const uint64_t each : sums) sum += each;
    return sum;
}

// Threads of its own, so that what is measured does not depend on the executor's pool.
void on_all_threads(int num_threads, const std::function<void(int)>& work) {
    std::vector<std::thread> others;
    for (int thread = 1; thread < num_threads; thread++) others.emplace_back(work, thread);
    work(0);
    for (std::thread& other : others) other.join();
}

}  // namespace

Limits::Limits(int64_t bytes, int num_threads)
    : num_threads_(num_threads),
      memory_(std::max(bytes / kChunk, int64_t(num_threads)) * kChunk),
      next_chunks_(size_t(num_threads)) {
    on_all_threads(num_threads_, [&](int thread) {  // untouched memory is one page of zeros
        const int64_t chunks = memory_.bytes() / kChunk, first = chunks * thread / num_threads_;
        const int64_t last = chunks * (thread + 1) / num_threads_;
        std::memset(memory_.data() + first * kChunk, 1, size_t((last - first) * kChunk));
    });
}

double Limits::read_bandwidth() {
    return median_rate([&](int thread) {
        const int64_t chunks = memory_.bytes() / kChunk, first = chunks * thread / num_threads_;
        const int64_t count = chunks * (thread + 1) / num_threads_ - first;
        volatile uint64_t sink = read_chunk(memory_.data() + (first + next_chunks_[size_t(thread)]++ % count) * kChunk);
        (void)sink;
        return kChunk;
    });
}

double Limits::int8_peak(const std::string& isa) {
    const Kernels* kernels = find_kernels(isa.c_str());
    if (!kernels) throw std::invalid_argument("this machine cannot run that instruction set");
    return median_rate([&](int) { return kernels->int8_peak(kIterations); });
}

// How much of `work` all threads together do in a second.
double Limits::median_rate(const std::function<int64_t(int)>& work) {
    std::vector<double> rates;
    for (int round = 0; round <= kRounds; round++) {  // the first one warms up and does not count
        std::atomic<int64_t> total{0};
        const Clock::time_point start = Clock::now();
        on_all_threads(num_threads_, [&](int thread) {
            int64_t done = 0;
            while (Clock::now() - start < kRound) done += work(thread);
            total += done;
        });
        if (round) rates.push_back(double(total) / std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::nth_element(rates.begin(), rates.begin() + kRounds / 2, rates.end());
    return rates[kRounds / 2];
}

}  // namespace bitnet

#include "machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "kernels.h"
#include "threads.h"

namespace bitnet {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 5;
constexpr std::chrono::milliseconds kRound{12};
constexpr int64_t kChunk = 1 << 18;
constexpr int64_t kIterations = 2000;

// Threads of its own, so that what is measured does not depend on the executor's pool.
void on_all_threads(int num_threads, const std::function<void(int)>& work) { Pool(num_threads).run(num_threads, work); }

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
    int paths;
    const Kernels& widest = *available_kernels(&paths)[0];  // 16 bytes at a time would take twice as long as 64
    const int64_t chunks = memory_.bytes() / kChunk;
    const auto read_chunk = [&](int thread) {
        const int64_t first = chunks * thread / num_threads_, count = chunks * (thread + 1) / num_threads_ - first;
        const int64_t chunk = first + next_chunks_[size_t(thread)]++ % count;
        volatile uint64_t sink = widest.read_memory(memory_.data() + chunk * kChunk, kChunk);
        (void)sink;
        return kChunk;
    };
    // Virtual machines may lose what nobody reads for seconds, and wait for it page by page.
    on_all_threads(num_threads_, [&](int thread) {
        for (int64_t i = 0; i < chunks; i += num_threads_) read_chunk(thread);
    });
    return median_rate(read_chunk);
}

double Limits::int8_peak(const std::string& isa) {
    const Kernels* kernels = find_kernels(isa.c_str());
    if (!kernels) throw std::invalid_argument("this machine cannot run that instruction set");
    return median_rate([&](int) { return kernels->int8_peak(kIterations); });
}

// How much of `work` all threads together do in a second.
double Limits::median_rate(const std::function<int64_t(int)>& work) {
    std::vector<double> rates;
    Pool pool(num_threads_);                          // starting threads is not what a round measures
    for (int round = 0; round <= kRounds; round++) {  // the first one warms up and does not count
        std::atomic<int64_t> total{0};
        const Clock::time_point start = Clock::now();
        pool.run(num_threads_, [&](int thread) {
            int64_t done = 0;
            do done += work(thread);  // once too where others had the processors for the whole round
            while (Clock::now() - start < kRound);
            total += done;
        });
        if (round) rates.push_back(double(total) / std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::nth_element(rates.begin(), rates.begin() + kRounds / 2, rates.end());
    return rates[kRounds / 2];
}

}  // namespace bitnet

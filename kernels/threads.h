// A pool of threads that runs one parallel region at a time, and the region's barriers and work stealing.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace bitnet {

// Waits until `word` is no longer `old`: spins for about a millisecond, then sleeps in the kernel.
void wait_while_equal(std::atomic<uint32_t>& word, uint32_t old);

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return num_threads_; }
    // Runs work(thread) for every thread 0..size()-1, thread 0 being the caller, and returns when all have ended.
    // Alone, the caller does it all and nobody is woken: for work that is over before another thread could help.
    void run(bool alone, const std::function<void(int)>& work);

  private:
    void serve(int thread);

    const int num_threads_;
    std::atomic<uint32_t> epoch_{0};
    std::atomic<uint32_t> running_{0};
    bool stopping_ = false;  // written before epoch_ is advanced
    const std::function<void(int)>* work_ = nullptr;
    std::vector<std::thread> threads_;
};

// What the threads of a region share: phases separated by barriers, each with a number of units of work. Every thread
// owns a contiguous share, takes from its front, and then steals from the tails of the others.
class Phases {
  public:
    explicit Phases(int num_threads);
    // How many threads take part from now on; to be called between regions.
    void set_team(int num_threads) { num_threads_ = num_threads; }

    // Every thread calls this with the same count: it returns when all have come, and the units are shared out.
    void begin(int64_t units);
    // Takes up to `chunk` units; false when none are left for this thread to take.
    bool take(int thread, int64_t chunk, int64_t* first, int64_t* last);

  private:
    struct alignas(64) Share {
        std::atomic<uint64_t> span{0};  // first << 32 | last
    };
    bool take_front(Share& share, int64_t chunk, int64_t* first, int64_t* last);
    bool take_back(Share& share, int64_t chunk, int64_t* first, int64_t* last);

    int num_threads_;
    std::unique_ptr<Share[]> shares_;
    std::atomic<uint32_t> arrived_{0};
    std::atomic<uint32_t> phase_{0};
};

}  // namespace bitnet

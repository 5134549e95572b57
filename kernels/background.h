// A run of a program that takes place beside others, a few of its units of work at a time.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "threads.h"
#include "workspace.h"

namespace bitnet {

// Tokens of a prompt wait for arithmetic, and those of streams for weights: so a prompt that enters beside streams is
// computed on threads that these leave free, and on all of them once they are done, until the next token of a stream is
// due. Its own tokens can be as many as its products are fastest for, as it may stop in the middle of a step. They
// yield what they yield by themselves, as that does not depend on who computes which units.
class Background {
  public:
    explicit Background(int num_threads);
    bool is_under_way() const { return course_.has_value(); }

  private:
    friend class Executor;  // under whose mutex it calls these, and that of the cache
    void begin(const Kernels& kernels, const Program& program, const Batch& batch, float* output);
    const Cache* cache() const { return program_->cache(); }  // of what was begun
    // Before a region: `num_busy` threads will come to help once they have done something else, of others so many. It
    // ends when all is done, or `until` is over with all busy ones here.
    void open(int num_others, int num_busy, double until);
    // What each thread of the region does.
    void help(bool was_busy) noexcept;
    void work(size_t at, bool is_behind, int thread);
    bool is_over() const { return num_busy_.load(std::memory_order_relaxed) == 0 && now_s() >= until_; }
    void go_on();
    void deal(int num_owners);
    // Seconds that its threads have waited for each other, added up.
    double waited() const { return waited_; }

    const int num_threads_, num_processors_ = num_processors();
    Workspace space_;
    const Program* program_ = nullptr;
    Batch batch_{};
    std::optional<Course> course_;  // while it is under way
    std::mutex mutex_;              // of what follows
    size_t at_ = 0;                 // the next step
    bool is_behind_ = false;        // what is left of it once all have done its work
    bool is_dealt_ = false;         // some of its units may be done
    bool has_stopped_ = true;
    int num_here_ = 0, num_arrived_ = 0;
    std::atomic<int> num_busy_{0};
    double until_ = 0, waited_ = 0;
    Shares shares_;
    std::atomic<uint32_t> phase_{0};
};

}  // namespace bitnet

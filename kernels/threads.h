// A pool of threads that runs one parallel region at a time, and the region's barriers and work stealing.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace bitnet {

// How many processors this thread may use.
int num_processors();

// Waits until `word` is no longer `old`: spins for about a millisecond where each thread of the team can have a
// processor, then sleeps in the kernel.
void wait_while_equal(std::atomic<uint32_t>& word, uint32_t old, bool spins);

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return num_threads_; }
    // Runs work(thread) for the threads 0..team-1, thread 0 being the caller, and returns when all have ended;
    // throws what one of them threw. A team of one wakes nobody.
    void run(int team, const std::function<void(int)>& work);

    // Threads do not survive fork(): whether this is the process that started them.
    bool is_at_home() const;

  private:
    void serve(int thread);
    void stop();
    void guarded(const std::function<void(int)>& work, int thread);

    const int num_threads_, num_processors_ = num_processors();
    std::atomic<uint32_t> epoch_{0};  // the number of the region, and in the low bits the size of its team
    std::atomic<uint32_t> running_{0};
    std::atomic<bool> stopping_{false};  // written before epoch_ is advanced
    const std::function<void(int)>* work_ = nullptr;
    std::mutex failing_;
    std::exception_ptr failure_;
    const int64_t process_;
    std::vector<std::thread> threads_;
};

// Units of work that are shared out to threads. Each owns a contiguous share, takes from its front, and then steals
// from the tails of the others.
class Shares {
  public:
    explicit Shares(int num_threads) : spans_(new Span[size_t(num_threads)]) {}
    // For so many of the threads; any of them may steal. Nobody takes some meanwhile.
    void deal(int64_t units, int num_owners);
    // Takes up to `chunk` units; false when none are left for this thread to take.
    bool take(int thread, int64_t chunk, int64_t* first, int64_t* last);
    // Whether nobody could take any.
    bool are_empty() const;

  private:
    struct alignas(64) Span {
        std::atomic<uint64_t> ends{0};  // first << 32 | last
    };
    bool take_front(Span& span, int64_t chunk, int64_t* first, int64_t* last);
    bool take_back(Span& span, int64_t chunk, int64_t* first, int64_t* last);

    int num_owners_ = 0;
    std::unique_ptr<Span[]> spans_;
};

// What the threads of a region share: phases separated by barriers, each with a number of units of work.
class Phases {
  public:
    explicit Phases(int num_threads);
    // How many threads take part from now on; to be called between regions.
    void set_team(int num_threads);

    // Every thread calls this with the same count: it returns when all have come, and the units are shared out.
    void begin(int thread, int64_t units);
    // Seconds that the threads have waited for each other in `begin` since set_team, added up.
    double waited() const;
    // As of Shares.
    bool take(int thread, int64_t chunk, int64_t* first, int64_t* last) {
        return shares_.take(thread, chunk, first, last);
    }

  private:
    struct alignas(64) Place {
        double waited = 0;                      // written by its thread alone
        std::atomic<int> processor{-1}, id{0};  // where it was last seen, and as what the system knows it
    };
    void wait_for_others(int thread, uint32_t phase);

    int num_threads_;
    const int num_processors_ = num_processors();
    Shares shares_;
    std::unique_ptr<Place[]> places_;
    std::atomic<uint32_t> arrived_{0};
    std::atomic<uint32_t> phase_{0};
};

// How many threads to use while other processes want the processors too. A thread that has lost its processor holds all
// others up at the next barrier; one thread less, and the rest run undisturbed on what is free.
class Team {
  public:
    explicit Team(int most) : most_(most), size_(most) {}
    // Times are those of now_s().
    int size(double now);
    // After a region on more than one thread: how long it took, how long its threads waited for each other, all
    // together, and how often one was made to leave its processor. One of n threads brings an n-th of the work, so that
    // it is left out once the others have waited longer for it; what threads wait for each other anyway is allowed for.
    void learn(double now, double seconds, double waited, int64_t switches);

  private:
    const int most_;
    int size_;
    double lost_ = 0;  // seconds that each thread has waited of late beyond what the last one brings
    double pause_ = 0, grows_at_ = -1e9;
};

// Involuntary context switches of this thread so far; 0 where the system does not count them.
int64_t forced_switches();

double now_s();

}  // namespace bitnet

#include "threads.h"

#include <sys/resource.h>
#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <chrono>
#include <utility>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace bitnet {

namespace {

constexpr int kSpins = 20000, kSpinsToLook = 200;

inline void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr uint32_t kTeamBits = 11;  // at most 1,024 threads
constexpr uint32_t kTeamMask = (1u << kTeamBits) - 1;

constexpr uint64_t ends(int64_t first, int64_t last) { return uint64_t(first) << 32 | uint64_t(last); }

#ifdef __linux__
int current_processor() { return sched_getcpu(); }
int count_processors() {
    cpu_set_t all;
    return sched_getaffinity(0, sizeof all, &all) ? 0 : CPU_COUNT(&all);
}

int current_id() {
    thread_local const int id = int(syscall(SYS_gettid));
    return id;
}

// Has a thread leave this processor, if there is one for each thread of its team; whether it has. One at a time: who
// looked while another moves the same thread would take the processors that are left for all where it may run.
bool move_away(int id, int processor, int team) {
    static std::atomic_flag moving;
    if (processor < 0 || moving.test_and_set(std::memory_order_acquire)) return false;
    cpu_set_t all, others;
    bool moved = !sched_getaffinity(id, sizeof all, &all) && CPU_COUNT(&all) >= team;
    if (moved) {
        others = all;
        CPU_CLR(size_t(processor), &others);
        moved = !sched_setaffinity(id, sizeof others, &others) && !sched_setaffinity(id, sizeof all, &all);
    }
    moving.clear(std::memory_order_release);
    return moved;
}
#else
int current_processor() { return -1; }
int count_processors() { return 0; }
int current_id() { return 0; }
bool move_away(int, int, int) { return false; }
#endif

}  // namespace

int num_processors() {
    const int count = count_processors();
    return count > 0 ? count : std::max(1, int(std::thread::hardware_concurrency()));
}

void wait_while_equal(std::atomic<uint32_t>& word, uint32_t old, bool spins) {
    for (int i = 0; spins && i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != old) return;
        pause();
    }
    while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

Pool::Pool(int num_threads) : num_threads_(num_threads), process_(getpid()) {
    try {
        for (int i = 1; i < num_threads; i++) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {  // the system gives no more threads
        stop();
        throw;
    }
}

Pool::~Pool() {
    if (is_at_home())
        stop();
    else  // threads of another process: nobody to join, and to destroy them is to abort
        new std::vector<std::thread>(std::move(threads_));
}

bool Pool::is_at_home() const { return getpid() == process_; }

void Pool::stop() {
    stopping_ = true;
    epoch_.fetch_add(1u << kTeamBits, std::memory_order_release);
    epoch_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::serve(int thread) {
    bool was_in_team = true;  // who is left out sleeps at once, and leaves the processor to whoever took it
    for (uint32_t seen = 0;;) {
        if (was_in_team) wait_while_equal(epoch_, seen, int(seen & kTeamMask) <= num_processors_);
        epoch_.wait(seen, std::memory_order_acquire);
        seen = epoch_.load(std::memory_order_acquire);
        if (stopping_) return;
        was_in_team = uint32_t(thread) < (seen & kTeamMask);
        if (!was_in_team) continue;
        guarded(*work_, thread);
        if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) running_.notify_all();
    }
}

void Pool::guarded(const std::function<void(int)>& work, int thread) {
    try {
        work(thread);
    } catch (...) {
        const std::lock_guard<std::mutex> lock(failing_);
        failure_ = std::current_exception();
    }
}

void Pool::run(int team, const std::function<void(int)>& work) {
    if (team == 1) return work(0);
    work_ = &work;
    running_.store(uint32_t(team - 1), std::memory_order_relaxed);
    const uint32_t region = (epoch_.load(std::memory_order_relaxed) >> kTeamBits) + 1;
    epoch_.store(region << kTeamBits | uint32_t(team), std::memory_order_release);
    epoch_.notify_all();
    guarded(work, 0);
    for (uint32_t left; (left = running_.load(std::memory_order_acquire)) != 0;)
        wait_while_equal(running_, left, team <= num_processors_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Shares::deal(int64_t units, int num_owners) {
    const int num_old = std::exchange(num_owners_, num_owners);
    for (int64_t i = 0; i < std::max(num_old, num_owners); i++) {
        const int64_t first = i < num_owners ? units * i / num_owners : 0;
        const int64_t last = i < num_owners ? units * (i + 1) / num_owners : 0;
        spans_[size_t(i)].ends.store(ends(first, last), std::memory_order_relaxed);
    }
}

bool Shares::take_front(Span& span, int64_t chunk, int64_t* first, int64_t* last) {
    uint64_t old = span.ends.load(std::memory_order_relaxed);
    for (;;) {
        const int64_t begin = int64_t(old >> 32), end = int64_t(uint32_t(old));
        if (begin >= end) return false;
        const int64_t middle = end - begin < chunk ? end : begin + chunk;
        if (!span.ends.compare_exchange_weak(old, ends(middle, end), std::memory_order_relaxed)) continue;
        *first = begin, *last = middle;
        return true;
    }
}

bool Shares::take_back(Span& span, int64_t chunk, int64_t* first, int64_t* last) {
    uint64_t old = span.ends.load(std::memory_order_relaxed);
    for (;;) {
        const int64_t begin = int64_t(old >> 32), end = int64_t(uint32_t(old));
        if (begin >= end) return false;
        const int64_t middle = end - begin < chunk ? begin : end - chunk;
        if (!span.ends.compare_exchange_weak(old, ends(begin, middle), std::memory_order_relaxed)) continue;
        *first = middle, *last = end;
        return true;
    }
}

bool Shares::take(int thread, int64_t chunk, int64_t* first, int64_t* last) {
    if (take_front(spans_[size_t(thread)], chunk, first, last)) return true;
    for (int i = 1; i <= num_owners_; i++)
        if (take_back(spans_[size_t((thread + i) % num_owners_)], chunk, first, last)) return true;
    return false;
}

bool Shares::are_empty() const {
    for (int i = 0; i < num_owners_; i++) {
        const uint64_t now = spans_[size_t(i)].ends.load(std::memory_order_relaxed);
        if (int64_t(now >> 32) < int64_t(uint32_t(now))) return false;
    }
    return true;
}

Phases::Phases(int num_threads)
    : num_threads_(num_threads), shares_(num_threads), places_(new Place[size_t(num_threads)]) {}

void Phases::set_team(int num_threads) {
    num_threads_ = num_threads;
    for (int i = 0; i < num_threads_; i++) places_[i].waited = 0;
}

double Phases::waited() const {
    double sum = 0;
    for (int i = 0; i < num_threads_; i++) sum += places_[i].waited;
    return sum;
}

// The system may have put two threads on one processor, though another is idle: then nobody arrives while this spins.
void Phases::wait_for_others(int thread, uint32_t phase) {
    if (num_threads_ > num_processors_) return wait_while_equal(phase_, phase, false);
    for (int i = 0; i < kSpinsToLook; i++) {
        if (phase_.load(std::memory_order_acquire) != phase) return;
        pause();
    }
    const int here = current_processor();
    for (int other = 0; other < num_threads_; other++) {
        if (other == thread || places_[other].processor.load(std::memory_order_relaxed) != here) continue;
        const int id = places_[std::max(thread, other)].id.load(std::memory_order_relaxed);  // 0 is not ours to move
        if (!move_away(id, here, num_threads_)) std::this_thread::yield();
    }
    wait_while_equal(phase_, phase, true);
}

void Phases::begin(int thread, int64_t units) {
    places_[thread].processor.store(current_processor(), std::memory_order_relaxed);
    places_[thread].id.store(current_id(), std::memory_order_relaxed);
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (int(arrived_.fetch_add(1, std::memory_order_acq_rel)) < num_threads_ - 1) {
        const double before = now_s();
        wait_for_others(thread, phase);
        places_[thread].waited += now_s() - before;
        return;
    }
    arrived_.store(0, std::memory_order_relaxed);
    shares_.deal(units, num_threads_);
    phase_.fetch_add(1, std::memory_order_acq_rel);
    phase_.notify_all();
}

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

int64_t forced_switches() {
#ifdef RUSAGE_THREAD
    rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) return usage.ru_nivcsw;
#endif
    return 0;
}

int Team::size(double now) {
    if (size_ < most_ && now >= grows_at_) size_++;
    return size_;
}

void Team::learn(double now, double seconds, double waited, int64_t switches) {
    constexpr double kShort_s = 1e-3, kFirstPause_s = 0.5, kLongestPause_s = 4, kLeastWait = 0.3, kMostWait = 0.6;
    const double each = waited / std::max(1, size_ - 1);  // one has lost its processor, and all others wait
    const double worth = seconds * (switches > 0 ? std::max(1.0 / size_, kLeastWait) : kMostWait);
    // Threads of a short region wait for each other to wake up.
    lost_ = std::max(0.0, lost_ + (seconds > kShort_s ? each : std::min(each, worth)) - worth);
    if (lost_ < std::max(0.05, seconds / 2)) return;  // once may be chance
    lost_ = 0;
    size_--;
    pause_ = now > grows_at_ + kLongestPause_s ? kFirstPause_s : std::min(2 * pause_, kLongestPause_s);
    grows_at_ = now + pause_;
}

}  // namespace bitnet

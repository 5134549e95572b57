#include "executor.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>

#include "float_mode.h"

namespace bitnet {

namespace {

using Clock = std::chrono::steady_clock;

// While it lives its thread works for Executor::each.
struct Working {
    static thread_local bool here;
    Working() { here = true; }
    ~Working() { here = false; }
};
thread_local bool Working::here = false;

// What keeps every product of sizes inside int64.
constexpr int64_t kMaxCost = int64_t(1) << 40;
// Whoever has so many tokens of a small program takes them in two portions, so that there is something left for others
// if it is held up.
constexpr int64_t kManyTokens = 32;

}  // namespace

int64_t attend_scratch_floats(int padded_dim) {
    return kQueries * (3 * kScoreRow / 2 + padded_dim) + kNearQueries * 2 * padded_dim;
}

CacheLayout cache_layout(Dtype dtype, int num_kv_heads, int head_dim) {
    const int64_t item = dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 ? 1 : 2;
    const int padded_dim = (head_dim + 15) / 16 * 16;
    const int64_t key_bytes = kBlockTokens * item * head_dim, value_bytes = kBlockTokens * item * padded_dim;
    const int64_t scale_bytes = dtype == Dtype::i8 ? 2 * kBlockTokens * 4 : 0;
    const int64_t head_bytes = key_bytes + value_bytes + scale_bytes;
    const int64_t block_bytes = head_bytes * num_kv_heads;
    return {dtype, num_kv_heads, head_dim, padded_dim, key_bytes, head_bytes, block_bytes, block_bytes};
}

namespace {

// All caches of a process. A fork begins a list of its own: the lock of this one may be held there for ever.
struct Caches {
    const int64_t process = getpid();
    std::mutex mutex = {};
    std::vector<const Cache*> all = {};
};
std::atomic<Caches*> newest_caches{new Caches};

Caches& caches_here() {
    Caches* caches = newest_caches;
    while (caches->process != getpid()) {
        auto mine = std::make_unique<Caches>();
        if (newest_caches.compare_exchange_strong(caches, mine.get())) caches = mine.release();
    }
    return *caches;
}

}  // namespace

Cache::Cache(CacheLayout layout, int64_t num_layers) : layout_(layout), num_layers_(num_layers) {
    layout_.block_stride = num_layers * layout.block_bytes;
    Caches& caches = caches_here();
    const std::lock_guard<std::mutex> guard(caches.mutex);
    caches.all.push_back(this);
}

Cache::~Cache() {
    if (!mutex_.is_at_home()) return;  // it stands in no list
    Caches& caches = caches_here();
    const std::lock_guard<std::mutex> guard(caches.mutex);
    std::erase(caches.all, this);
}

std::unique_lock<std::mutex> Cache::lock() const { return mutex_.lock(); }

int64_t promised_bytes(const Cache* but) {
    Caches& caches = caches_here();
    const std::lock_guard<std::mutex> guard(caches.mutex);
    int64_t bytes = 0;
    for (const Cache* cache : caches.all)
        if (cache != but) bytes += cache->untouched_bytes();
    return bytes;
}

void Cache::reserve(int64_t num_blocks) {
    require(num_blocks > 0 && num_blocks < (int64_t(1) << 31) / kBlockTokens,
            "the number of cache blocks is impossible");
    const auto guard = lock();
    num_blocks_ = 0;
    memory_ = Memory();
    if (num_blocks > std::numeric_limits<int64_t>::max() / block_bytes()) throw std::bad_alloc();
    memory_ = Memory(num_blocks * block_bytes());
    num_blocks_ = num_blocks;
}

int64_t Cache::untouched_bytes() const {
    const auto guard = lock();
    return memory_.untouched_bytes();
}

void Cache::copy(int64_t from, int64_t to) {
    const auto guard = lock();
    require(from >= 0 && to >= 0 && from < num_blocks_ && to < num_blocks_, "a block lies outside the cache");
    const int64_t bytes = layout_.block_stride;
    if (from != to) std::memcpy(memory_.data() + to * bytes, memory_.data() + from * bytes, size_t(bytes));
}

static const Kernels* require_kernels(const std::string& isa) {
    const Kernels* kernels = find_kernels(isa.c_str());
    require(kernels, "this machine cannot run that instruction set");
    return kernels;
}

Executor::Executor(const std::string& isa, int num_threads)
    : kernels_(require_kernels(isa)),
      pool_(num_threads),
      phases_(num_threads),
      team_(num_threads),
      space_(num_threads) {}

void Executor::require_home() const {
    require(pool_.is_at_home(), "an executor does not survive fork(): load the model in the process that runs it");
}

void Executor::run(const Program& program, int64_t num_tokens, const Batch* batch, const float* input, float* output,
                   double* seconds) {
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cache_lock = lock_cache(&program);
    const Batch kept = space_.keep(program, num_tokens, batch);
    require((input || !program.input_width()) && (output || !program.output_width() || kept.wants_none()),
            "an array is missing");
    space_.cut(program, kept, seconds ? 1 : num_portions(program, kept));

    const int64_t cost = std::min(program.cost(), kMaxCost) * num_tokens;
    // Nothing may be thrown: the other threads wait at the barrier.
    if (space_.num_portions() > 1)
        return parallel(kWorthApart * cost, [&](int thread) noexcept { run_apart(program, input, output, thread); });
    const Course whole = space_.whole(*kernels_, program, input, output);
    parallel(cost, [&](int thread) noexcept { run_together(program, whole, thread, seconds); });
}

void Executor::begin(Background& background, const Program& program, const Batch& batch, float* output) {
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    require(!program.input_width() && program.cache(), "what runs in the background is a whole model, with a cache");
    const auto cache_lock = program.cache()->lock();
    background.begin(*kernels_, program, batch, output);
}

void Executor::run_beside(Background& background) {
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    beside_ = &background;
}

void Executor::forget(Background& background) {
    if (!pool_.is_at_home()) return;  // the mutex may be held for ever
    const std::lock_guard<std::mutex> lock(mutex_);
    if (beside_ == &background) beside_ = nullptr;
    background.course_.reset();
}

void Executor::go_on(Background& background, double seconds) {
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    beside_ = nullptr;
    if (!background.is_under_way()) return;
    const auto cache_lock = background.cache()->lock();
    const double start = now_s();
    const int team = team_.size(start);
    background.open(team, 0, start + seconds);
    region(team, [&](int) noexcept { background.help(false); }, [&] { return background.waited(); });
}

// Of what is computed in this region.
std::unique_lock<std::mutex> Executor::lock_cache(const Program* program) const {
    const Cache* cache = program ? program->cache() : nullptr;
    if (beside_ && beside_->is_under_way()) {
        require(!cache || cache == beside_->cache(), "what runs beside another program has the same cache");
        cache = beside_->cache();
    }
    return cache ? cache->lock() : std::unique_lock<std::mutex>();
}

// More than one where each thread takes some sequences by itself.
int64_t Executor::num_portions(const Program& program, const Batch& batch) const {
    const int64_t threads = pool_.size(), sequences = batch.num_sequences;
    if (threads == 1 || sequences < threads || !program.cache() || program.cost() > kSmallProgram) return 1;
    return batch.num_tokens < kManyTokens * threads ? threads : std::min(2 * threads, sequences);
}

void Executor::run_together(const Program& program, const Course& course, int thread, double* seconds) {
    const FloatMode mode;
    Clock::time_point before;
    const auto lap = [&](size_t num_done) {  // when all threads have come
        if (thread) return;
        const Clock::time_point now = Clock::now();
        if (num_done) seconds[num_done - 1] += std::chrono::duration<double>(now - before).count();
        before = now;
    };
    for (size_t i = 0; i < course.end; i++) {
        const Step& step = *program.steps()[i];
        const Context& on = course.at(i);
        phases_.begin(thread, step.units(on));
        if (seconds) lap(i);
        int64_t first, last;
        while (phases_.take(thread, step.chunk(on), &first, &last)) step.work(on, first, last, thread);
        if (const int64_t behind = step.units_behind(on)) {
            phases_.begin(thread, behind);
            while (phases_.take(thread, 1, &first, &last)) step.work_behind(on, first);
        }
    }
    if (!seconds) return;
    phases_.begin(thread, 0);
    lap(course.end);
}

void Executor::run_apart(const Program& program, const float* input, float* output, int thread) {
    const FloatMode mode;
    phases_.begin(thread, space_.num_portions());
    for (int64_t i, next; phases_.take(thread, 1, &i, &next);)
        run_alone(program, space_.portion(*kernels_, program, size_t(i), thread, input, output));
    phases_.begin(thread, 0);  // so that it is seen who waits for whom
}

void Executor::run_alone(const Program& program, const Course& course) {
    for (size_t i = 0; i < course.end; i++) {
        const Step& step = *program.steps()[i];
        const Context& on = course.at(i);
        const int64_t units = step.units(on), chunk = step.chunk(on);
        for (int64_t first = 0; first < units; first += chunk) step.work(on, first, std::min(first + chunk, units), 0);
    }
}

void Executor::parallel(int64_t cost, const std::function<void(int)>& work) {
    const int all = team_.size(now_s()), team = cost < kernels_->cost_of_help ? 1 : all;
    if (!beside_ || !beside_->is_under_way() || cost < kernels_->cost_of_help) {
        phases_.set_team(team);
        return region(team, work, [&] { return phases_.waited(); });
    }
    const int busy = std::min(team, std::max(1, all / 2));
    phases_.set_team(busy);
    Background& beside = *beside_;
    beside.open(all - busy, busy, 0);
    const auto both = [&](int thread) {
        struct Helping {  // also where `work` throws: else it would be waited for
            Background& beside;
            const bool was_busy;
            ~Helping() { beside.help(was_busy); }
        } const helping{beside, thread < busy};
        if (thread < busy) work(thread);
    };
    region(all, both, [&] { return phases_.waited() + beside.waited(); });
}

void Executor::region(int team, const std::function<void(int)>& work, const std::function<double()>& waited) {
    const double start = now_s();
    std::atomic<int64_t> switches{0};
    pool_.run(team, [&](int thread) {
        const int64_t before = team > 1 ? forced_switches() : 0;
        work(thread);
        if (team > 1) switches += forced_switches() - before;
    });
    const double end = now_s();
    if (team > 1) team_.learn(end, end - start, waited(), switches);
}

void Executor::each(int64_t units, int64_t unit_cost, int64_t chunk,
                    const std::function<void(int64_t, int64_t, int)>& work) {
    if (Working::here) {
        for (int64_t first = 0; first < units; first += chunk) work(first, std::min(first + chunk, units), 0);
        return;
    }
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cache_lock = lock_cache(nullptr);
    parallel(units * unit_cost, [&](int thread) {
        const FloatMode mode;
        const Working working;
        phases_.begin(thread, units);
        int64_t first, last;
        while (phases_.take(thread, chunk, &first, &last)) work(first, last, thread);
    });
}

}  // namespace bitnet

#include "executor.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>

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

// What keeps every product of sizes inside int64, and units inside the 32 bits that Phases has for them.
constexpr int64_t kMaxTokens = 1 << 20, kMaxCost = int64_t(1) << 40;
constexpr int32_t kMaxPosition = 1 << 30;
// With so many units of attention a thread, none has to wait long for another.
constexpr int kCutUnits = 4;
// Up to so many multiply-adds a token, threads that take some sequences each are sooner done than threads that meet at
// every step. Whoever has so many tokens takes them in two portions, so that there is something left for others if it
// is held up.
constexpr int64_t kSmallProgram = 1 << 24, kManyTokens = 32;

// How far apart the memory of portions is, beyond what their tokens take.
int64_t slack_floats(const Program& program) { return whole_lines(program.slack_bytes() / 4 + 1) + 16; }

void check_sequence(const Batch& b, int64_t s, const Cache* cache) {
    for (int64_t t = b.starts[s]; t < b.starts[s + 1]; t++) {
        require(b.positions[t] / kBlockTokens < b.table_width, "a position lies outside its sequence's block table");
        require(b.slots[t] >= 0 && b.slots[t] / kBlockTokens < cache->num_blocks(), "a slot lies outside the cache");
        for (int64_t i = 0; i <= b.positions[t] / kBlockTokens && t + 1 == b.starts[s + 1]; i++) {
            const int32_t block = b.block_tables[s * b.table_width + i];
            require(block >= 0 && block < cache->num_blocks(), "a block lies outside the cache");
        }
        require(t == b.starts[s] || b.positions[t] > b.positions[t - 1], "positions ascend within a sequence");
    }
}

void check(const Batch& b, const Program& program) {
    for (int64_t t = 0; program.vocab_size() && t < b.num_tokens; t++)
        require(b.token_ids[t] >= 0 && b.token_ids[t] < program.vocab_size(), "a token id lies outside the vocabulary");
    for (int64_t t = 0; t < b.num_tokens; t++)
        require(b.positions[t] >= 0 && b.positions[t] < kMaxPosition, "a position lies outside 0 .. 2^30");
    require(b.starts[0] == 0 && b.starts[b.num_sequences] == b.num_tokens, "starts run from 0 to the number of tokens");
    require(b.num_wanted < 0 || program.select_at() < program.steps().size(), "this program computes all to the end");
    for (int64_t i = 0; i < b.num_wanted; i++)
        require(b.wanted[i] >= (i ? b.wanted[i - 1] + 1 : 0) && b.wanted[i] < b.num_tokens,
                "the wanted tokens are of the batch, and ascend");
    for (int64_t s = 0; s < b.num_sequences; s++) {
        require(b.starts[s] <= b.starts[s + 1] && b.starts[s + 1] <= b.num_tokens, "starts ascend");
        if (program.cache()) check_sequence(b, s, program.cache());
    }
}

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
      num_done_(size_t(num_threads * kCutUnits)),
      scratch_(size_t(num_threads)) {}

void Executor::require_home() const {
    require(pool_.is_at_home(), "an executor does not survive fork(): load the model in the process that runs it");
}

void Executor::run(const Program& program, int64_t num_tokens, const Batch* batch, const float* input, float* output,
                   double* seconds) {
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto cache_lock = program.cache() ? program.cache()->lock() : std::unique_lock<std::mutex>();
    require(num_tokens > 0 && num_tokens <= kMaxTokens, "a batch has 1 to 1048576 tokens");
    require(batch || !program.needs_batch(), "this program needs a batch");
    const int32_t starts[] = {0, int32_t(num_tokens)};
    const Batch kept = batch ? keep(*batch) : Batch{num_tokens, 1, 0, nullptr, nullptr, nullptr, starts, nullptr};
    if (batch) check(kept, program);
    require((input || !program.input_width()) && (output || !program.output_width() || kept.wants_none()),
            "an array is missing");
    portions_.cut(kept, seconds ? 1 : num_portions(program, kept), program.cache() ? program.cache()->num_blocks() : 0);
    make_room(program, num_tokens);

    const int64_t cost = std::min(program.cost(), kMaxCost) * num_tokens;
    // Nothing may be thrown: the other threads wait at the barrier.
    if (portions_.all().size() > 1)
        return parallel(kWorthApart * cost, [&](int thread) noexcept { run_apart(program, input, output, thread); });
    Course whole = course(program, 0, scratch_, input, output);
    cut_attention(program, whole);
    parallel(cost, [&](int thread) noexcept { run_together(program, whole, thread, seconds); });
}

// More than one where each thread takes some sequences by itself.
int64_t Executor::num_portions(const Program& program, const Batch& batch) const {
    const int64_t threads = pool_.size(), sequences = batch.num_sequences;
    if (threads == 1 || sequences < threads || !program.cache() || program.cost() > kSmallProgram) return 1;
    return batch.num_tokens < kManyTokens * threads ? threads : std::min(2 * threads, sequences);
}

void Executor::make_room(const Program& program, int64_t num_tokens) {
    const int64_t bytes = 4 * (whole_lines(program.arena_floats() * num_tokens) +
                               int64_t(portions_.all().size()) * slack_floats(program));
    if (arena_.bytes() < bytes) arena_ = Memory(bytes);
    const int64_t scratch_bytes = program.scratch_floats(num_tokens) * 4;
    for (auto& scratch : scratch_)
        if (scratch.bytes() < scratch_bytes) scratch = Memory(scratch_bytes);
}

Executor::Course Executor::course(const Program& program, size_t index, std::span<const Memory> scratch,
                                  const float* input, float* output) const {
    const Portion& portion = portions_.all()[index];
    float* arena = reinterpret_cast<float*>(arena_.data()) + int64_t(index) * slack_floats(program) +
                   whole_lines(program.arena_floats() * portion.first_token);
    if (input) input += portion.first_token * program.input_width();
    if (output) output += portion.first_row * program.output_width();
    const auto context = [&](const Batch& batch, const std::vector<int32_t>& sequences) {
        const int64_t tile = tile_tokens(*kernels_, program, batch.num_tokens);
        return Context{*kernels_, batch.num_tokens, tile,    arena, input,   output,
                       &batch,    sequences,        scratch, 1,     nullptr, nullptr};
    };
    const size_t all = program.steps().size();
    return {context(portion.batch, portion.sequences), context(portion.chosen, portion.chosen_sequences),
            portion.batch.has_choice() ? program.select_at() : all,
            portion.batch.wants_none() ? program.select_at() : all};
}

// Into how many segments attention is cut, with room for them.
void Executor::cut_attention(const Program& program, Course& course) {
    if (!program.piece_floats()) return;
    for (Context* c : {&course.all, &course.few}) {
        if (c->num_tokens * program.cache()->layout().num_kv_heads >= int64_t(num_done_.size())) continue;
        for (int64_t t = 0; t < c->num_tokens; t++)
            c->segments = std::max<int64_t>(c->segments, c->batch->positions[t] / kSegmentTokens + 1);
        const int64_t bytes = c->num_tokens * c->segments * program.piece_floats() * 4;
        if (c->segments > 1 && pieces_.bytes() < bytes) pieces_ = Memory(bytes);
    }
    course.all.pieces = course.few.pieces = reinterpret_cast<float*>(pieces_.data());
    course.all.num_done = course.few.num_done = num_done_.data();
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
    phases_.begin(thread, int64_t(portions_.all().size()));
    for (int64_t i, next; phases_.take(thread, 1, &i, &next);)
        run_alone(program, course(program, size_t(i), {&scratch_[size_t(thread)], 1}, input, output));
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

// A copy that nobody else can write: what has been checked is what is used.
Batch Executor::keep(const Batch& batch) {
    require(batch.num_sequences > 0 && batch.num_sequences <= kMaxTokens, "a batch has 1 to 1048576 sequences");
    require(batch.num_wanted <= batch.num_tokens, "no more tokens are wanted than there are");
    const int64_t T = batch.num_tokens, S = batch.num_sequences;
    const int64_t sizes[] = {T, T, T, S + 1, S * batch.table_width, std::max<int64_t>(batch.num_wanted, 0)};
    const int32_t* sources[] = {batch.token_ids, batch.positions,    batch.slots,
                                batch.starts,    batch.block_tables, batch.wanted};
    indices_.resize(size_t(std::accumulate(std::begin(sizes), std::end(sizes), int64_t(0))));
    int32_t *next = indices_.data(), *copies[6];
    for (int i = 0; i < 6; next += sizes[i++]) {
        copies[i] = next;
        if (sizes[i]) std::memcpy(next, sources[i], size_t(sizes[i]) * sizeof(int32_t));
    }
    return {T,         S,         batch.table_width, copies[0], copies[1],
            copies[2], copies[3], copies[4],         copies[5], batch.num_wanted};
}

void Executor::parallel(int64_t cost, const std::function<void(int)>& work) {
    const double start = now_s();
    const int team = cost < kernels_->cost_of_help ? 1 : team_.size(start);
    std::atomic<int64_t> switches{0};
    phases_.set_team(team);
    pool_.run(team, [&](int thread) {
        const int64_t before = team > 1 ? forced_switches() : 0;
        work(thread);
        if (team > 1) switches += forced_switches() - before;
    });
    const double end = now_s();
    if (team > 1) team_.learn(end, end - start, phases_.waited(), switches);
}

void Executor::each(int64_t units, int64_t unit_cost, int64_t chunk,
                    const std::function<void(int64_t, int64_t, int)>& work) {
    if (Working::here) {
        for (int64_t first = 0; first < units; first += chunk) work(first, std::min(first + chunk, units), 0);
        return;
    }
    require_home();
    const std::lock_guard<std::mutex> lock(mutex_);
    parallel(units * unit_cost, [&](int thread) {
        const FloatMode mode;
        const Working working;
        phases_.begin(thread, units);
        int64_t first, last;
        while (phases_.take(thread, chunk, &first, &last)) work(first, last, thread);
    });
}

}  // namespace bitnet

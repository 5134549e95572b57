#include "background.h"

#include <algorithm>

#include "float_mode.h"

namespace bitnet {

Background::Background(int num_threads) : num_threads_(num_threads), space_(num_threads), shares_(num_threads) {}

void Background::begin(const Kernels& kernels, const Program& program, const Batch& batch, float* output) {
    course_.reset();
    batch_ = space_.keep(program, batch.num_tokens, &batch);
    require(output || batch_.wants_none(), "an array is missing");
    space_.cut(program, batch_, 1);
    program_ = &program;
    course_.emplace(space_.whole(kernels, program, nullptr, output));
    at_ = 0;
    is_behind_ = is_dealt_ = false;
}

void Background::open(int num_others, int num_busy, double until) {
    if (course_) space_.check(*program_, batch_);  // the cache may be a smaller one by now
    num_here_ = num_arrived_ = 0, num_busy_ = num_busy;
    until_ = until, waited_ = 0;
    has_stopped_ = !course_;
    if (course_ && !is_dealt_) deal(std::max(1, num_others));
}

// Whoever comes late, as its processor was taken, has left nothing undone.
void Background::help(bool was_busy) noexcept {
    const FloatMode mode;
    std::unique_lock<std::mutex> lock(mutex_);
    if (was_busy) num_busy_--;
    if (has_stopped_ || (was_busy && is_over())) return;
    for (const int thread = num_here_++; !has_stopped_;) {
        const size_t at = at_;
        const bool is_behind = is_behind_;
        lock.unlock();
        work(at, is_behind, thread);
        lock.lock();
        if (++num_arrived_ == num_here_) {
            num_arrived_ = 0;
            go_on();
            phase_.fetch_add(1, std::memory_order_release);
            phase_.notify_all();
        } else {
            const uint32_t phase = phase_.load(std::memory_order_relaxed);
            lock.unlock();
            const double before = now_s();
            wait_while_equal(phase_, phase, num_threads_ <= num_processors_);
            lock.lock();
            waited_ += now_s() - before;
        }
    }
}

void Background::work(size_t at, bool is_behind, int thread) {
    const Step& step = *program_->steps()[at];
    const Context& on = course_->at(at);
    const int64_t chunk = is_behind ? 1 : step.chunk(on);
    int64_t first, last;
    do {  // a little in any case, so that it comes to an end however late everything is
        if (!shares_.take(thread, chunk, &first, &last)) return;
        is_behind ? step.work_behind(on, first) : step.work(on, first, last, thread);
    } while (!is_over());
}

// All have come, and nobody else comes while the mutex is held.
void Background::go_on() {
    if (shares_.are_empty()) {
        is_behind_ = !is_behind_ && program_->steps()[at_]->units_behind(course_->at(at_)) > 0;
        if (!is_behind_ && ++at_ == course_->end) course_.reset();
        if (course_) deal(num_here_);
    }
    has_stopped_ = !course_ || is_over();
}

void Background::deal(int num_owners) {
    const Step& step = *program_->steps()[at_];
    const Context& on = course_->at(at_);
    is_dealt_ = true;
    shares_.deal(is_behind_ ? step.units_behind(on) : step.units(on), num_owners);
}

}  // namespace bitnet

// Runs a Plan: a straight list of steps over one arena, all threads going through it together; where that is little
// work for many sequences, each thread with some of these by itself, as it would wait at the barriers half of the time.
#pragma once
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include "background.h"
#include "program.h"
#include "threads.h"
#include "workspace.h"

namespace bitnet {

// Up to so many multiply-adds a token, threads that take some sequences each are sooner done than threads that meet at
// every step.
constexpr int64_t kSmallProgram = 1 << 24;

// One region at a time: a second thread waits. Belongs to the process that made it.
class Executor {
  public:
    // Throws std::invalid_argument for a path that this machine lacks.
    Executor(const std::string& isa, int num_threads);

    // `batch` may be null for programs without embed, rotations, rope and attention; input and output have one row a
    // token, the output of a batch with `wanted` one for each of these. `seconds`, if given, has one number a step, to
    // which the time until all threads have done it is added.
    void run(const Program& program, int64_t num_tokens, const Batch* batch, const float* input, float* output,
             double* seconds = nullptr);
    // Forgets what is under way there, and begins this. The program and the output, which has a row for each token, or
    // for the wanted ones, outlive it.
    void begin(Background& background, const Program& program, const Batch& batch, float* output);
    // From now on whatever runs here takes half of the threads at most, and the others go on with what is under way.
    void run_beside(Background& background);
    // All threads go on with it for so many seconds, or until it is done; what runs behind that has all of them again.
    void go_on(Background& background, double seconds);
    // Nothing runs beside it any more, and it is under way no more.
    void forget(Background& background);
    // Calls work(first, last, thread) until `units` are done, up to `chunk` at a time, on all threads if that many
    // units of `unit_cost` multiply-adds are worth it. `work` may throw, and may call this: its thread then works
    // alone, as thread 0.
    void each(int64_t units, int64_t unit_cost, int64_t chunk, const std::function<void(int64_t, int64_t, int)>& work);
    // Throws std::invalid_argument in another process than the one that made it.
    void require_home() const;
    const Kernels& kernels() const { return *kernels_; }
    int num_threads() const { return pool_.size(); }

  private:
    int64_t num_portions(const Program& program, const Batch& batch) const;
    void run_together(const Program& program, const Course& course, int thread, double* seconds);
    void run_apart(const Program& program, const float* input, float* output, int thread);
    static void run_alone(const Program& program, const Course& course);
    std::unique_lock<std::mutex> lock_cache(const Program* program) const;
    void parallel(int64_t cost, const std::function<void(int)>& work);
    void region(int team, const std::function<void(int)>& work, const std::function<double()>& waited);

    std::mutex mutex_;
    const Kernels* kernels_;
    Pool pool_;
    Phases phases_;
    Team team_;
    Workspace space_;
    Background* beside_ = nullptr;
};

}  // namespace bitnet

// What a run of a program works in.
#pragma once
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "program.h"

namespace bitnet {

// How a portion of a batch goes through a program: with all of its tokens, and behind `select_at` with those that
// go on.
struct Course {
    Context all, few;
    size_t select_at, end;
    const Context& at(size_t step) const { return step > select_at ? few : all; }
};

// The batch, arena and scratch of one run after the other, whose memory it keeps.
class Workspace {
  public:
    explicit Workspace(int num_threads);
    // A copy of the batch that nobody else can write, until the next one: what has been checked is what is used. Throws
    // std::invalid_argument for one that the program cannot compute; it may be null where the program needs none.
    Batch keep(const Program& program, int64_t num_tokens, const Batch* batch);
    // Throws std::invalid_argument where the program cannot compute it any more.
    static void check(const Program& program, const Batch& kept);
    // Cuts what was kept into so many portions, if that can be, and makes room for them.
    void cut(const Program& program, const Batch& kept, int64_t count);
    int64_t num_portions() const { return int64_t(portions_.all().size()); }
    // Of the only portion, on all threads.
    Course whole(const Kernels& kernels, const Program& program, const float* input, float* output);
    // Of one of them, on one thread.
    Course portion(const Kernels& kernels, const Program& program, size_t index, int thread, const float* input,
                   float* output) const;

  private:
    Batch copy(const Batch& batch);
    void make_room(const Program& program, int64_t num_tokens);
    Course portion(const Kernels& kernels, const Program& program, size_t index, std::span<const Memory> scratch,
                   const float* input, float* output) const;
    void cut_attention(const Program& program, Course& course);

    Memory arena_, pieces_;
    std::vector<std::atomic<int32_t>> num_done_;
    std::vector<int32_t> indices_;
    Portions portions_;
    std::vector<Memory> scratch_;
};

}  // namespace bitnet

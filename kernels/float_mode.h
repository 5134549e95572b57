// Rounding to nearest, whatever another library has set in this thread: part of "the same bits". With subnormal
// numbers, or, as tiles of AMX count them, with zeros instead of these.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace bitnet {

class FloatMode {
  public:
    enum Subnormals { keeping, flushing };
    explicit FloatMode(Subnormals subnormals = keeping) : saved_(get()) {
        set(subnormals == flushing ? kFlushing : kNearest);
    }
    ~FloatMode() { set(saved_); }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

  private:
#if defined(__x86_64__)
    static constexpr uint64_t kNearest = 0x1f80, kFlushing = kNearest | 0x8040;
    static uint64_t get() { return _mm_getcsr(); }
    static void set(uint64_t mode) { _mm_setcsr(unsigned(mode)); }
#elif defined(__aarch64__)
    static constexpr uint64_t kNearest = 0, kFlushing = 1 << 24;
    static uint64_t get() {
        uint64_t mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
    static constexpr uint64_t kNearest = 0, kFlushing = 0;
    static uint64_t get() { return 0; }
    static void set(uint64_t) {}
#endif
    const uint64_t saved_;
};

}  // namespace bitnet

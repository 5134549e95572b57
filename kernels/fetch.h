// Fetching bytes from memory ahead of their reader. Some processors run ahead by themselves, but on every page anew,
// and never far: they get most from several pages side by side. AMD's since Zen 4 get most from one after the other.
#pragma once
#include "kernels.h"

namespace {

constexpr uintptr_t kFetchPages = 4, kPageBytes = 4096, kInOrderBytes = 8192;

BITNET_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }
BITNET_INLINE void fetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }  // into the nearest cache

// To be called for every 64 bytes of a stream that is read: in 16 KB they fetch the next 16 KB, or 8 KB ahead.
BITNET_INLINE void fetch_ahead(const uint8_t* p) {
    if (bitnet::fetches_in_order) return fetch(p + kInOrderBytes);
    constexpr uintptr_t window = kFetchPages * kPageBytes;
    const uintptr_t at = uintptr_t(p), line = at % window / 64;
    const uintptr_t next = at / window * window + window;
    fetch(reinterpret_cast<const void*>(next + line % kFetchPages * kPageBytes + line / kFetchPages * 64));
}

// What is read next, fetched line by line beside what is computed.
struct Ahead {
    const uint8_t *next, *end;
    BITNET_INLINE void step() {
        if (next >= end) return;
        fetch(next);
        next += 64;
    }
    BITNET_INLINE void rest() {
        while (next < end) step();
    }
};

// The 32 floats of each token that are about to be written.
BITNET_INLINE void fetch_outputs(const float* out, int64_t stride, int from, int to) {
    for (int t = from; t < to; t++) {
        __builtin_prefetch(out + t * stride, 1);
        __builtin_prefetch(out + t * stride + 16, 1);
    }
}

}  // namespace

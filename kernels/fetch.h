// Fetching bytes from memory ahead of their reader, on several pages side by side: the processor runs ahead by itself,
// but on every page anew, and never far.
#pragma once
#include "kernels.h"

namespace {

constexpr uintptr_t kFetchPages = 4, kPageBytes = 4096;

BITNET_INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// To be called for every 64 bytes of a stream that is read: in 16 KB they fetch the next 16 KB.
BITNET_INLINE void fetch_ahead(const uint8_t* p) {
    constexpr uintptr_t window = kFetchPages * kPageBytes;
    const uintptr_t at = uintptr_t(p), line = at % window / 64;
    const uintptr_t next = at / window * window + window;
    fetch(reinterpret_cast<const void*>(next + line % kFetchPages * kPageBytes + line / kFetchPages * 64));
}

// One of so many parts of what is read next.
BITNET_INLINE void fetch_part(const uint8_t* data, int lines, int part, int parts) {
    for (int i = lines * part / parts; i < lines * (part + 1) / parts; i++) fetch(data + 64 * i);
}

// The 32 floats of each token that are about to be written.
BITNET_INLINE void fetch_outputs(const float* out, int64_t stride, int from, int to) {
    for (int t = from; t < to; t++) {
        __builtin_prefetch(out + t * stride, 1);
        __builtin_prefetch(out + t * stride + 16, 1);
    }
}

}  // namespace

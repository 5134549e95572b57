// T5 with VBMI: two `vpermb` decode a byte.
#pragma once
#include <immintrin.h>

#include "kernels.h"
#include "t5.h"

namespace {

struct T5Fields {
    __m512i lower, upper;  // as looked up: T5Tables
    // A byte of U2.
    BITNET_INLINE __m512i first_four() const {
        return _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi8(15), 0x78);  // lower ^ (upper & 15)
    }
    // Field p where it stands; the fifth stands where the fourth does. mask: its two bits.
    BITNET_INLINE __m512i in_place(int p, __m512i mask) const {
        if (p >= 2) return _mm512_and_si512(p < 4 ? lower : upper, mask);
        return _mm512_ternarylogic_epi32(lower, upper, mask, 0x28);  // (lower ^ upper) & mask
    }
};

struct T5Decoder {
    const __m512i lower = _mm512_loadu_si512(bitnet::kT5.lower), upper = _mm512_loadu_si512(bitnet::kT5.upper);
    BITNET_INLINE T5Fields operator()(__m512i x) const {
        return {_mm512_permutexvar_epi8(x, lower), _mm512_permutexvar_epi8(_mm512_srli_epi16(x, 2), upper)};
    }
};

}  // namespace

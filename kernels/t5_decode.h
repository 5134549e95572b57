// T5 with VBMI: a compare and three `vpermb` give a byte of U2 and one with the fifth weight on top.
#pragma once
#include <immintrin.h>

#include "kernels.h"
#include "t5.h"

namespace {

struct T5Decoder {
    __m512i usual, other, fifth;
    T5Decoder()
        : usual(_mm512_loadu_si512(bitnet::kT5.first)),
          other(_mm512_loadu_si512(bitnet::kT5.first + 192)),
          fifth(_mm512_loadu_si512(bitnet::kT5.fifth + 192)) {}
    BITNET_INLINE __m512i first_four(__m512i x) const {
        return _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(x, usual), is_other(x), x, other);
    }
    // In its top two bits.
    BITNET_INLINE __m512i fifth_on_top(__m512i x) const {
        return _mm512_mask_permutexvar_epi8(x, is_other(x), x, fifth);
    }
    BITNET_INLINE static __mmask64 is_other(__m512i x) {
        return _mm512_cmpge_epu8_mask(x, _mm512_set1_epi8(char(192)));
    }
};

}  // namespace

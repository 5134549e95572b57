// Attention over a cache of bfloat16 where the processor multiplies two of them at a time (`vdpbf16ps`), the one in the
// upper half of a lane first: by fused multiply-adds that take tiny numbers for 0, which is what AMX does and all paths
// do alike. So a product takes the even numbers of two tiles of the cache, or the odd ones.
#include <type_traits>

#include "lanes_avx512.h"
#include "verbs_attention.h"

namespace {

// Of every four numbers the first and the third share a lane, and so do the second and the fourth.
BITNET_INLINE __m256i pack_pairs(__m512i x) {
    const __m512i later = _mm512_srli_epi32(_mm512_shuffle_epi32(x, _MM_PERM_BADC), 16);
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), pairs = _mm512_ternarylogic_epi32(x, upper, later, 0xea);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6), pairs));
}

struct TwoByTwo {
    static constexpr int tiles = 2;
    using Number = uint32_t;
    using Factor = __m512i;
    template <int Which>
    BITNET_INLINE static Factor get(const uint8_t* tile, int64_t to_next) {
        const __m512i first = _mm512_loadu_si512(tile), second = _mm512_loadu_si512(tile + to_next);
        const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
        return Which ? _mm512_ternarylogic_epi32(_mm512_srli_epi32(second, 16), upper, first, 0xf8)
                     : _mm512_ternarylogic_epi32(_mm512_slli_epi32(first, 16), upper, second, 0xf2);
    }
    BITNET_INLINE static void add(Lanes& sum, const Factor& factor, const Number& number) {
        asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(factor), "m"(number));
    }
    static void take(int head_dim, const Query* queries, int count, Number* q) {
        each_group(count, [&](int i, auto group) {
            for (int g = 0; g < group.size; g++)
                for (int d = 0; d < head_dim; d += 16) {
                    alignas(64) uint32_t rounded[16];
                    for (int k = 0; k < 16; k++) rounded[k] = uint32_t(to_bf16(queries[i + g].q[d + k])) << 16;
                    uint64_t both[4];
                    _mm256_storeu_si256((__m256i*)both, pack_pairs(_mm512_load_si512(rounded)));
                    Number* to = q + i * head_dim / 2 + d / 2 * group.size + 2 * g;
                    for (int k = 0; k < 4; k++) std::memcpy(to + 2 * k * group.size, both + k, 8);
                }
        });
    }
    static Number* weights(float* scores) { return (Number*)(scores + kQueries * kScoreRow); }
    BITNET_INLINE static void pack(Number* to, const Lanes& w) {
        _mm256_storeu_si256((__m256i*)to, pack_pairs(_mm512_castps_si512(w.v)));
    }
};

template <Dtype D>
using Products = std::conditional_t<D == Dtype::bf16, TwoByTwo, OneByOne<D>>;

void attend(const AttendTask& t) {
    t.layout.head_dim % 16 == 0 ? attend_in<InVectorsBy<Products>>(t) : attend_in<InVectors>(t);
}

}  // namespace

void bitnet::add_avx512bf16(Kernels& kernels) { kernels.attend = attend; }

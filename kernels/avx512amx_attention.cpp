// Attention with AMX: a tile of 16 queries by 32 features or positions, of bfloat16, times a tile of 32 by 16 that
// stands in the cache just so.
#include "amx_tiles.h"
#include "lanes_avx512.h"
#include "verbs_attention.h"

namespace {

constexpr int kTilePairs = 16, kTileBytes = 1024;
static_assert(kTilePairs == kSumPairs && kQueries <= 2 * kMatrixTile);

// What is read next, in four places in turn.
struct Fetched {
    const uint8_t* places[4];
    Fetched(const Next& next, int64_t line) {
        for (int i = 0; i < 4; i++) places[i] = next.places[i] + line / 4 * 64;
    }
    template <int Lines>
    BITNET_INLINE void lines() {
#pragma GCC unroll 4
        for (const uint8_t*& place : places) {
#pragma GCC unroll 16
            for (int i = 0; i < Lines / 4; i++) fetch(place + 64 * i);
            place += Lines / 4 * 64;
        }
    }
};

// Four products of tiles, into tiles 0 to 3: of 16 queries with four tiles that stand `apart`, or of both halves of up
// to 32 with two.
template <int A>
BITNET_INLINE void multiply(const uint16_t* queries, int64_t stride, const uint8_t* const (&tiles)[4], int64_t row) {
    _tile_loadd(6, queries, stride);
    _tile_loadd(4, tiles[0], row);
    _tile_loadd(5, tiles[1], row);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (A == 2) {
        _tile_loadd(7, (const uint8_t*)queries + kMatrixTile * stride, stride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
    } else {
        _tile_loadd(4, tiles[2], row);
        _tile_loadd(5, tiles[3], row);
        _tile_dpbf16ps(2, 6, 4);
        _tile_dpbf16ps(3, 6, 5);
    }
}

BITNET_INLINE void zero_tiles() {
    asm volatile("" : : : "memory");  // which gcc 12 forgets to say of loads and stores of tiles
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Tiles 2 and 3 go to `later`.
BITNET_INLINE void store_tiles(float* to, float* later, int64_t stride) {
    _tile_stored(0, to, stride);
    _tile_stored(1, to + 16, stride);
    _tile_stored(2, later, stride);
    _tile_stored(3, later + 16, stride);
    asm volatile("" : : : "memory");
}

// Fewer than nine queries wait for memory, which vectors fetch ahead.
struct InTiles {
    template <Dtype D>
    static bool fits(const AttendTask& t, int count) {
        return D == Dtype::bf16 && count > 8 && t.layout.head_dim % (2 * kTilePairs) == 0;
    }

    template <Dtype D>
    static void take(const AttendTask& t, const Query* queries, int count, float* q) {
        if (!fits<D>(t, count)) return InVectors::take<D>(t, queries, count, q);
        const int dim = t.layout.head_dim;
        for (int i = 0; i < count; i++)
            for (int d = 0; d < dim; d++) ((uint16_t*)q)[i * dim + d] = to_bf16(queries[i].q[d]);
        _tile_loadconfig(&shapes.halves[count]);
    }

    template <Dtype D>
    static void attend(const Segment& segment, const Query* queries, int count, const float* q, const Attended& to) {
        if (!fits<D>(segment.t, count)) return InVectors::attend<D>(segment, queries, count, q, to);
        const auto run = count > kMatrixTile ? attend_tiles<2> : attend_tiles<1>;
        run(segment, queries, count, (const uint16_t*)q, to);
    }

  private:
    // A tiles of queries.
    template <int A>
    static void attend_tiles(const Segment& segment, const Query* queries, int count, const uint16_t* q,
                             const Attended& to) {
        float* scores = segment.t.scratch;
        uint16_t* weights = (uint16_t*)(scores + kQueries * kScoreRow);
        for (int p = segment.begin; p < segment.end; p += (3 - A) * kBlockTokens) score<A>(segment, p, q, scores);
        weigh_all<Dtype::bf16>(
            segment, queries, count, to, [&](int i, int k, const Lanes& w) __attribute__((always_inline)) {
                const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(w.v), 16);
                _mm256_storeu_si256((__m256i*)(weights + i * kScoreRow + k), _mm512_cvtepi32_epi16(high));
            });
        int whole = segment.begin;  // blocks of which all queries see all
        while (whole < segment.end && all_see(queries, count, whole)) whole += kBlockTokens;
        for (int d = 0; d < segment.t.layout.padded_dim / 16; d += 4 / A) add<A>(segment, whole, d, weights, to.sums);
        for (int p = whole; p < segment.end; p += kBlockTokens)
            add_block<Dtype::bf16>(segment, p, queries, count, scores, to);
    }

    static bool all_see(const Query* queries, int count, int p) {
        for (int i = 0; i < count; i++)
            if (queries[i].length < p + kBlockTokens) return false;
        return true;
    }

    // The products of the queries with a block, or with two.
    template <int A>
    static BITNET_INLINE void score(const Segment& segment, int p, const uint16_t* q, float* scores) {
        const int dim = segment.t.layout.head_dim, steps = dim / (2 * kTilePairs);
        const int later = A == 1 && p + kBlockTokens < segment.end ? p + kBlockTokens : p;
        const uint8_t *first = segment.keys(p), *second = segment.keys(later);
        const int64_t half = int64_t(steps) * kTileBytes;
        Fetched next(segment.after_keys(p), 0);
        zero_tiles();
        for (int k = 0; k < steps; k++) {
            if (A == 2 && segment.t.is_first) next.lines<32>();
            const int64_t at = k * kTileBytes;
            multiply<A>(q + k * 2 * kTilePairs, dim * 2,
                        {first + at, first + half + at, second + at, second + half + at}, 64);
        }
        float* to = scores + segment.offset(p);
        store_tiles(to, A == 2 ? to + kMatrixTile * kScoreRow : scores + segment.offset(later), kScoreRow * 4);
    }

    // The tiles of features from d on, of the values of all blocks before `end`, which all queries see.
    template <int A>
    static BITNET_INLINE void add(const Segment& segment, int end, int d, const uint16_t* weights, float* sums) {
        const int padded = segment.t.layout.padded_dim, tiles = padded / 16;
        const int later = A == 1 && d + 2 < tiles ? d + 2 : d;
        zero_tiles();
        for (int p = segment.begin; p < end; p += kBlockTokens) {
            const uint8_t *values = segment.values(p) + d * 64, *more = values + (later - d) * 64;
            if (A == 2 && segment.t.is_first)
                Fetched(segment.after_values(p), d * kTilePairs).lines<4 / A * kTilePairs>();
            multiply<A>(weights + segment.offset(p), kScoreRow * 2, {values, values + 64, more, more + 64}, padded * 4);
        }
        float* to = sums + d * 16;
        store_tiles(to, A == 2 ? to + kMatrixTile * padded : sums + later * 16, padded * 4);
    }
};

void attend(const AttendTask& t) {
    attend_in<InTiles>(t);
    _tile_release();
}

}  // namespace

void bitnet::add_avx512amx_attention(Kernels& kernels) {
    kernels.attend = attend;
    kernels.attend_queries = kQueries;
}

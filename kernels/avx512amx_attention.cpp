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

// Four products of tiles, into tiles 0 to 3: of up to 16 queries with four tiles, or of both halves of up
// to 32 with two.
template <int A>
BITNET_INLINE void multiply(const uint16_t* queries, int64_t stride, const uint8_t* const (&tiles)[4], int64_t row) {
    _tile_loadd(6, queries, stride);
    _tile_stream_loadd(4, tiles[0], row);
    _tile_stream_loadd(5, tiles[1], row);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (A == 2) {
        _tile_loadd(7, (const uint8_t*)queries + kMatrixTile * stride, stride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
    } else {
        _tile_stream_loadd(4, tiles[2], row);
        _tile_stream_loadd(5, tiles[3], row);
        _tile_dpbf16ps(2, 6, 4);
        _tile_dpbf16ps(3, 6, 5);
    }
}

BITNET_INLINE void zero_tiles() {
    asm volatile("" : : : "memory");
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

// Tiles of the cache as the second factors of products: as they stand there, or of int8, which bfloat16 holds, made in
// some memory.
template <Dtype D, int Tiles>
class Factors {
  public:
    // Rows of a tile of the cache are `row` tiles apart.
    explicit Factors(int64_t row) : row_(D == Dtype::bf16 ? row * 64 : 64), from_row_(row * Tile<D>::bytes) {}
    int64_t row() const { return row_; }
    BITNET_INLINE const uint8_t* operator()(int tile, const uint8_t* from) {
        if constexpr (D == Dtype::bf16) return from;
        uint8_t* to = made_[tile];
        asm volatile("" : : : "memory");  // which gcc 12 forgets to say of loads and stores of tiles
        for (int i = 0; i < kTilePairs; i++, from += from_row_) {
            const __m512i even = _mm512_castps_si512(load_i8((const int8_t*)from).v),
                          odd = _mm512_castps_si512(load_i8((const int8_t*)from + 16).v);
            _mm512_store_si512(to + i * 64, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
        }
        asm volatile("" : : : "memory");
        return to;
    }

  private:
    int64_t row_, from_row_;
    alignas(64) uint8_t made_[D == Dtype::bf16 ? 1 : Tiles][kTileBytes];
};

// The scales of all positions of a segment of an int8 cache.
struct Scales {
    alignas(64) float keys[kScoreRow], values[kScoreRow];
    explicit Scales(const Segment& segment) {
        for (int p = segment.begin; p < segment.end; p += kBlockTokens) {
            const float* scales = scales_of(segment.t.layout, segment.keys(p));
            std::memcpy(keys + segment.offset(p), scales, kBlockTokens * 4);
            std::memcpy(values + segment.offset(p), scales + kBlockTokens, kBlockTokens * 4);
        }
    }
};

// Fewer than nine queries wait for memory, which vectors fetch ahead.
struct InTiles {
    template <Dtype D>
    static constexpr bool fits(const AttendTask& t, int count) {
        return D != Dtype::f32 && count > 8 && t.layout.head_dim % (2 * kTilePairs) == 0;
    }

    template <Dtype D>
    static void take(const AttendTask& t, const Query* queries, int count, float* q) {
        if (!fits<D>(t, count)) return InVectors::take<D>(t, queries, count, q);
        const int dim = t.layout.head_dim;
        for (int i = 0; i < count; i++)
            for (int d = 0; d < dim; d++) ((uint16_t*)q)[i * dim + d] = to_bf16(queries[i].q[d]);
    }

    template <Dtype D>
    static void attend(const Segment& segment, const Query* queries, int count, const float* q, const Attended& to) {
        if (!fits<D>(segment.t, count)) return InVectors::attend<D>(segment, queries, count, q, to);
        if constexpr (D != Dtype::f32) {
            _tile_loadconfig(&shapes.halves[count]);
            const auto run = count > kMatrixTile ? attend_tiles<D, 2> : attend_tiles<D, 1>;
            run(segment, queries, count, (const uint16_t*)q, to);
        }
    }

  private:
    // A tiles of queries.
    template <Dtype D, int A>
    static void attend_tiles(const Segment& segment, const Query* queries, int count, const uint16_t* q,
                             const Attended& to) {
        float* scores = segment.t.scratch;
        uint16_t* weights = (uint16_t*)(scores + kQueries * kScoreRow);
        for (int p = segment.begin; p < segment.end; p += (3 - A) * kBlockTokens) score<D, A>(segment, p, q, scores);
        const auto pack = [&](int i, int k, const Lanes& w) __attribute__((always_inline)) {
            const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(w.v), 16);
            _mm256_storeu_si256((__m256i*)(weights + i * kScoreRow + k), _mm512_cvtepi32_epi16(high));
        };
        if constexpr (D == Dtype::bf16) {
            weigh_all<D>(segment, queries, count, to, pack);
        } else {
            const Scales scales(segment);
            const int begin = segment.offset(segment.begin);
            for (int i = 0; i < count; i++)
                for (int k = begin; k < begin + segment.width(); k += 16) {
                    float* products = scores + i * kScoreRow + k;
                    store(products, mul(load(products), load(scales.keys + k)));
                }
            weigh_all<D>(segment, queries, count, to, [&](int i, int k, const Lanes& w) __attribute__((always_inline)) {
                pack(i, k, round_to_bf16(mul(w, load(scales.values + k))));
            });
        }
        int whole = segment.begin;  // blocks of which all queries see all
        while (whole < segment.end && all_see(queries, count, whole)) whole += kBlockTokens;
        for (int d = 0; d < segment.t.layout.padded_dim / 16; d += 4 / A)
            add<D, A>(segment, whole, d, weights, to.sums);
        for (int p = whole; p < segment.end; p += kBlockTokens)
            add_block<OneByOne<D>, D>(segment, p, queries, count, scores, to);
    }

    static bool all_see(const Query* queries, int count, int p) {
        for (int i = 0; i < count; i++)
            if (queries[i].length < p + kBlockTokens) return false;
        return true;
    }

    // The products of the queries with a block, or with two.
    template <Dtype D, int A>
    static BITNET_INLINE void score(const Segment& segment, int p, const uint16_t* q, float* scores) {
        const int dim = segment.t.layout.head_dim, steps = dim / (2 * kTilePairs);
        const int later = A == 1 && p + kBlockTokens < segment.end ? p + kBlockTokens : p;
        const uint8_t *first = segment.keys(p), *second = segment.keys(later);
        constexpr int64_t tile = kTilePairs * Tile<D>::bytes;
        Factors<D, 4> factors(1);
        Fetched next(segment.after_keys(p), 0);
        zero_tiles();
        for (int k = 0; k < steps; k++, first += tile, second += tile) {
            if (A == 2 && !segment.is_near) next.lines<32>();
            const uint8_t *low = factors(0, first), *high = factors(1, first + steps * tile);
            if constexpr (A == 2)
                multiply<A>(q + k * 2 * kTilePairs, dim * 2, {low, high}, factors.row());
            else
                multiply<A>(q + k * 2 * kTilePairs, dim * 2,
                            {low, high, factors(2, second), factors(3, second + steps * tile)}, factors.row());
        }
        float* to = scores + segment.offset(p);
        store_tiles(to, A == 2 ? to + kMatrixTile * kScoreRow : scores + segment.offset(later), kScoreRow * 4);
    }

    // The tiles of features from d on, of the values of all blocks before `end`, which all queries see.
    template <Dtype D, int A>
    static BITNET_INLINE void add(const Segment& segment, int end, int d, const uint16_t* weights, float* sums) {
        const int padded = segment.t.layout.padded_dim, tiles = padded / 16;
        const int later = A == 1 && d + 2 < tiles ? d + 2 : d;
        constexpr int bytes = Tile<D>::bytes;
        Factors<D, 4> factors(tiles);
        zero_tiles();
        for (int p = segment.begin; p < end; p += kBlockTokens) {
            const uint8_t *values = segment.values(p) + d * bytes, *more = values + (later - d) * bytes;
            if (A == 2 && !segment.is_near)
                Fetched(segment.after_values(p), d * kTilePairs).lines<4 / A * kTilePairs>();
            const uint16_t* of_block = weights + segment.offset(p);
            const uint8_t *low = factors(0, values), *high = factors(1, values + bytes);
            if constexpr (A == 2)
                multiply<A>(of_block, kScoreRow * 2, {low, high}, factors.row());
            else
                multiply<A>(of_block, kScoreRow * 2, {low, high, factors(2, more), factors(3, more + bytes)},
                            factors.row());
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

void bitnet::add_avx512amx_attention(Kernels& kernels) { kernels.attend = attend; }

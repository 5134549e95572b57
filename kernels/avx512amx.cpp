// AMX: a tile of 16 tokens by 64 columns times a tile of 64 columns by 16 rows in one instruction, with exact int32
// sums.
#include <cstring>

#include "amx_tiles.h"
#include "fetch.h"
#include "t5_decode.h"

namespace {

using namespace bitnet;

constexpr int kTileSteps = 4, kTileColumns = kTileSteps * kStepColumns;
constexpr int kTileBytes = kTileSteps * 4 * kStepBytes;  // of 32 rows, a byte a weight
constexpr int kFifthTiles = 4;                           // so many tiles of T5 have one of fifth fields

BITNET_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

BITNET_INLINE void zero_all_sums() {
    zero_sums();
    _tile_zero(5);
    _tile_zero(7);
}

// `beside`: the bytes of what is read side by side with these, and was fetched before.
BITNET_INLINE void fetch_step(const uint8_t* w, int64_t beside) {
    fetch_ahead(w + beside);
    fetch_ahead(w + beside + 64);
}

// A field of 16 rows as a byte each: one instruction, a product of bit matrices, picks both bits.
template <int P>
BITNET_INLINE void store_field(uint8_t* bytes, __m512i x) {
    constexpr uint64_t rows = uint64_t(1) << (56 + 2 * P) | uint64_t(1) << (48 + 2 * P + 1);
    _mm512_storeu_si512(bytes, _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(int64_t(rows)), 0));
}

// Those of a step of U2.
BITNET_INLINE void store_fields(uint8_t* bytes, __m512i x, __m512i y) {
    store_field<0>(bytes, x);
    store_field<0>(bytes + 64, y);
    store_field<1>(bytes + kStepBytes, x);
    store_field<1>(bytes + kStepBytes + 64, y);
    store_field<2>(bytes + 2 * kStepBytes, x);
    store_field<2>(bytes + 2 * kStepBytes + 64, y);
    store_field<3>(bytes + 3 * kStepBytes, x);
    store_field<3>(bytes + 3 * kStepBytes + 64, y);
}

// A tile of U2 steps as bytes: 4 columns of 32 rows in 128 bytes, which is how AMX wants its second factor. Columns
// that only fill up the last tile become 0, so what the activations hold there does not matter.
template <bool Fetches>
BITNET_INLINE void expand_tile(const uint8_t* w, int64_t beside, int steps, uint8_t* bytes) {
    for (int s = 0; s < kTileSteps; s++, w += kStepBytes, bytes += 4 * kStepBytes) {
        if (s >= steps) {
            std::memset(bytes, 0, size_t(kTileSteps - s) * 4 * kStepBytes);
            return;
        }
        if constexpr (Fetches) fetch_step(w, beside);
        store_fields(bytes, _mm512_loadu_si512(w), _mm512_loadu_si512(w + 64));
    }
}

// The same of a block of T5, which fills a tile; with a quarter of a tile of fifth fields.
template <bool Fetches>
BITNET_INLINE void expand_block(const T5Decoder& decoder, const uint8_t* w, int64_t beside, uint8_t* bytes,
                                uint8_t* fifths) {
    for (int s = 0; s < kTileSteps; s++, w += kStepBytes, bytes += 4 * kStepBytes) {
        if constexpr (Fetches) fetch_step(w, beside);
        const T5Fields x = decoder(_mm512_loadu_si512(w)), y = decoder(_mm512_loadu_si512(w + 64));
        store_fields(bytes, x.first_four(), y.first_four());
        store_field<3>(fifths + s * kStepBytes, x.upper);
        store_field<3>(fifths + s * kStepBytes + 64, y.upper);
    }
}

// The tiles of a group; T5 has tiles of fifth fields behind the others.
template <bool IsT5, bool Fetches>
class Expansion {
  public:
    // One of so many groups that are expanded side by side.
    Expansion(const MatrixTask& t, const uint8_t* weights, int groups)
        : weights_(weights),
          beside_((groups - 1) * t.steps * kStepBytes),
          steps_(t.steps),
          tiles((t.steps + kTileSteps - 1) / kTileSteps) {}
    // In ascending order. For T5, `fifths` collects its fifth fields and its neighbours'.
    BITNET_INLINE void tile(int tile, uint8_t* bytes, uint8_t* fifths) const {
        const uint8_t* w = weights_ + tile * kTileSteps * kStepBytes;
        if (!IsT5) return expand_tile<Fetches>(w, beside_, steps_ - tile * kTileSteps, bytes);
        const int quarter = tile % kFifthTiles;
        if (quarter == 0 && tiles - tile < kFifthTiles) std::memset(fifths, 0, kTileBytes);
        expand_block<Fetches>(decoder_, w, beside_, bytes, fifths + quarter * (kTileBytes / kFifthTiles));
    }
    // Whether the fifth fields are complete with this tile.
    BITNET_INLINE bool ends_fifths(int tile) const {
        return IsT5 && (tile % kFifthTiles == kFifthTiles - 1 || tile + 1 == tiles);
    }

  private:
    const uint8_t* weights_;
    int64_t beside_;
    int steps_;
    T5Decoder decoder_;

  public:
    const int tiles;
};

// A tile of group `Of` times A tiles of tokens; the second of two groups finds those of the first in their registers.
template <int Of, int A>
BITNET_INLINE void multiply(const uint8_t* bytes, const int8_t* codes, int64_t stride) {
    asm volatile("" : : : "memory");  // which gcc 12 forgets to say of the loads of tiles
    _tile_loadd(4, bytes, kStepBytes);
    _tile_loadd(5, bytes + 64, kStepBytes);
    if constexpr (Of == 1) {
        _tile_dpbsud(2, 6, 4);
        _tile_dpbsud(3, 6, 5);
    } else {
        _tile_loadd(6, codes, stride);
        _tile_dpbsud(0, 6, 4);
        _tile_dpbsud(1, 6, 5);
    }
    if constexpr (A == 2) {
        _tile_loadd(7, codes + kMatrixTile * stride, stride);
        _tile_dpbsud(2, 7, 4);
        _tile_dpbsud(3, 7, 5);
    }
    asm volatile("" : : : "memory");
}

// The same with three tiles of tokens, whose sums leave room for one tile of either factor: that of tokens stays, as it
// comes from the second cache, and those of rows come and go.
BITNET_INLINE void multiply_three(const uint8_t* bytes, const int8_t* codes, int64_t stride) {
    asm volatile("" : : : "memory");
    _tile_loadd(6, codes, stride);
    _tile_loadd(4, bytes, kStepBytes);
    _tile_dpbsud(0, 6, 4);
    _tile_loadd(4, bytes + 64, kStepBytes);
    _tile_dpbsud(1, 6, 4);
    _tile_loadd(6, codes + kMatrixTile * stride, stride);
    _tile_dpbsud(3, 6, 4);
    _tile_loadd(4, bytes, kStepBytes);
    _tile_dpbsud(2, 6, 4);
    _tile_loadd(6, codes + 2 * kMatrixTile * stride, stride);
    _tile_dpbsud(5, 6, 4);
    _tile_loadd(4, bytes + 64, kStepBytes);
    _tile_dpbsud(7, 6, 4);
    asm volatile("" : : : "memory");
}

// G groups of rows times A tiles of 16 tokens, of which one is 1: each tile is expanded while the one before it is
// multiplied. Two groups share the loads of the activations, which come from the second cache.
template <bool IsT5, int G, int A, bool Fetches>
void block(const MatrixTask& t, const uint8_t* weights, int32_t* acc) {
    alignas(64) uint8_t ring[G][2][kTileBytes], fifths[IsT5 ? G : 1][2][kTileBytes];
    const Expansion<IsT5, Fetches> groups[2] = {{t, weights, G}, {t, weights + (G - 1) * t.steps * kStepBytes, G}};
    const int tiles = groups[0].tiles;
    const auto expand = [&](int tile, int g) {
        groups[g].tile(tile, ring[g][tile % 2], fifths[IsT5 ? g : 0][tile / kFifthTiles % 2]);
    };
    const auto first = [&](const uint8_t* bytes, const int8_t* codes) {
        if constexpr (A == 3)
            multiply_three(bytes, codes, t.code_stride);
        else
            multiply<0, A>(bytes, codes, t.code_stride);
    };
    zero_all_sums();
    expand(0, 0);
    if constexpr (G == 2) expand(0, 1);
    const int8_t *a = t.codes, *last = t.codes + tiles * kTileColumns;
    for (int tile = 0; tile < tiles; tile++, a += kTileColumns) {
        if (tile + 1 < tiles) expand(tile + 1, 0);
        first(ring[0][tile % 2], a);
        if constexpr (G == 2) {
            if (tile + 1 < tiles) expand(tile + 1, 1);
            multiply<1, A>(ring[1][tile % 2], a, t.code_stride);
        }
        if (!groups[0].ends_fifths(tile)) continue;
        first(fifths[0][tile / kFifthTiles % 2], last);
        if constexpr (G == 2) multiply<1, A>(fifths[IsT5 ? G - 1 : 0][tile / kFifthTiles % 2], last, t.code_stride);
        last += kTileColumns;
    }
    _tile_stored(0, acc, kGroupRows * 4);
    _tile_stored(1, acc + 16, kGroupRows * 4);
    if constexpr (G + A == 2) return;
    acc += G == 2 ? t.acc_tokens * kGroupRows : kMatrixTile * kGroupRows;
    _tile_stored(2, acc, kGroupRows * 4);
    _tile_stored(3, acc + 16, kGroupRows * 4);
    if constexpr (A < 3) return;
    acc += kMatrixTile * kGroupRows;
    _tile_stored(5, acc, kGroupRows * 4);
    _tile_stored(7, acc + 16, kGroupRows * 4);
}

template <bool IsT5, bool Fetches>
void group(const MatrixTask& t, int tiles, const uint8_t* weights, int32_t* acc) {
    switch (tiles) {
        case 1:
            return block<IsT5, 1, 1, Fetches>(t, weights, acc);
        case 2:
            return block<IsT5, 1, 2, Fetches>(t, weights, acc);
        default:
            return block<IsT5, 1, 3, Fetches>(t, weights, acc);
    }
}

// Up to three tiles of tokens at a time: to expand weights again for the next ones takes less than sums that come and
// go. What will be written is fetched before, where that takes some time.
template <bool IsT5>
void product(const MatrixTask& t) {
    const int tiles = (t.tokens + kMatrixTile - 1) / kMatrixTile, passes = (tiles + 2) / 3;
    if (t.groups == 2 && tiles == 1) return block<IsT5, 2, 1, true>(t, t.weights, t.acc);
    for (int g = 0; g < t.groups; g++) {
        const uint8_t* weights = t.weights + g * t.steps * kStepBytes;
        int32_t* acc = t.acc + g * t.acc_tokens * kGroupRows;
        for (int pass = 0; pass < passes; pass++) {
            const int begin = tiles * pass / passes, count = tiles * (pass + 1) / passes - begin;
            const int first = begin * kMatrixTile, end = first + count * kMatrixTile;
            if (t.out && tiles > 2)
                fetch_outputs(t.out + g * kGroupRows, t.out_stride, first, end < t.tokens ? end : t.tokens);
            MatrixTask part = t;
            part.codes += first * t.code_stride;
            (pass == 0 ? group<IsT5, true> : group<IsT5, false>)(part, count, weights, acc);
            acc += count * kMatrixTile * kGroupRows;
        }
    }
}

void matrix_product(const MatrixTask& t) {
    _tile_loadconfig(&shapes.of[t.tokens < kMatrixTile ? t.tokens : kMatrixTile]);
    t.is_t5 ? product<true>(t) : product<false>(t);
    _tile_release();
}

constexpr int kHeadTileBytes = kTileColumns * kHeadRows;

// Up to a tile of the codes of a quantised head as bytes, all 8 bits or the high 6: 4 columns of 16 rows in 64 bytes.
// `beside`: the steps of what is read side by side with these, and was fetched before.
template <int Bits>
BITNET_INLINE void expand_head(const uint8_t* w6, const uint8_t* w2, int64_t beside, int steps, uint8_t* bytes) {
    constexpr int up = Bits - 6;  // where the high bits begin
    const __m512i middle = _mm512_set1_epi8(15 << up), top = _mm512_set1_epi8(char(48 << up));
    const auto join = [&](__m512i four, __m512i two) {
        return _mm512_or_si512(_mm512_and_si512(four, middle), _mm512_and_si512(two, top));
    };
    for (int s = 0; s < kTileSteps && s < steps; s++, w6 += kHeadBytes6, bytes += 256) {
        for (int line = 0; line < kHeadBytes6; line += 64) fetch_ahead(w6 + beside * kHeadBytes6 + line);
        const __m512i x = _mm512_loadu_si512(w6), y = _mm512_loadu_si512(w6 + 64), z = _mm512_loadu_si512(w6 + 128);
        __m512i fields[4] = {join(_mm512_slli_epi16(x, up), _mm512_slli_epi16(z, 4 + up)),
                             join(_mm512_srli_epi16(x, 4 - up), _mm512_slli_epi16(z, 2 + up)),
                             join(_mm512_slli_epi16(y, up), _mm512_slli_epi16(z, up)),
                             join(_mm512_srli_epi16(y, 4 - up), _mm512_srli_epi16(z, 2 - up))};
        if constexpr (Bits == 8) {
            fetch_ahead(w2 + beside * kHeadBytes2);
            const __m512i low = _mm512_loadu_si512(w2), last = _mm512_set1_epi8(3);
            for (int p = 0; p < 4; p++)
                fields[p] = _mm512_or_si512(fields[p], _mm512_and_si512(_mm512_srli_epi16(low, unsigned(2 * p)), last));
            w2 += kHeadBytes2;
        }
        for (int p = 0; p < 4; p++) _mm512_storeu_si512(bytes + 64 * p, fields[p]);
    }
}

// R tiles of rows times A tiles of 16 vectors, as `block`.
template <int Bits, int R, int A>
void head_block(const HeadTask& t) {
    alignas(64) uint8_t ring[2][R][kHeadTileBytes] = {};  // what lies beyond the last step meets activations that are 0
    const int tiles = (t.steps + kTileSteps - 1) / kTileSteps;
    const auto expand = [&](int tile) {
        const int step = tile * kTileSteps;
        for (int r = 0; r < R; r++)
            expand_head<Bits>(t.weights6 + (r * t.steps + step) * kHeadBytes6,
                              Bits == 8 ? t.weights2 + (r * t.steps + step) * kHeadBytes2 : nullptr, (R - 1) * t.steps,
                              t.steps - step, ring[tile % 2][r]);
    };
    const int8_t* a = t.codes;
    zero_sums();
    expand(0);
    for (int tile = 0; tile < tiles; tile++, a += kTileColumns) {
        if (tile + 1 < tiles) expand(tile + 1);
        asm volatile("" : : : "memory");
        _tile_loadd(4, a, t.code_stride);
        _tile_loadd(6, ring[tile % 2][0], 64);
        _tile_dpbsud(0, 4, 6);
        if constexpr (A == 2) {
            _tile_loadd(5, a + kMatrixTile * t.code_stride, t.code_stride);
            _tile_dpbsud(1, 5, 6);
        }
        if constexpr (R == 2) {
            _tile_loadd(7, ring[tile % 2][1], 64);
            _tile_dpbsud(2, 4, 7);
            if constexpr (A == 2) _tile_dpbsud(3, 5, 7);
        }
        asm volatile("" : : : "memory");
    }
    constexpr int tile_sums = kMatrixTile * kHeadRows;
    _tile_stored(0, t.acc, 64);
    if constexpr (A == 2) _tile_stored(1, t.acc + tile_sums, 64);
    if constexpr (R == 2) _tile_stored(2, t.acc + 2 * tile_sums, 64);
    if constexpr (R == 2 && A == 2) _tile_stored(3, t.acc + 3 * tile_sums, 64);
}

template <int Bits>
void head_blocks(const HeadTask& t) {
    const bool two = t.vectors > kMatrixTile;
    if (t.tiles == 2)
        two ? head_block<Bits, 2, 2>(t) : head_block<Bits, 2, 1>(t);
    else
        two ? head_block<Bits, 1, 2>(t) : head_block<Bits, 1, 1>(t);
}

void head_matrix(const HeadTask& t) {
    _tile_loadconfig(&shapes.of[kMatrixTile]);
    t.weights2 ? head_blocks<8>(t) : head_blocks<6>(t);
    _tile_release();
}

}  // namespace

void bitnet::add_avx512amx(Kernels& kernels) {
    kernels.name = "avx512amx";
    kernels.matrix_product = matrix_product;
    kernels.head_matrix = head_matrix;
}

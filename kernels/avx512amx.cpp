// AMX: a tile of 16 tokens by 64 columns times a tile of 64 columns by 16 rows in one instruction, with exact int32
// sums.
#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

using namespace bitnet;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// In memory for good: gcc 12 believes that loading them reads 8 bytes.
const TileShapes shapes;

constexpr int kTileSteps = 4, kTileColumns = kTileSteps * kStepColumns;
constexpr int kTileBytes = kTileSteps * 4 * kStepBytes;  // of 32 rows, a byte a weight

BITNET_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// A tile of U2 steps as bytes: 4 columns of 32 rows in 128 bytes, which is how AMX wants its second factor. Columns
// that only fill up the last tile become 0, so what the activations hold there does not matter.
BITNET_INLINE void expand_tile(const uint8_t* w, int steps, uint8_t* bytes) {
    const __m512i mask = _mm512_set1_epi8(3);
    for (int s = 0; s < kTileSteps; s++, w += kStepBytes) {
        if (s >= steps) {
            std::memset(bytes, 0, size_t(kTileSteps - s) * 4 * kStepBytes);
            return;
        }
        __builtin_prefetch(w + 3072, 0, 2);
        __builtin_prefetch(w + 3072 + 64, 0, 2);
        const __m512i x = _mm512_loadu_si512(w), y = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++, bytes += kStepBytes) {
            _mm512_storeu_si512(bytes, _mm512_and_si512(_mm512_srli_epi16(x, 2 * p), mask));
            _mm512_storeu_si512(bytes + 64, _mm512_and_si512(_mm512_srli_epi16(y, 2 * p), mask));
        }
    }
}

// G groups of rows times A tiles of 16 tokens, of which one is 1: each tile is expanded while the one before it is
// multiplied. Two groups share the loads of the activations, which come from the second cache.
template <int G, int A>
void block(const MatrixTask& t, const uint8_t* weights, int32_t* acc) {
    alignas(64) uint8_t ring[2][G][kTileBytes];
    const int tiles = (t.steps + kTileSteps - 1) / kTileSteps;
    const auto expand = [&](int tile) {
        for (int g = 0; g < G; g++)
            expand_tile(weights + g * t.steps * kStepBytes + tile * kTileSteps * kStepBytes,
                        t.steps - tile * kTileSteps, ring[tile % 2][g]);
    };
    const int8_t* a = t.codes;
    zero_sums();
    expand(0);
    for (int tile = 0; tile < tiles; tile++, a += kTileColumns) {
        if (tile + 1 < tiles) expand(tile + 1);
        asm volatile("" : : : "memory");  // which gcc 12 forgets to say of the loads of tiles
        const uint8_t* b = ring[tile % 2][0];
        _tile_loadd(4, b, kStepBytes);
        _tile_loadd(5, b + 64, kStepBytes);
        _tile_loadd(6, a, t.code_stride);
        _tile_dpbsud(0, 6, 4);
        _tile_dpbsud(1, 6, 5);
        if constexpr (A == 2) {
            _tile_loadd(7, a + kMatrixTile * t.code_stride, t.code_stride);
            _tile_dpbsud(2, 7, 4);
            _tile_dpbsud(3, 7, 5);
        }
        if constexpr (G == 2) {
            _tile_loadd(4, b + kTileBytes, kStepBytes);
            _tile_loadd(5, b + kTileBytes + 64, kStepBytes);
            _tile_dpbsud(2, 6, 4);
            _tile_dpbsud(3, 6, 5);
        }
        asm volatile("" : : : "memory");
    }
    _tile_stored(0, acc, kGroupRows * 4);
    _tile_stored(1, acc + 16, kGroupRows * 4);
    if constexpr (G + A == 2) return;
    acc += G == 2 ? t.acc_tokens * kGroupRows : kMatrixTile * kGroupRows;
    _tile_stored(2, acc, kGroupRows * 4);
    _tile_stored(3, acc + 16, kGroupRows * 4);
}

// One group times any number of tokens: some tiles are expanded once, and multiplied with all tokens, whose sums come
// and go.
void many_tokens(const MatrixTask& t, const uint8_t* weights, int32_t* acc) {
    constexpr int kChunk = 8;
    alignas(64) uint8_t expanded[kChunk * kTileBytes];
    const int tiles = (t.steps + kTileSteps - 1) / kTileSteps;
    for (int begin = 0; begin < tiles; begin += kChunk) {
        const int end = begin + kChunk < tiles ? begin + kChunk : tiles;
        for (int tile = begin; tile < end; tile++)
            expand_tile(weights + tile * kTileSteps * kStepBytes, t.steps - tile * kTileSteps,
                        expanded + (tile - begin) * kTileBytes);
        asm volatile("" : : : "memory");
        for (int first = 0; first < t.tokens; first += 2 * kMatrixTile) {
            const bool two = t.tokens - first > kMatrixTile;
            int32_t *sums = acc + first * kGroupRows, *more = two ? sums + kMatrixTile * kGroupRows : sums;
            if (begin == 0) {
                zero_sums();
            } else {
                _tile_loadd(0, sums, kGroupRows * 4);
                _tile_loadd(1, sums + 16, kGroupRows * 4);
                _tile_loadd(2, more, kGroupRows * 4);
                _tile_loadd(3, more + 16, kGroupRows * 4);
            }
            const int8_t* a = t.codes + first * t.code_stride + begin * kTileColumns;
            const uint8_t* b = expanded;
            for (int tile = begin; tile < end; tile++, a += kTileColumns, b += kTileBytes) {
                _tile_loadd(4, b, kStepBytes);
                _tile_loadd(5, b + 64, kStepBytes);
                _tile_loadd(6, a, t.code_stride);
                _tile_dpbsud(0, 6, 4);
                _tile_dpbsud(1, 6, 5);
                if (!two) continue;
                _tile_loadd(7, a + kMatrixTile * t.code_stride, t.code_stride);
                _tile_dpbsud(2, 7, 4);
                _tile_dpbsud(3, 7, 5);
            }
            if (two) _tile_stored(2, more, kGroupRows * 4);
            if (two) _tile_stored(3, more + 16, kGroupRows * 4);
            _tile_stored(0, sums, kGroupRows * 4);
            _tile_stored(1, sums + 16, kGroupRows * 4);
        }
        asm volatile("" : : : "memory");
    }
}

void matrix_product(const MatrixTask& t) {
    _tile_loadconfig(&shapes);
    if (t.groups == 2 && t.tokens <= kMatrixTile) {
        block<2, 1>(t, t.weights, t.acc);
    } else {
        for (int g = 0; g < t.groups; g++) {
            const uint8_t* weights = t.weights + g * t.steps * kStepBytes;
            int32_t* acc = t.acc + g * t.acc_tokens * kGroupRows;
            if (t.tokens <= kMatrixTile)
                block<1, 1>(t, weights, acc);
            else if (t.tokens <= 2 * kMatrixTile)
                block<1, 2>(t, weights, acc);
            else
                many_tokens(t, weights, acc);
        }
    }
    _tile_release();
}

constexpr int kHeadTileBytes = kTileColumns * kHeadRows;

// Up to a tile of the codes of a quantised head as bytes: 4 columns of 16 rows in 64 bytes.
BITNET_INLINE void expand_head(const uint8_t* w6, const uint8_t* w2, int steps, uint8_t* bytes) {
    const __m512i middle = _mm512_set1_epi8(0x3c), top = _mm512_set1_epi8(char(0xc0)), last = _mm512_set1_epi8(3);
    const auto join = [&](__m512i four, __m512i two, __m512i low) {
        const __m512i upper = _mm512_or_si512(_mm512_and_si512(four, middle), _mm512_and_si512(two, top));
        return _mm512_or_si512(upper, _mm512_and_si512(low, last));
    };
    for (int s = 0; s < kTileSteps && s < steps; s++, w6 += kHeadBytes6, w2 += kHeadBytes2, bytes += 256) {
        for (int line = 0; line < kHeadBytes6; line += 64) __builtin_prefetch(w6 + 3072 + line, 0, 2);
        __builtin_prefetch(w2 + 3072, 0, 2);
        const __m512i x = _mm512_loadu_si512(w6), y = _mm512_loadu_si512(w6 + 64), z = _mm512_loadu_si512(w6 + 128);
        const __m512i low = _mm512_loadu_si512(w2);
        _mm512_storeu_si512(bytes, join(_mm512_slli_epi16(x, 2), _mm512_slli_epi16(z, 6), low));
        _mm512_storeu_si512(bytes + 64,
                            join(_mm512_srli_epi16(x, 2), _mm512_slli_epi16(z, 4), _mm512_srli_epi16(low, 2)));
        _mm512_storeu_si512(bytes + 128,
                            join(_mm512_slli_epi16(y, 2), _mm512_slli_epi16(z, 2), _mm512_srli_epi16(low, 4)));
        _mm512_storeu_si512(bytes + 192, join(_mm512_srli_epi16(y, 2), z, _mm512_srli_epi16(low, 6)));
    }
}

// R tiles of rows times A tiles of 16 vectors, as `block`.
template <int R, int A>
void head_block(const HeadMatrixTask& t) {
    alignas(64) uint8_t ring[2][R][kHeadTileBytes] = {};  // what lies beyond the last step meets activations that are 0
    const int tiles = (t.steps + kTileSteps - 1) / kTileSteps;
    const auto expand = [&](int tile) {
        const int step = tile * kTileSteps;
        for (int r = 0; r < R; r++)
            expand_head(t.weights6 + (r * t.steps + step) * kHeadBytes6,
                        t.weights2 + (r * t.steps + step) * kHeadBytes2, t.steps - step, ring[tile % 2][r]);
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

void head_matrix(const HeadMatrixTask& t) {
    const bool two = t.vectors > kMatrixTile;
    _tile_loadconfig(&shapes);
    if (t.tiles == 2)
        two ? head_block<2, 2>(t) : head_block<2, 1>(t);
    else
        two ? head_block<1, 2>(t) : head_block<1, 1>(t);
    _tile_release();
}

}  // namespace

void bitnet::add_avx512amx(Kernels& kernels) {
    kernels.name = "avx512amx";
    kernels.matrix_product = matrix_product;
    kernels.head_matrix = head_matrix;
}

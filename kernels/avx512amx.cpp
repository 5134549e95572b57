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

constexpr int kTileBytes = 16 * kStepBytes;  // 64 columns of 32 rows, a byte a weight

// The fields of U2 steps as bytes: 4 columns of 32 rows in 128 bytes, which is how AMX wants its second factor. Columns
// that only fill up the last tile become 0, so what the activations hold there does not matter.
int spread(const uint8_t* w, int steps, uint8_t* bytes) {
    const __m512i mask = _mm512_set1_epi8(3);
    for (int s = 0; s < steps; s++, w += kStepBytes) {
        __builtin_prefetch(w + 4096, 0, 2);
        __builtin_prefetch(w + 4096 + 64, 0, 2);
        const __m512i x = _mm512_loadu_si512(w), y = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++, bytes += kStepBytes) {
            _mm512_storeu_si512(bytes, _mm512_and_si512(_mm512_srli_epi16(x, 2 * p), mask));
            _mm512_storeu_si512(bytes + 64, _mm512_and_si512(_mm512_srli_epi16(y, 2 * p), mask));
        }
    }
    const int tiles = (steps + 3) / 4;
    std::memset(bytes, 0, size_t(tiles * 4 - steps) * 4 * kStepBytes);
    return tiles;
}

void matrix_product(const MatrixTask& t) {
    const int tiles = spread(t.weights, t.steps, t.scratch);
    asm volatile("" : : : "memory");  // which gcc 12 forgets to say of the loads of tiles
    _tile_loadconfig(&shapes);
    for (int first = 0; first < t.tokens; first += 32) {
        const bool two = t.tokens - first > 16;
        const int8_t* a = t.codes + first * t.code_stride;
        const uint8_t* b = t.scratch;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < tiles; k++, a += 64, b += kTileBytes) {
            _tile_loadd(4, a, t.code_stride);
            _tile_loadd(6, b, kStepBytes);
            _tile_loadd(7, b + 64, kStepBytes);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if (!two) continue;
            _tile_loadd(5, a + 16 * t.code_stride, t.code_stride);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        int32_t* acc = t.acc + first * kGroupRows;
        _tile_stored(0, acc, kGroupRows * 4);
        _tile_stored(1, acc + 16, kGroupRows * 4);
        if (!two) continue;
        _tile_stored(2, acc + 16 * kGroupRows, kGroupRows * 4);
        _tile_stored(3, acc + 16 * kGroupRows + 16, kGroupRows * 4);
    }
    _tile_release();
}

}  // namespace

void bitnet::add_avx512amx(Kernels& kernels) {
    kernels.name = "avx512amx";
    kernels.matrix_product = matrix_product;
}

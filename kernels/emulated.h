// AMX and AVX-VNNI on a processor with AVX-512 that has neither, so that their kernels can be tested there: this stands
// in front of avx512amx.cpp and avxvnni.cpp where BITNET_EMULATED is ON. It is slow.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AMX_TILE__
namespace emulated {

// Eight tiles of up to 16 rows of 64 bytes, and their shapes as `_tile_loadconfig` takes them.
struct Tiles {
    uint8_t shapes[64];
    uint8_t data[8][16][64];
    int rows(int tile) const { return shapes[48 + tile]; }
    int bytes(int tile) const { return shapes[16 + 2 * tile]; }
    void zero(int tile) { std::memset(data[tile], 0, sizeof data[tile]); }
    void load(int tile, const void* from, int64_t stride) {
        zero(tile);
        for (int row = 0; row < rows(tile); row++)
            std::memcpy(data[tile][row], (const uint8_t*)from + row * stride, size_t(bytes(tile)));
    }
    void store(int tile, void* to, int64_t stride) const {
        for (int row = 0; row < rows(tile); row++)
            std::memcpy((uint8_t*)to + row * stride, data[tile][row], size_t(bytes(tile)));
    }
    // Adds the products of four neighbours each: signed bytes of the left tile, unsigned ones of the right.
    void add_products(int to, int left, int right) {
        for (int row = 0; row < rows(to); row++) {
            int32_t sums[16];
            std::memcpy(sums, data[to][row], sizeof sums);
            for (int i = 0; i < bytes(left); i++)
                for (int column = 0; column < bytes(to) / 4; column++)
                    sums[column] += int8_t(data[left][row][i]) * data[right][i / 4][4 * column + i % 4];
            std::memcpy(data[to][row], sums, sizeof sums);
        }
    }
    // Adds the products of two neighbours each, in bfloat16: all even ones, all odd ones, and both to what is there.
    void add_float_products(int to, int left, int right) {
        const auto at = [&](int tile, int row, int i) {
            uint32_t bits = 0;
            std::memcpy((uint8_t*)&bits + 2, data[tile][row] + 2 * i, 2);
            float f;
            std::memcpy(&f, &bits, 4);
            return f;
        };
        for (int row = 0; row < rows(to); row++)
            for (int column = 0; column < bytes(to) / 4; column++) {
                float sum, both[2] = {};
                for (int i = 0; i < bytes(left) / 2; i++)
                    both[i % 2] = std::fma(at(left, row, i), at(right, i / 2, 2 * column + i % 2), both[i % 2]);
                std::memcpy(&sum, data[to][row] + 4 * column, 4);
                sum += both[0] + both[1];
                std::memcpy(data[to][row] + 4 * column, &sum, 4);
            }
    }
};
inline thread_local Tiles tiles;

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) std::memcpy(::emulated::tiles.shapes, from, sizeof ::emulated::tiles.shapes)
#define _tile_release() std::memset(&::emulated::tiles, 0, sizeof ::emulated::tiles)
#define _tile_zero(tile) ::emulated::tiles.zero(tile)
#define _tile_loadd(tile, from, stride) ::emulated::tiles.load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) ::emulated::tiles.load(tile, from, stride)
#define _tile_stored(tile, to, stride) ::emulated::tiles.store(tile, to, stride)
#define _tile_dpbsud(to, left, right) ::emulated::tiles.add_products(to, left, right)
#define _tile_dpbf16ps(to, left, right) ::emulated::tiles.add_float_products(to, left, right)
#endif

#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
#define BITNET_VEX ""

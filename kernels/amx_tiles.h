// The shapes of AMX's tiles.
#pragma once
#include <immintrin.h>

#include <initializer_list>

#include "kernels.h"

namespace {

// Tiles 4 and 5 have 16 rows of 64 bytes, the others one for each token or query.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Of up to 16 tokens; and of up to 32, of which tiles 2, 3 and 7 have those from the 17th on.
struct AllShapes {
    TileShapes of[bitnet::kMatrixTile + 1], halves[2 * bitnet::kMatrixTile + 1];
    constexpr AllShapes() {
        for (uint8_t count = 1; count <= bitnet::kMatrixTile; count++)
            for (const int tile : {0, 1, 2, 3, 6, 7}) of[count].rows[tile] = count;
        for (int count = 1; count <= bitnet::kMatrixTile; count++) {
            halves[count] = of[count];
            for (const int tile : {2, 3, 7}) halves[bitnet::kMatrixTile + count].rows[tile] = uint8_t(count);
        }
    }
};

// In memory for good: gcc 12 believes that loading them reads 8 bytes. And made by the compiler: what makes it at the
// start of the program would run with AVX-512 on every machine.
constinit const AllShapes shapes;

}  // namespace

// T5: the weights t0 .. t4 (0, 1, 2) of a byte are (q % 4) << 6 | 21 t4 + q / 4 with q = t0 + 3 t1 + 9 t2 + 27 t3,
// which splits into two look-ups of 6 and 7 bits.
#pragma once
#include <cstdint>

namespace bitnet {

struct T5Tables {
    uint8_t first[256] = {};  // t0 | t1 << 2 | t2 << 4 | t3 << 6, by the whole byte
    uint8_t fifth[64] = {};   // t4, by the low 6 bits
    constexpr T5Tables() {
        for (int byte = 0; byte < 256; byte++) {
            const int q = (byte & 63) % 21 * 4 + (byte >> 6);
            first[byte] = uint8_t(q % 3 | q / 3 % 3 << 2 | q / 9 % 3 << 4 | q / 27 % 3 << 6);
            fifth[byte & 63] = uint8_t((byte & 63) / 21);
        }
    }
};

inline constexpr T5Tables kT5;

}  // namespace bitnet

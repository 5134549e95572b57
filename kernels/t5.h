// T5: five weights t0 .. t4 (0, 1, 2) in a byte. With q = t0 + 3 t1 + 9 t2 + 27 t3 it is t4 << 6 | q where q < 64, and
// 3 << 6 | 3 (q - 64) + t4 for the other 17: t4 stands in place in most bytes, and 6 bits look all the rest up.
#pragma once
#include <cstdint>

namespace bitnet {

constexpr int kNumT5 = 243;  // bytes from here on mean nothing

struct T5Tables {
    uint8_t first[256] = {};  // t0 | t1 << 2 | t2 << 4 | t3 << 6, by the whole byte
    uint8_t fifth[256] = {};  // t4 << 6
    uint8_t pack[256] = {};   // the byte, by q + 81 t4; 243 of them
    constexpr T5Tables() {
        for (int byte = 0; byte < 256; byte++) {
            const int low = byte & 63, q = byte < 192 ? low : (64 + low / 3) % 81;
            first[byte] = uint8_t(q % 3 | q / 3 % 3 << 2 | q / 9 % 3 << 4 | q / 27 % 3 << 6);
            fifth[byte] = uint8_t((byte < 192 ? byte >> 6 : low % 3) << 6);
        }
        for (int q = 0; q < 81; q++)
            for (int t4 = 0; t4 < 3; t4++) pack[q + 81 * t4] = uint8_t(q < 64 ? t4 << 6 | q : 192 + 3 * (q - 64) + t4);
    }
};

inline constexpr T5Tables kT5;

}  // namespace bitnet

// T5: five weights t0 .. t4 (0, 1, 2) in a byte, so that two lookups by six of its bits decode it. Files have another
// byte for them (ternary.py), which becomes this one as it is copied.
//
// The top bits are t4, the other six are the place of t0 .. t3: there are 63, as t0 = 2 with t1 > 0 has none of its
// own. Those weights have 3 in the top bits and the place of others, which differ from them in t0 and t1:
//
//     t4 = 0: those with t0 = 0           t4 = 2, t1 = 1: those with t0 = 0, t1 = 0
//     t4 = 1: those with t0 = 1           t4 = 2, t1 = 2: those with t0 = 1, t1 = 0
//
// Places are so arranged that the upper six bits alone tell t4 and this difference.
#pragma once
#include <cstdint>

namespace bitnet {

constexpr int kNumT5 = 243;  // bytes of a file from here on mean nothing

struct T5Tables {
    uint8_t lower[64] = {};     // t0 | t1 << 2 | t2 << 4 | t3 << 6 of a place, by the lower six bits
    uint8_t upper[64] = {};     // t4 << 6, and what to XOR with t0 | t1 << 2, by the upper six bits
    uint8_t pack[256] = {};     // the byte, by t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4; 243 of them
    uint8_t of_file[256] = {};  // the byte, by that of a file
    uint8_t to_file[256] = {};
    constexpr T5Tables() {
        for (int value = 0; value < kNumT5; value++) {
            const int t0 = value % 3, t1 = value / 3 % 3, rest = value / 9 % 9, t4 = value / 81;
            const bool borrows = t0 == 2 && t1 > 0;
            const int place0 = !borrows ? t0 : t4 < 2 ? t4 : t1 - 1, place1 = borrows && t4 == 2 ? 0 : t1;
            const int byte = (borrows ? 3 : t4) << 6 | place(place0, place1, rest);
            lower[byte & 63] = uint8_t(place0 | place1 << 2 | rest % 3 << 4 | rest / 3 << 6);
            upper[byte >> 2] = uint8_t(t4 << 6 | (place0 ^ t0) | (place1 ^ t1) << 2);
            pack[value] = uint8_t(byte);
            const int q = value % 81, stored = q < 64 ? t4 << 6 | q : 192 + 3 * (q - 64) + t4;
            of_file[stored] = uint8_t(byte);
            to_file[byte] = uint8_t(stored);
        }
    }
    static constexpr int place(int t0, int t1, int rest) {
        constexpr int kGaps[9] = {18, 19, 38, 39, 49, 50, 51, 61, 62};
        if (t0 == 2) return kGaps[rest];
        return t1 == 0 ? 40 + 12 * t0 + rest : 20 * t0 + 9 * (t1 - 1) + rest;
    }
    constexpr uint8_t first_four(uint8_t byte) const { return lower[byte & 63] ^ (upper[byte >> 2] & 15); }
    constexpr uint8_t fifth(uint8_t byte) const { return upper[byte >> 2] >> 6; }
};

inline constexpr T5Tables kT5;

constexpr bool t5_is_sound() {
    for (int value = 0; value < kNumT5; value++) {
        const int four = kT5.first_four(kT5.pack[value]), t4 = kT5.fifth(kT5.pack[value]);
        if (value != (four & 3) + 3 * (four >> 2 & 3) + 9 * (four >> 4 & 3) + 27 * (four >> 6) + 81 * t4) return false;
    }
    return true;
}
static_assert(t5_is_sound());

}  // namespace bitnet

// AVX-512 on AMD: products with weights of -1 and +1, for several tokens. What five or six activations add up to, for
// each choice of signs, is written into tables of 16 bits once for all rows; `vpermw` looks 32 rows up at a time by the
// bits of their weights. One lookup and one addition do five multiply-adds of a row, where `vpdpbusd` does four of
// half as many.
//
// A 32-bit lane of a line is a row, its 16-bit halves are 16 columns each, whose bits are cut into 6, 5 and 5.
#include <immintrin.h>

#include <cstring>

#include "fetch.h"
#include "tile_parts.h"

namespace {

using namespace bitnet;

constexpr int kTile = 8;  // tokens
constexpr int kTables = 4,
              kHalfBytes = kTables * 64;  // of 16 columns of a token: 64 sums by six bits, 32 and 32 by five

// For 32 choices of five signs the first factors of two activations, 2 where their weight is +1 and 0 where it is -1.
// Which bit says so for each: -1, none of them, `all` where the sixth is set.
constexpr int kAll = 8;
struct Bytes64 {
    alignas(64) uint8_t of[64];
    __m512i load() const { return _mm512_load_si512(of); }
};
constexpr Bytes64 choices(int first, int second) {
    Bytes64 bytes{};
    for (int i = 0; i < 32; i++) {
        bytes.of[2 * i] = first >= 0 && i >> first & 1 ? 2 : 0;
        bytes.of[2 * i + 1] = second == kAll || (second >= 0 && i >> second & 1) ? 2 : 0;
    }
    return bytes;
}
constexpr Bytes64 kChoices[7] = {choices(0, 1),  choices(2, 3), choices(4, -1), choices(4, kAll),
                                 choices(-1, 0), choices(1, 2), choices(3, 4)};

// Where the columns of the bits stand among the 32 codes of a line: bit 2 p + 1 of a byte is field p of the first step,
// bit 2 p of the second.
constexpr Bytes64 bit_order() {
    Bytes64 order{};
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 16; i++)
            order.of[16 * half + i] = uint8_t(16 * (1 - i % 2) + 4 * (i % 8 / 2) + 2 * half + i / 8);
    return order;
}
constexpr Bytes64 kBitOrder = bit_order();

// The tables of both halves of a line, of one token whose four codes of each field stand `stride` bytes apart.
BITNET_INLINE void make_tables(const int8_t* codes, int stride, int tokens, uint8_t* tables) {
    int32_t fours[16] = {};
    for (int i = 0; i < 8; i++) std::memcpy(&fours[i], codes + i * stride, 4);
    alignas(64) int16_t pairs[32];
    _mm512_store_si512(pairs, _mm512_permutexvar_epi8(kBitOrder.load(), _mm512_loadu_si512(fours)));
    for (int half = 0; half < 2; half++, tables += tokens * kHalfBytes) {
        const auto sums = [&](int choice, int pair) {
            return _mm512_maddubs_epi16(kChoices[choice].load(), _mm512_set1_epi16(pairs[8 * half + pair]));
        };
        const __m512i four = _mm512_add_epi16(sums(0, 0), sums(1, 1));
        _mm512_store_si512(tables, _mm512_add_epi16(four, sums(2, 2)));
        _mm512_store_si512(tables + 64, _mm512_add_epi16(four, sums(3, 2)));
        _mm512_store_si512(tables + 128, _mm512_add_epi16(_mm512_add_epi16(sums(0, 3), sums(1, 4)), sums(2, 5)));
        _mm512_store_si512(tables + 192, _mm512_add_epi16(_mm512_add_epi16(sums(4, 5), sums(5, 6)), sums(6, 7)));
    }
}

BITNET_INLINE __m512 load_scales(const ScaleLines& scales, int64_t index) {
    return scales.is_half ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(scales.data + 2 * index)))
                          : _mm512_loadu_ps(scales.data + 4 * index);
}

struct Columns {
    int lines, index;           // of the group
    const int32_t* minus_sums;  // of the first token
};

// What stays together: gcc 12 would look up ahead of the additions, and move sums out of the registers.
BITNET_INLINE void add_looked_up(__m512i& sum, const __m512i& index, const __m512i& table) {
    __m512i found;
    asm("vpermw %[table], %[index], %[found]\n\tvpaddw %[found], %[sum], %[sum]"
        : [sum] "+v"(sum), [found] "=&v"(found)
        : [table] "v"(table), [index] "v"(index));
}
BITNET_INLINE void add_looked_up(__m512i& sum, const __m512i& index, const __m512i& low, const __m512i& high) {
    __m512i found;
    asm("vmovdqa64 %[index], %[found]\n\tvpermi2w %[high], %[low], %[found]\n\tvpaddw %[found], %[sum], %[sum]"
        : [sum] "+v"(sum), [found] "=&v"(found)
        : [low] "v"(low), [high] "v"(high), [index] "v"(index));
}

// R groups of rows from `group` on, a group of columns.
template <int T, int R>
BITNET_APART void look_up(const SignsTask& task, const Columns& columns, int group) {
    const uint8_t* w = task.weights + group * task.group_bytes + columns.index * (task.group_steps / 2) * kStepBytes;
    const uint8_t* tables = task.tables;
    float* totals = task.totals + group * T * kGroupRows;
    __m512i sums[R][T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) sums[r][t] = _mm512_set1_epi16(int16_t(columns.minus_sums[t * task.sums_stride]));
    for (int line = 0; line < columns.lines; line++, w += kStepBytes) {
        __m512i halves[2][R];
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) {
            const uint8_t* at = w + r * task.group_bytes;
            fetch_near(at + R * task.group_bytes);
            fetch_near(at + R * task.group_bytes + 64);
            const __m512i x = _mm512_loadu_si512(at), y = _mm512_loadu_si512(at + 64);
            halves[0][r] = _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16));
            halves[1][r] = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512i six[R], five[R], last[R];
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) {
                six[r] = halves[half][r];
                five[r] = _mm512_srli_epi16(six[r], 6);
                last[r] = _mm512_srli_epi16(six[r], 11);
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; t++, tables += kHalfBytes) {
                const __m512i low = _mm512_load_si512(tables), high = _mm512_load_si512(tables + 64),
                              next = _mm512_load_si512(tables + 128), rest = _mm512_load_si512(tables + 192);
                if (half) fetch_near(totals + (line * T + t) * 16);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) add_looked_up(sums[r][t], six[r], low, high);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) add_looked_up(sums[r][t], five[r], next);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) add_looked_up(sums[r][t], last[r], rest);
            }
        }
    }
    const int64_t column_groups = (task.steps + task.group_steps - 1) / task.group_steps;
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        const int64_t at = ((group + r) * column_groups + columns.index) * kGroupRows;
        const __m512 scales[2] = {load_scales(task.scales, at), load_scales(task.scales, at + 16)};
#pragma GCC unroll 8
        for (int t = 0; t < T; t++, totals += kGroupRows) {
            const __m512i rows[2] = {_mm512_srai_epi32(_mm512_slli_epi32(sums[r][t], 16), 16),
                                     _mm512_srai_epi32(sums[r][t], 16)};
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const __m512 before = columns.index ? _mm512_loadu_ps(totals + 16 * h) : _mm512_setzero_ps();
                _mm512_storeu_ps(totals + 16 * h, _mm512_fmadd_ps(_mm512_cvtepi32_ps(rows[h]), scales[h], before));
            }
        }
    }
}

void signs_product(const SignsTask& task) {
    const int stride = 4 * task.tokens, group_lines = task.group_steps / 2, lines = task.steps / 2;
    for (int begin = 0, index = 0; begin < lines; begin += group_lines, index++) {
        const int count = lines - begin < group_lines ? lines - begin : group_lines;
        for (int i = 0; i < count; i++)
            for (int t = 0; t < task.tokens; t++)
                make_tables(task.codes + (begin + i) * 8 * stride + 4 * t, stride, task.tokens,
                            task.tables + (i * 2 * task.tokens + t) * kHalfBytes);
        const Columns columns{count, index, task.minus_sums + index};
        with_count<kTile>(task.tokens, [&](auto t) {
            int group = 0;
            for (; group + 2 <= task.groups; group += 2) look_up<t.value, 2>(task, columns, group);
            if (group < task.groups) look_up<t.value, 1>(task, columns, group);
        });
    }
}

}  // namespace

void bitnet::add_avx512lookups(Kernels& kernels) {
    kernels.signs_product = signs_product;
    kernels.signs_tokens = 3;
    kernels.signs_tile = kTile;
}

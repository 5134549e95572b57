// Products with weights of -1 and +1 with AVX2, for several tokens: what four activations add up to where their bits
// are set, for each of 16 choices, is a table of `vpshufb`, which looks 32 rows up at a time. A sum and 512 more is
// below 1,024: its five low bits and its five high ones have a table each, of which eight add up to a byte.
#pragma once
#include "lanes_avx2.h"
#include "unpacked_avx2.h"
#include "verbs_groups.h"

namespace {

constexpr int kLineTables = 8, kLineTableBytes = kLineTables * 32, kLookupBias = 512;

// The tables of a line of one token whose four codes of each field stand `stride` bytes apart. Bits 2 p + 1 of a byte
// are field p of the first step, bits 2 p that of the second.
inline void make_tables(const int8_t* codes, int stride, uint8_t* tables) {
    alignas(16) int32_t fours[8];
    for (int i = 0; i < 8; i++) std::memcpy(&fours[i], codes + i * stride, 4);
    const __m128i first = _mm_load_si128((const __m128i*)fours), second = _mm_load_si128((const __m128i*)fours + 1);
    alignas(16) int16_t pairs[16];
    _mm_store_si128((__m128i*)pairs, _mm_unpacklo_epi8(second, first));
    _mm_store_si128((__m128i*)pairs + 1, _mm_unpackhi_epi8(second, first));
    const __m256i choice = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i one = _mm256_set1_epi16(1), five = _mm256_set1_epi16(31), bias = _mm256_set1_epi16(kLookupBias);
    const auto bit = [&](int i) { return _mm256_and_si256(_mm256_srli_epi16(choice, i), one); };
    const __m256i low = _mm256_or_si256(bit(0), _mm256_slli_epi16(bit(1), 8));
    const __m256i high = _mm256_or_si256(bit(2), _mm256_slli_epi16(bit(3), 8));
    for (int byte = 0; byte < 4; byte++)
        for (int half = 0; half < 2; half++, tables += 32) {
            const int16_t* at = pairs + 8 * half + byte;
            const __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(low, _mm256_set1_epi16(at[0])),
                                                  _mm256_maddubs_epi16(high, _mm256_set1_epi16(at[4])));
            const __m256i whole = _mm256_add_epi16(sums, bias);
            const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(whole, five), _mm256_srli_epi16(whole, 5));
            _mm256_storeu_si256((__m256i*)tables, _mm256_permute4x64_epi64(bytes, 0xd8));
        }
}

// The indices of a line: of each byte of 32 rows the low four bits, then the high ones. A half of a register has the
// rows 0 to 3, 8 to 11, 16 to 19 and 24 to 27, the other one the rest.
inline void make_indices(const uint8_t* line, __m256i* indices) {
    const __m256i by_byte = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,  //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m256i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm256_shuffle_epi8(load_register(line + 32 * i), by_byte);
    const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpacklo_epi32(x[2], x[3]),
                  c = _mm256_unpackhi_epi32(x[0], x[1]), d = _mm256_unpackhi_epi32(x[2], x[3]);
    const __m256i bytes[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), _mm256_unpacklo_epi64(c, d),
                              _mm256_unpackhi_epi64(c, d)};
    const __m256i four = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        indices[2 * i] = _mm256_and_si256(bytes[i], four);
        indices[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes[i], 4), four);
    }
}

// What stays together: gcc 12 would look all up before it adds anything, and has too few registers for that.
BITNET_INLINE void add_looked_up(__m256i& sum, const __m256i& index, const __m256i& table) {
    __m256i found;
    asm("vpshufb %[index], %[table], %[found]\n\tvpaddb %[found], %[sum], %[sum]"
        : [sum] "+x"(sum), [found] "=&x"(found)
        : [table] "x"(table), [index] "x"(index));
}

BITNET_INLINE __m256i table_at(const uint8_t* table) {
    __m256i both;
    asm("vbroadcasti128 %1, %0" : "=x"(both) : "m"(*(const __m128i*)table));
    return both;
}

constexpr int kMostIndices = 4 * kLineTables;  // of a group of columns

// T tokens whose tables stand `stride` bytes apart, and R groups of rows; sums of 16 rows each, in int16.
template <int T, int R>
BITNET_INLINE void add_lines(const __m256i* indices, const uint8_t* tables, int64_t stride, int lines,
                             __m256i (&sums)[R][T][2]) {
    const __m256i weights = _mm256_set1_epi16(1 + (32 << 8));
    for (int line = 0; line < lines; line++, indices += kLineTables, tables += kLineTableBytes) {
        __m256i low[R][T], high[R][T];
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) low[r][t] = high[r][t] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = 0; i < kLineTables; i++) {
            __m256i index[R];
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) index[r] = indices[r * kMostIndices + i];
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) {
                const uint8_t* table = tables + t * stride + 32 * i;
                const __m256i five = table_at(table), rest = table_at(table + 16);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) {
                    add_looked_up(low[r][t], index[r], five);
                    add_looked_up(high[r][t], index[r], rest);
                }
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) {
                const __m256i first = _mm256_unpacklo_epi8(low[r][t], high[r][t]),
                              last = _mm256_unpackhi_epi8(low[r][t], high[r][t]);
                sums[r][t][0] = _mm256_add_epi16(sums[r][t][0], _mm256_maddubs_epi16(first, weights));
                sums[r][t][1] = _mm256_add_epi16(sums[r][t][1], _mm256_maddubs_epi16(last, weights));
            }
    }
}

// Adds the sums of 16 rows, in the order of `make_indices`, to their totals, or to none.
BITNET_INLINE void add_scaled(__m256i sums, const float* scales, bool is_first, float* totals) {
    const __m256i a = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sums)),
                  b = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sums, 1));
    const __m256i rows[2] = {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
    for (int i = 0; i < 2; i++) {
        const __m256 before = is_first ? _mm256_setzero_ps() : _mm256_loadu_ps(totals + 8 * i);
        _mm256_storeu_ps(totals + 8 * i,
                         _mm256_fmadd_ps(_mm256_cvtepi32_ps(rows[i]), _mm256_loadu_ps(scales + 8 * i), before));
    }
}

// A group of columns of which R groups of rows have indices and scales.
struct Columns {
    int lines, index;
    __m256i indices[2][kMostIndices];
    float scales[2][kGroupRows];
};

// T tokens from `first` on.
template <int T, int R>
BITNET_APART void look_up(const SignsTask& task, const Columns& columns, int first, float* totals) {
    const int64_t stride = columns.lines * kLineTableBytes;
    const int32_t* minus_sums = task.minus_sums + first * task.sums_stride + columns.index;
    __m256i sums[R][T][2];
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) sums[r][t][0] = sums[r][t][1] = _mm256_setzero_si256();
    add_lines<T, R>(columns.indices[0], task.tables + first * stride, stride, columns.lines, sums);
    for (int t = 0; t < T; t++) {
        // Twice the set bits, less all of them; what does not fit into 16 bits meanwhile does in the end.
        const int offset = minus_sums[t * task.sums_stride] - 2 * kLookupBias * kLineTables * columns.lines;
        const __m256i offsets = _mm256_set1_epi16(int16_t(offset));
        for (int r = 0; r < R; r++)
            for (int h = 0; h < 2; h++)
                add_scaled(_mm256_add_epi16(_mm256_add_epi16(sums[r][t][h], sums[r][t][h]), offsets),
                           columns.scales[r] + 16 * h, columns.index == 0,
                           totals + (r * task.tokens + first + t) * kGroupRows + 16 * h);
    }
}

// R groups of rows from `group` on.
template <int R>
BITNET_INLINE void look_up_rows(const SignsTask& task, Columns& columns, int group) {
    const int64_t column_groups = (task.steps + task.group_steps - 1) / task.group_steps;
    const uint8_t* w = task.weights + group * task.group_bytes + columns.index * (task.group_steps / 2) * kStepBytes;
    float* totals = task.totals + group * task.tokens * kGroupRows;
    for (int r = 0; r < R; r++, w += task.group_bytes) {
        for (int i = 0; i < columns.lines; i++) {
            fetch_near(w + R * task.group_bytes + i * kStepBytes);
            fetch_near(w + R * task.group_bytes + i * kStepBytes + 64);
            make_indices(w + i * kStepBytes, columns.indices[r] + i * kLineTables);
        }
        for (int i = 0; i < kGroupRows; i += 16)
            store(columns.scales[r] + i,
                  load_scales(task.scales, ((group + r) * column_groups + columns.index) * kGroupRows + i));
    }
    int t = 0;
    for (; t + 2 <= task.tokens; t += 2) look_up<2, R>(task, columns, t, totals);
    if (t < task.tokens) look_up<1, R>(task, columns, t, totals);
}

void signs_product(const SignsTask& task) {
    const int stride = 4 * task.tokens, group_lines = task.group_steps / 2, lines = task.steps / 2;
    Columns columns;
    columns.index = 0;
    for (int begin = 0; begin < lines; begin += group_lines, columns.index++) {
        columns.lines = lines - begin < group_lines ? lines - begin : group_lines;
        for (int t = 0; t < task.tokens; t++)
            for (int i = 0; i < columns.lines; i++)
                make_tables(task.codes + (begin + i) * 8 * stride + 4 * t, stride,
                            task.tables + (t * columns.lines + i) * kLineTableBytes);
        int group = 0;
        for (; group + 2 <= task.groups; group += 2) look_up_rows<2>(task, columns, group);
        if (group < task.groups) look_up_rows<1>(task, columns, group);
    }
}

}  // namespace

// The border between the executor and the instruction sets: one table of functions for each of them.
//
// Every function works on one unit of work in one thread. Integer results are equal on every path because they are
// exact; float results are equal to the bit because every path runs the same source (verbs.h) over the same 16 lanes.
#pragma once
#include <cstdint>

// What the inner loops are made of: gcc must not decide against inlining it.
#define BITNET_INLINE inline __attribute__((always_inline))
// What must not be inlined: in larger functions gcc 12 moves sums about between registers.
#define BITNET_APART __attribute__((noinline))

namespace bitnet {

enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };  // i8 in caches and tables of embeddings
// gelu by its tanh form
// silu7: silu of a gate of at most 7, for an `up` that is cut at -7 and 7.
enum class Activation : int { none = 0, relu2 = 1, silu = 2, gelu = 3, silu7 = 4 };

// U2 layout (ternary.py): groups of 32 rows, steps of 16 columns, 128 bytes a step.
constexpr int kGroupRows = 32;
constexpr int kStepColumns = 16;
constexpr int kStepBytes = 128;
// One bit a weight, for -1 and +1 alone: of a byte the high bits are the U2 codes 0 and 2 of a step, those below them
// of the next.
//
// T5 layout: groups of 32 rows and steps of 128 bytes as in U2, five fields a byte, in blocks of four steps and 80
// columns. The fifth fields are the columns behind those of all other fields: B blocks are 5 B steps of U2.
constexpr int kBlockColumns = 80;
constexpr int kBlockBytes = 512;
constexpr int kBlockSteps = 5;
// The quantised head (quantised_head.h): tiles of 16 rows, steps of 16 columns.
constexpr int kHeadRows = 16;
constexpr int kHeadBytes6 = 192, kHeadBytes2 = 64, kHeadTaskVectors = 32;
constexpr int kMaxTileTokens = 12;
// |sum| <= 192 * 127 * columns / 4 must stay inside int32 in the masked kernels.
constexpr int64_t kMaxColumns = 262144;

// Paged KV cache. Everything is tiles of 16 lanes x 2: a key tile holds 16 positions of 2 neighbouring features, a
// value tile 16 features of 2 neighbouring positions.
// int8 has a scale for each token and head, behind the tiles of its block: of 32 keys, then of 32 values.
constexpr int kBlockTokens = 32;
constexpr int kSegmentTokens = 256;
constexpr int kQueries = 32;                    // of a key head that attention does at once, at most
constexpr int kNearQueries = 8 * kQueries;      // and one after the other while they find a segment in a near cache
constexpr int kScoreRow = kSegmentTokens + 32;  // floats of a query's scores of a segment, which it may write behind

// One row: optional gate (activation(gate) * up), optional RMSNorm, then float32 or int8 codes.
struct RowTask {
    const float* x;       // [width]; the gate where `up` is given
    const float* up;      // [width] or null
    const float* weight;  // [width] or null: no norm
    float eps;
    Activation activation;
    int width;
    float* scratch;    // [width rounded up to 16]
    float* out;        // [width] float32 result, or null
    int8_t* codes;     // int8 result, or null
    int padded_width;  // codes up to here are written, zero beyond width
    float* inverse_scale;
    int32_t* code_sum;
};

// One or two groups of 32 rows and any number of tokens, whose codes stand one token after the other, at best on
// boundaries of 64 bytes. Codes are read for tokens up to the next multiple of 16, and 48 bytes beyond the last; acc is
// written for as many.
struct MatrixTask {
    const uint8_t* weights;  // steps of 128 bytes, one group behind the other
    bool is_t5;
    int groups, steps;
    const int8_t* codes;
    int64_t code_stride;
    int tokens;
    int32_t* acc;  // [groups][acc_tokens][32]
    int acc_tokens;
    // [tokens, out_stride]: where the sums will go, a group 32 floats behind the other, or null.
    const float* out = nullptr;
    int64_t out_stride = 0;
};
constexpr int kMatrixTile = 16;   // tokens
constexpr int kMatrixTokens = 4;  // from so many tokens on, or more: Program::matrix_tokens

// One group of 32 rows and any number of tokens, in `tiles` tiles of up to many_tile as for ternary_tile, cut as evenly
// as possible, of which those from first_tile to last_tile - 1 are multiplied. offsets and lists are what pair_row says
// of each token.
struct ManyTask {
    const uint8_t* weights;
    bool is_t5;
    int steps;  // U2 steps; of T5 what its blocks would be expanded
    const int8_t* codes;
    int64_t padded;  // bytes of a token's codes
    int tokens, tiles, first_tile, last_tile;
    const int32_t* offsets;
    const uint16_t* lists;       // [tokens][kPairList + 1]
    int32_t* acc;                // [tokens][32]
    const float* out = nullptr;  // [tokens, out_stride]: where the sums will go, or null
    int64_t out_stride = 0;
};
constexpr int kPairList = 15;
constexpr uint16_t kNegated = 1 << 15;

// Scales of 32 rows for one group of columns after the other, as float32 or float16.
struct ScaleLines {
    const uint8_t* data;
    bool is_half;
};

// One group of 32 rows with a scale for every `group_steps` steps of columns, and up to 12 interleaved tokens.
struct GroupTask {
    const uint8_t* weights;  // U2 steps, or where they have one bit, half as many lines of two steps
    bool one_bit;
    ScaleLines scales;  // [column groups][32]
    int steps, group_steps, tokens;
    const int8_t* codes;
    const int32_t* minus_sums;  // what group_sums says of each token, `sums_stride` apart
    int64_t sums_stride;
    float* totals;  // [tokens][32]
};

// Some such groups of one bit and up to signs_tile interleaved tokens.
struct SignsTask {
    const uint8_t* weights;
    int64_t group_bytes;
    ScaleLines scales;  // [groups][column groups][32]
    int groups, steps, group_steps, tokens;
    const int8_t* codes;
    const int32_t* minus_sums;
    int64_t sums_stride;
    uint8_t* tables;  // kSignsTableBytes, on a boundary of 64
    float* totals;    // [groups][tokens][32]
};
constexpr int kSignsTableBytes = kMaxTileTokens * 128 * 16;

// A row of such a group as floats.
struct GroupRowTask {
    const uint8_t* weights;
    bool one_bit;
    ScaleLines scales;
    int row, group_steps, columns;
    float* out;
};

struct DenseTask {
    const void* weight;  // [rows, columns] row-major
    Dtype dtype;
    int64_t rows;
    int columns;
    const float* x;  // [tokens, x_stride]
    int64_t x_stride;
    int tokens;
    float* out;  // [tokens, out_stride]
    int64_t out_stride;
    const float* residual;  // [tokens, residual_stride] or null
    int64_t residual_stride;
    const int32_t* row_ids;  // of one token: which rows, in any order; null: all, from the first on
};

// All sizes in bytes. Plain fields: an inline function here would be linked once for all objects, with the instructions
// of whichever was compiled for the newest machine.
struct CacheLayout {
    Dtype dtype;  // bf16, f32 or i8
    int num_kv_heads, head_dim;
    int padded_dim;  // head_dim rounded up to 16
    int64_t key_bytes, head_bytes, block_bytes;
    int64_t block_stride;  // from a block of a layer to the next one
};
CacheLayout cache_layout(Dtype dtype, int num_kv_heads, int head_dim);
int64_t attend_scratch_floats(int padded_dim);

// One key-value head with the query heads that share it, and tokens of one sequence.
struct AttendTask {
    CacheLayout layout;
    const uint8_t* cache;  // the layer's blocks
    const int32_t* blocks;
    const uint8_t* next;  // what is read behind all of these: the first keys and values of another task
    int tokens;
    const int32_t* positions;  // of the tokens, ascending: each attends to all up to its own
    int window;                // or only to the last so many of these; 0: to all
    int kv_head;
    int num_heads;   // query heads in the group
    const float* q;  // [tokens, q_stride], of which the group has [num_heads, head_dim]
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    float scale;
    float* scratch;  // attend_scratch_floats
    // Where not null, `attend` does one segment of one token only and leaves here what that gives; `attend_merge` makes
    // `out` of all segments. Each has piece_floats: padded_dim a query head, then two a query head.
    float* pieces;
    int64_t piece_floats;
    int segment;
};

// An input of a quantised head: a and b (quantised_head.h), what its codes h and l add up to, and c, f and r
// (screen.h), which are no numbers where it is not finite.
struct HeadInput {
    float high, low;
    int32_t high_total, low_total;
    float error_factor, size_factor, rounding;
};
// 16 rows of a quantised head and some inputs, whose scores are half_scale * (high * H + low * L): H is the sum of h
// times 2^shift, less `offset` times its total, and L is that of l. `sums` is [inputs][vectors_each][16], h before l if
// any. Where scales are in them already, scaled_sums [inputs][vectors_each][32] are H and L, without half_scale.
struct HeadScores {
    const float* half_scale;
    const HeadInput* inputs;
    int count;
    const int32_t* sums;
    int vectors_each, shift;
    uint32_t offset;
    const float* scaled_sums = nullptr;
};
struct HeadErrors {  // |d| and |s q| of each row
    const float *error, *size;
};
// For each input 16 ends of each kind, and the largest upper one, infinite where one is no number.
struct HeadEnds {
    float* upper;
    int64_t upper_stride;
    float* most;
    int64_t most_stride;
    float* lower;        // [inputs][16]
    const float* least;  // of each input, for the result
};
// One or two tiles of 16 rows of a quantised head, and vectors of activations.
struct HeadTask {
    const uint8_t *weights6, *weights2;  // to a matrix product null where the high 6 bits are all
    int tiles, steps;
    const int8_t* codes;
    int64_t code_stride;  // of a matrix: up to 32 vectors, one after the other, padded to steps of 64 columns
    int vectors;          // else up to head_vectors, interleaved: [steps * 4][vectors][4]
    int32_t* acc;         // [tiles][32][16]
};

struct Kernels {
    const char* name;
    // acc[token][32] = sum over columns of code * activation, for one group of 32 rows and up to 12 tokens.
    void (*ternary_tile)(const uint8_t* weights, const int8_t* codes, int steps, int tokens, int32_t* acc);
    // out[t][r] = residual[t][r] + (acc[t][r] - code_sum[t]) * (scales[r] * inverse_scale[t])
    void (*ternary_store)(const int32_t* acc, int tokens, int rows, const float* scales, const float* inverse_scale,
                          const int32_t* code_sum, float* out, int64_t out_stride, const float* residual,
                          int64_t residual_stride);
    // Where groups of columns have scales: totals[t][r] = the fused multiply-adds, in ascending order of the groups, of
    // (the sum of code * activation over the group + minus_sums[t][group]) * scale[group][r] to 0.
    void (*group_tile)(const GroupTask& task);
    // The same for several groups whose weights are -1 and +1, from signs_tokens on; null where it is no faster.
    void (*signs_product)(const SignsTask& task);
    int signs_tokens, signs_tile;  // which is no less than the tiles that a step has
    // The same for sums of one group that are known: acc[token][32] is added to totals[token][32].
    void (*group_add)(const int32_t* acc, int tokens, const ScaleLines& scales, const int32_t* minus_sums,
                      int64_t sums_stride, float* totals);
    // out[t][r] = residual[t][r] + totals[t][r] * inverse_scale[t]
    void (*group_store)(const float* totals, int tokens, int rows, const float* inverse_scale, float* out,
                        int64_t out_stride, const float* residual, int64_t residual_stride);
    // minus_sums[group] = - the sum of one token's codes, of which every four stand 4 * lane_stride bytes apart.
    void (*group_sums)(const int8_t* codes, int lane_stride, int steps, int group_steps, int32_t* minus_sums);
    void (*group_row)(const GroupRowTask& task);
    void (*embed)(const void* row, Dtype dtype, int width, float* out);
    void (*row)(const RowTask& task);
    void (*dense)(const DenseTask& task);
    void (*rope)(float* x, int num_heads, int head_dim, int half, const float* cosine, const float* sine);
    void (*cache_write)(const CacheLayout& layout, uint8_t* block, int offset, const float* k, const float* v);
    void (*attend)(const AttendTask& task);  // in FloatMode::flushing, and attend_merge too
    void (*attend_merge)(const AttendTask& task);
    void (*add)(const float* x, const float* y, int64_t n, float* out);
    // acc[tile][vector][row] = sum over columns of activation * the low 2, the high 6 bits, or all 8 bits of a code.
    void (*head_sums2)(const HeadTask& task);
    void (*head_sums6)(const HeadTask& task);
    void (*head_sums8)(const HeadTask& task);
    bool whole_bytes;  // whether all 8 bits take one product, not two
    int head_vectors;  // that these take at most, whose sums fit into registers
    int rough_inputs;  // of a screen: from so many on these take longer than the rows that half of their codes leave
    void (*head_scores)(const HeadScores& task, float* scores);  // [inputs][16]
    // Both ends of the interval that holds each exact logit. Returns for which inputs a lower end is above `least`, as
    // bits.
    uint32_t (*head_bounds)(const HeadScores& task, const HeadErrors& errors, const HeadEnds& ends);
    // Upper ends that head_bounds gave for 6 bits become those for 8, by the scores of the low 2 alone, of one input;
    // what is infinite or no number stays.
    void (*head_refine)(const HeadScores& low, const HeadErrors& of6, const HeadErrors& of8, float* upper);
    // ternary_tile of the T5 blocks of one group; null where they are expanded first.
    void (*block_tile)(const uint8_t* blocks, const int8_t* codes, int num_blocks, int tokens, int32_t* acc);
    // ternary_tile for many tokens, from many_tokens on, whose weights are unpacked once; null where that is no faster.
    // T5 only where there is block_tile.
    void (*many_product)(const ManyTask& task);
    int many_tokens, many_tile;
    // Where it multiplies two weights and two activations at a time, what one token's codes add to each of its sums;
    // and how many of its pairs have a factor that is no byte, of which up to kPairList are listed. Fewer do if the
    // codes may become their negatives, which the product then knows by kNegated in list[0]. Null elsewhere.
    void (*pair_row)(int8_t* codes, int padded, bool may_negate, int32_t* offset, uint16_t* list);
    // acc[token][32] for many tokens at once, T5 only where there is block_tile; null where ternary_tile is the way.
    void (*matrix_product)(const MatrixTask& task);
    void (*head_matrix)(const HeadTask& task);  // 6 or 8 bits, of a matrix; null where there is no matrix_product
    // Multiply-adds of int8 as fast as this path can, from registers; returns how many were done.
    int64_t (*int8_peak)(int64_t iterations);
    int64_t cost_of_help;  // multiply-adds below which other threads cost more than they bring: some 0.1 ms of one core
    // Reads whole kibibytes as fast as this path can, and returns something that depends on all of them.
    uint64_t (*read_memory)(const uint8_t* data, int64_t bytes);
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();  // null where this build has no such path
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
void add_avx512vbmi(Kernels& kernels);     // the T5 functions, to a table of AVX-512
void add_avx512pairs(Kernels& kernels);    // products in pairs, on AMD
void add_avx512lookups(Kernels& kernels);  // products with signs, on AMD
void add_avx512bf16(Kernels& kernels);     // attention by products of two bfloat16, on AMD
void add_avx512amx(Kernels& kernels);      // the matrix product, and the name of a path of its own
void add_avx512amx_attention(Kernels& kernels);
const Kernels* neon_kernels();

// The names of the paths that this machine can run, best first. `find` returns null for any other.
const Kernels* const* available_kernels(int* count);
const Kernels* find_kernels(const char* name);
// How this processor is best read ahead, known with its kernels: see fetch.h. It `reads_on` by itself, and faster so,
// where little is computed of a single stream.
extern bool fetches_in_order, fetches_near, reads_on;

}  // namespace bitnet

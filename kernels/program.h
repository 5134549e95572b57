// A Plan: a straight list of steps over one arena, and what these read and write.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kernels.h"
#include "portions.h"
#include "weights.h"

namespace bitnet {

class Program;
class QuantisedHead;

// Widths are ints in the kernels; what a token takes, times kMaxTokens (executor.cpp), stays inside int64.
constexpr int64_t kMaxWidth = 1 << 30, kMaxArena = int64_t(1) << 36;

inline int64_t whole_lines(int64_t floats) { return (floats + 15) / 16 * 16; }

// Rows of float32 in the arena, in the caller's input or in the caller's output: `width` columns from `column` of
// rows `stride` floats apart. Offsets in the arena are in floats a token, so that a plan is laid out once for any T.
enum class Base : int { arena = 0, input = 1, output = 2 };
struct Rows {
    Base base;
    int64_t offset, stride, column, width;
};

// Int8 codes of T tokens of `padded` columns, packed in tiles of tokens, with a scale, a sum, and an offset and a list
// of pairs a token, in the arena.
struct Codes {
    int64_t offset, padded;
    int64_t floats() const { return padded / 4 + 3 + (kPairList + 1) / 2; }
};

// Which products take some codes: ternary ones with one scale, or others.
struct CodesUse {
    bool in_ternary = false, elsewhere = false;
};

// A block has all layers, one behind the other. So a text takes its memory from the system little by little: with the
// blocks of a layer side by side, one token in some hundreds is the first in a huge page of every layer, and its step
// waits until those are zeroed.
class Cache {
  public:
    Cache(CacheLayout layout, int64_t num_layers);
    Cache(const Cache&) = delete;
    Cache& operator=(const Cache&) = delete;
    ~Cache();
    // Zeroed blocks; after std::bad_alloc there are none.
    void reserve(int64_t num_blocks);
    void copy(int64_t from, int64_t to);
    const CacheLayout& layout() const { return layout_; }
    int64_t num_layers() const { return num_layers_; }
    int64_t num_blocks() const { return num_blocks_; }
    int64_t untouched_bytes() const;                                                              // as of Memory
    int64_t block_bytes() const { return layout_.block_stride; }                                  // of all layers
    uint8_t* layer(int64_t index) const { return memory_.data() + index * layout_.block_bytes; }  // in the first block
    // Held by whoever reads, writes or replaces the blocks. Throws std::invalid_argument in another process than the
    // one that made it: there it may be held for ever.
    std::unique_lock<std::mutex> lock() const;

  private:
    HomeMutex mutex_{"a cache"};
    CacheLayout layout_;
    int64_t num_layers_, num_blocks_ = 0;
    Memory memory_;
};

// So much of the memory that caches of this process, but one, have reserved is still free for whoever asks the system,
// because they have not written to it yet.
int64_t promised_bytes(const Cache* but);

struct Context {
    const Kernels& kernels;
    int64_t num_tokens;
    int64_t tile_tokens;  // codes of so many tokens are interleaved
    float* arena;
    const float* input;
    float* output;
    const Batch* batch;                     // of no arrays but starts in programs that work on rows alone
    const std::vector<int32_t>& sequences;  // the sequence of each token
    std::span<const Memory> scratch;        // of each thread that works on it
    // Into so many segments attention to a key head is cut, where there are few tokens for many threads; else 1. Of
    // each token and key head: what the segments give, and how many of them are done.
    int64_t segments;
    float* pieces;
    std::atomic<int32_t>* num_done;

    float* at(const Rows& rows, int64_t token) const;
    float* scratch_of(int thread) const { return reinterpret_cast<float*>(scratch[size_t(thread)].data()); }
    int8_t* codes(const Codes& codes) const { return reinterpret_cast<int8_t*>(arena + codes.offset * num_tokens); }
    float* scales(const Codes& c) const { return reinterpret_cast<float*>(codes(c) + c.padded * num_tokens); }
    int32_t* sums(const Codes& c) const { return reinterpret_cast<int32_t*>(scales(c) + num_tokens); }
    int32_t* pair_offsets(const Codes& c) const { return sums(c) + num_tokens; }
    uint16_t* pair_list(const Codes& c, int64_t token) const {
        return reinterpret_cast<uint16_t*>(pair_offsets(c) + num_tokens) + token * (kPairList + 1);
    }
};

// Whether products of so many tokens unpack weights once for all of them.
inline bool are_many(const Kernels& kernels, int64_t num_tokens) {
    return kernels.many_product && num_tokens >= kernels.many_tokens;
}

// Threads that do not meet on the way are worth waking for a fraction of the work.
constexpr int64_t kWorthApart = 4;

// About this many bytes of weights a chunk: long sequential reads, and little left to wait for at the end.
constexpr int64_t kChunkBytes = 65536;

class Step {
  public:
    virtual ~Step() = default;
    virtual int64_t units(const Context& context) const { return context.num_tokens; }
    virtual int64_t chunk(const Context&) const { return 1; }
    // What a thread needs for `num_tokens` tokens beside the arena.
    virtual int64_t scratch_floats(int64_t num_tokens) const {
        (void)num_tokens;
        return 0;
    }
    virtual void work(const Context& context, int64_t first, int64_t last, int thread) const = 0;
    // What is left to do, a unit at a time, once all threads have done the work.
    virtual int64_t units_behind(const Context&) const { return 0; }
    virtual void work_behind(const Context&, int64_t) const {}
};

// The tokens of a step are cut into tiles of at most `tile_tokens`, as evenly as possible.
struct Tiles {
    int64_t num_tokens, count;
    explicit Tiles(const Context& c)
        : num_tokens(c.num_tokens), count((c.num_tokens + c.tile_tokens - 1) / c.tile_tokens) {}
    int64_t begin(int64_t tile) const { return num_tokens * tile / count; }
    int64_t of(int64_t token) const { return ((token + 1) * count - 1) / num_tokens; }
};

struct RowsStep {  // what `Program::rows_to_floats` and `rows_to_codes` do to each row
    Rows x;
    const Rows* up;
    Activation activation;
    const float* norm;
    float eps;
    int64_t parts = 1;  // of a row, each normed on its own
};

// Programs from rows of their input to as many of their output, all with as many steps, which outlive this. A row of x
// goes through the `used` of them that its scores are best for; their outputs are added up by shares, the softmax of
// all scores, or of these alone.
struct Mixture {
    std::vector<const Program*> experts;
    Rows x, scores, out;
    int64_t used;
    bool renormalized;
};

class Program {
    struct Written {
        Codes codes;
        int64_t width;  // of the row behind them
        std::shared_ptr<CodesUse> use;
    };

  public:
    explicit Program(int64_t arena_floats);
    Program(const Program&) = delete;

    // `row_scales`: what the rows of an int8 table are multiplied by.
    void embed(const DenseWeight* table, Rows out, float scale = 1.0f, const float* row_scales = nullptr);
    void rotations(std::vector<float> inverse_frequencies, Rows out);
    void rows_to_floats(RowsStep step, Rows out);
    void rows_to_codes(RowsStep step, Codes out);
    void ternary(const TernaryWeight* weight, Codes x, Rows out, const Rows* residual);
    void dense(const DenseWeight* weight, Rows x, Rows out, const Rows* residual);
    // A matrix of 8 bits; its scores for codes, that is.
    void int8(const QuantisedHead* weight, Codes x, Rows out, const Rows* residual);
    void rope_write(const Cache* cache, int64_t layer, Rows q, Rows k, Rows v, Rows rotations);
    void attend(const Cache* cache, int64_t layer, Rows q, Rows out, float scale, int64_t window = 0);
    void add(Rows x, Rows y, Rows out);
    void mix(const Mixture& mixture);
    // x + bias in every row; there are as many as columns.
    void bias(Rows x, const float* bias, Rows out);
    // From here on only the wanted tokens of a batch go on, with these rows; once. What takes ids or slots comes
    // before.
    void select(std::vector<Rows> kept);

    int64_t arena_floats() const { return arena_floats_ + own_floats_; }
    int64_t scratch_floats(int64_t num_tokens) const;
    // Bytes of codes that a matrix product may read behind those of the last token.
    int64_t slack_bytes() const { return kMatrixTile * max_padded_ + 64; }
    const std::vector<std::unique_ptr<Step>>& steps() const { return steps_; }
    int64_t input_width() const { return input_width_; }
    int64_t output_width() const { return output_width_; }
    int64_t vocab_size() const { return vocab_size_; }
    int64_t cost() const { return cost_; }           // multiply-adds a token, but for attention
    bool takes_int8() const { return takes_int8_; }  // products of 8 bits
    // From so many tokens on, products of matrices are faster than tiles.
    int64_t matrix_tokens() const { return matrix_tokens_; }
    const Cache* cache() const { return cache_; }
    bool needs_batch() const { return needs_batch_; }
    size_t select_at() const { return select_at_; }         // the step that does it; behind all: none
    int64_t piece_floats() const { return piece_floats_; }  // of a token, of all key heads, of a segment
    // No step can be added from now on.
    void seal() { sealed_ = true; }

  private:
    void push(std::unique_ptr<Step> step);
    void check(const Rows& rows, int64_t width);
    void check_written(const Rows& rows, int64_t width);
    void check(const Codes& codes, int64_t columns);
    CodesUse& source(const Codes& codes, int64_t columns) const;
    void check(const RowsStep& step, int64_t width);
    void use(const Cache* cache, int64_t layer);
    void require_all_tokens() const;

    int64_t arena_floats_, own_floats_ = 0;  // a token; what steps need for themselves stands behind all others
    int64_t input_width_ = 0, output_width_ = 0, vocab_size_ = 0, cost_ = 0, max_padded_ = 0, piece_floats_ = 0;
    int64_t matrix_tokens_ = kMatrixTokens;
    const Cache* cache_ = nullptr;
    size_t select_at_ = size_t(-1);
    std::vector<Written> codes_;
    bool takes_int8_ = false, needs_batch_ = false, is_mixture_ = false, sealed_ = false;
    std::vector<std::unique_ptr<Step>> steps_;
};

// So many codes are interleaved for products of so many tokens, at most; 1 for those of matrices.
inline int64_t tile_tokens(const Kernels& kernels, const Program& program, int64_t num_tokens) {
    if (kernels.matrix_product && num_tokens >= program.matrix_tokens()) return 1;
    const int64_t many = are_many(kernels, num_tokens) ? kernels.many_tile : kMaxTileTokens;
    return program.takes_int8() ? std::min<int64_t>(many, kernels.head_vectors) : many;
}

}  // namespace bitnet

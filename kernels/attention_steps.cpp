// The steps that write the cache and attend to it.
#include "attention_steps.h"

#include <algorithm>

#include "float_mode.h"

namespace bitnet {

namespace {

struct RopeWriteStep final : Step {
    const Cache* cache;
    int64_t layer;
    Rows q, k, v, angles;
    RopeWriteStep(const Cache* ca, int64_t l, Rows q_, Rows k_, Rows v_, Rows a)
        : cache(ca), layer(l), q(q_), k(k_), v(v_), angles(a) {}
    void work(const Context& c, int64_t first, int64_t last, int) const override {
        const CacheLayout& layout = cache->layout();
        const int dim = layout.head_dim, half = int(angles.width / 2);
        for (int64_t t = first; t < last; t++) {
            const float *cosine = c.at(angles, t), *sine = cosine + half;
            c.kernels.rope(c.at(q, t), int(q.width / dim), dim, half, cosine, sine);
            c.kernels.rope(c.at(k, t), layout.num_kv_heads, dim, half, cosine, sine);
            const int32_t slot = c.batch->slots[t];
            uint8_t* block = cache->layer(layer) + slot / kBlockTokens * layout.block_stride;
            c.kernels.cache_write(layout, block, slot % kBlockTokens, c.at(k, t), c.at(v, t));
        }
    }
};

int64_t piece_floats(const CacheLayout& layout, int64_t heads) {
    return (heads * (layout.padded_dim + 2) + 15) / 16 * 16;
}

struct AttendStep final : Step {
    const Cache* cache;
    int64_t layer;
    Rows q, out;
    float scale;
    int window;
    AttendStep(const Cache* ca, int64_t l, Rows q_, Rows o, float s, int w)
        : cache(ca), layer(l), q(q_), out(o), scale(s), window(w) {}
    // All parts of the tokens with one head, then with the next: neighbours read the same keys and values. Or all
    // segments of each token with each head.
    int64_t units(const Context& c) const override {
        return cache->layout().num_kv_heads * (c.segments > 1 ? c.num_tokens * c.segments : parts(c));
    }
    // So many tokens of which all queries go together.
    int64_t together() const { return std::max<int64_t>(1, kQueries / heads()); }
    // As many find what they read in a near cache as are of one sequence.
    int64_t parts(const Context& c) const {
        const int64_t even = c.num_tokens * cache->layout().num_kv_heads / int64_t(4 * c.scratch.size());
        const int64_t near = std::min(kNearQueries / heads(), c.num_tokens / c.batch->num_sequences);
        const int64_t each = std::max<int64_t>(1, std::min(even, std::max(near, together())));
        return (c.num_tokens + each - 1) / each;
    }
    // The first token of a part: where as many queries as go together are whole, unless there are too few.
    int64_t begin(const Context& c, int64_t part) const {
        const int64_t num_parts = parts(c), even = c.num_tokens * part / num_parts;
        const bool stays = part == num_parts || c.num_tokens / num_parts < together();
        return stays ? even : (even + together() / 2) / together() * together();
    }
    int64_t scratch_floats(int64_t) const override { return attend_scratch_floats(cache->layout().padded_dim); }
    int64_t heads() const { return q.width / cache->layout().head_dim / cache->layout().num_kv_heads; }
    void work(const Context& c, int64_t first, int64_t last, int thread) const override {
        const FloatMode mode(FloatMode::flushing);
        for (int64_t unit = first; unit < last; unit++)
            c.segments > 1 ? attend_piece(c, unit, thread) : attend_part(c, unit, thread);
    }
    void attend_part(const Context& c, int64_t unit, int thread) const {
        const int64_t head = unit / parts(c), part = unit % parts(c), end = begin(c, part + 1);
        for (int64_t t = begin(c, part), count; t < end; t += count) {
            count = std::min(end, int64_t(c.batch->starts[c.sequences[size_t(t)] + 1])) - t;
            c.kernels.attend(task(c, head * c.num_tokens + t, count, thread));
        }
    }
    void attend_piece(const Context& c, int64_t unit, int thread) const {
        const int64_t pair = unit / c.segments, floats = piece_floats(cache->layout(), heads());
        AttendTask piece = task(c, pair, 1, thread);
        piece.pieces = c.pieces + pair * c.segments * floats;
        piece.piece_floats = floats;
        piece.segment = int(unit % c.segments);
        if (sees(c, pair % c.num_tokens, piece.segment)) c.kernels.attend(piece);
        if (c.num_done[pair].fetch_add(1, std::memory_order_acq_rel) + 1 < c.segments) return;
        c.num_done[pair].store(0, std::memory_order_relaxed);  // before the next barrier
        c.kernels.attend_merge(piece);
    }
    // The first position that a token attends to.
    int64_t first_of(const Context& c, int64_t t) const {
        return window ? std::max<int64_t>(0, c.batch->positions[t] + 1 - window) : 0;
    }
    // Whether a token attends to any of a segment: others are those of longer sequences, or before its window.
    bool sees(const Context& c, int64_t t, int64_t segment) const {
        return segment >= first_of(c, t) / kSegmentTokens && segment <= c.batch->positions[t] / kSegmentTokens;
    }
    // The first keys and values that a token with a head reads.
    const uint8_t* first_block(const Context& c, int64_t pair) const {
        const CacheLayout& layout = cache->layout();
        const int64_t t = pair % c.num_tokens, head = pair / c.num_tokens, first = first_of(c, t);
        const int32_t* blocks = c.batch->block_tables + c.sequences[size_t(t)] * c.batch->table_width;
        return cache->layer(layer) + blocks[first / kBlockTokens] * layout.block_stride + head * layout.head_bytes;
    }
    AttendTask task(const Context& c, int64_t pair, int64_t count, int thread) const {
        const CacheLayout& layout = cache->layout();
        const int64_t head = pair / c.num_tokens, t = pair % c.num_tokens;
        const int64_t column = head * heads() * layout.head_dim;
        AttendTask task{};
        task.layout = layout;
        task.cache = cache->layer(layer);
        task.blocks = c.batch->block_tables + c.sequences[size_t(t)] * c.batch->table_width;
        task.next = first_block(c, std::min(pair + count, c.num_tokens * layout.num_kv_heads - 1));
        task.tokens = int(count);
        task.positions = c.batch->positions + t;
        task.window = window;
        task.kv_head = int(head);
        task.num_heads = int(heads());
        task.q = c.at(q, t) + column;
        task.q_stride = q.stride;
        task.out = c.at(out, t) + column;
        task.out_stride = out.stride;
        task.scale = scale;
        task.scratch = c.scratch_of(thread);
        return task;
    }
};

}  // namespace

std::unique_ptr<Step> rope_write_step(const Cache* cache, int64_t layer, Rows q, Rows k, Rows v, Rows rotations) {
    return std::make_unique<RopeWriteStep>(cache, layer, q, k, v, rotations);
}

std::unique_ptr<Step> attend_step(const Cache* cache, int64_t layer, Rows q, Rows out, float scale, int window) {
    return std::make_unique<AttendStep>(cache, layer, q, out, scale, window);
}

int64_t attend_piece_floats(const CacheLayout& layout, int64_t width) {
    return layout.num_kv_heads * piece_floats(layout, width / layout.head_dim / layout.num_kv_heads);
}

}  // namespace bitnet

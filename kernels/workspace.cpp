#include "workspace.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

namespace bitnet {

namespace {

// What keeps every product of sizes inside int64, and units inside the 32 bits that Shares has for them.
constexpr int64_t kMaxTokens = 1 << 20;
constexpr int32_t kMaxPosition = 1 << 30;
// With so many units of attention a thread, none has to wait long for another.
constexpr int kCutUnits = 4;

// How far apart the memory of portions is, beyond what their tokens take.
int64_t slack_floats(const Program& program) { return whole_lines(program.slack_bytes() / 4 + 1) + 16; }

void check_sequence(const Batch& b, int64_t s, const Cache* cache) {
    for (int64_t t = b.starts[s]; t < b.starts[s + 1]; t++) {
        require(b.positions[t] / kBlockTokens < b.table_width, "a position lies outside its sequence's block table");
        require(b.slots[t] >= 0 && b.slots[t] / kBlockTokens < cache->num_blocks(), "a slot lies outside the cache");
        for (int64_t i = 0; i <= b.positions[t] / kBlockTokens && t + 1 == b.starts[s + 1]; i++) {
            const int32_t block = b.block_tables[s * b.table_width + i];
            require(block >= 0 && block < cache->num_blocks(), "a block lies outside the cache");
        }
        require(t == b.starts[s] || b.positions[t] > b.positions[t - 1], "positions ascend within a sequence");
    }
}

}  // namespace

Workspace::Workspace(int num_threads) : num_done_(size_t(num_threads * kCutUnits)), scratch_(size_t(num_threads)) {}

Batch Workspace::keep(const Program& program, int64_t num_tokens, const Batch* batch) {
    require(num_tokens > 0 && num_tokens <= kMaxTokens, "a batch has 1 to 1048576 tokens");
    require(batch || !program.needs_batch(), "this program needs a batch");
    if (!batch) {
        indices_ = {0, int32_t(num_tokens)};
        return {num_tokens, 1, 0, nullptr, nullptr, nullptr, indices_.data(), nullptr};
    }
    const Batch kept = copy(*batch);
    check(program, kept);
    return kept;
}

void Workspace::check(const Program& program, const Batch& b) {
    for (int64_t t = 0; program.vocab_size() && t < b.num_tokens; t++)
        require(b.token_ids[t] >= 0 && b.token_ids[t] < program.vocab_size(), "a token id lies outside the vocabulary");
    for (int64_t t = 0; t < b.num_tokens; t++)
        require(b.positions[t] >= 0 && b.positions[t] < kMaxPosition, "a position lies outside 0 .. 2^30");
    require(b.starts[0] == 0 && b.starts[b.num_sequences] == b.num_tokens, "starts run from 0 to the number of tokens");
    require(b.num_wanted < 0 || program.select_at() < program.steps().size(), "this program computes all to the end");
    for (int64_t i = 0; i < b.num_wanted; i++)
        require(b.wanted[i] >= (i ? b.wanted[i - 1] + 1 : 0) && b.wanted[i] < b.num_tokens,
                "the wanted tokens are of the batch, and ascend");
    for (int64_t s = 0; s < b.num_sequences; s++) {
        require(b.starts[s] <= b.starts[s + 1] && b.starts[s + 1] <= b.num_tokens, "starts ascend");
        if (program.cache()) check_sequence(b, s, program.cache());
    }
}

void Workspace::cut(const Program& program, const Batch& kept, int64_t count) {
    portions_.cut(kept, count, program.cache() ? program.cache()->num_blocks() : 0);
    make_room(program, kept.num_tokens);
}

Course Workspace::whole(const Kernels& kernels, const Program& program, const float* input, float* output) {
    Course course = portion(kernels, program, 0, scratch_, input, output);
    cut_attention(program, course);
    return course;
}

Course Workspace::portion(const Kernels& kernels, const Program& program, size_t index, int thread, const float* input,
                          float* output) const {
    return portion(kernels, program, index, {&scratch_[size_t(thread)], 1}, input, output);
}

void Workspace::make_room(const Program& program, int64_t num_tokens) {
    const int64_t bytes = 4 * (whole_lines(program.arena_floats() * num_tokens) +
                               int64_t(portions_.all().size()) * slack_floats(program));
    if (arena_.bytes() < bytes) arena_ = Memory(bytes);
    const int64_t scratch_bytes = program.scratch_floats(num_tokens) * 4;
    for (auto& scratch : scratch_)
        if (scratch.bytes() < scratch_bytes) scratch = Memory(scratch_bytes);
}

Course Workspace::portion(const Kernels& kernels, const Program& program, size_t index, std::span<const Memory> scratch,
                          const float* input, float* output) const {
    const Portion& portion = portions_.all()[index];
    float* arena = reinterpret_cast<float*>(arena_.data()) + int64_t(index) * slack_floats(program) +
                   whole_lines(program.arena_floats() * portion.first_token);
    if (input) input += portion.first_token * program.input_width();
    if (output) output += portion.first_row * program.output_width();
    const auto context = [&](const Batch& batch, const std::vector<int32_t>& sequences) {
        const int64_t tile = tile_tokens(kernels, program, batch.num_tokens);
        return Context{kernels, batch.num_tokens, tile,    arena, input,   output,
                       &batch,  sequences,        scratch, 1,     nullptr, nullptr};
    };
    const size_t all = program.steps().size();
    return {context(portion.batch, portion.sequences), context(portion.chosen, portion.chosen_sequences),
            portion.batch.has_choice() ? program.select_at() : all,
            portion.batch.wants_none() ? program.select_at() : all};
}

// Into how many segments attention is cut, with room for them.
void Workspace::cut_attention(const Program& program, Course& course) {
    if (!program.piece_floats()) return;
    for (Context* c : {&course.all, &course.few}) {
        if (c->num_tokens * program.cache()->layout().num_kv_heads >= int64_t(num_done_.size())) continue;
        for (int64_t t = 0; t < c->num_tokens; t++)
            c->segments = std::max<int64_t>(c->segments, c->batch->positions[t] / kSegmentTokens + 1);
        const int64_t bytes = c->num_tokens * c->segments * program.piece_floats() * 4;
        if (c->segments > 1 && pieces_.bytes() < bytes) pieces_ = Memory(bytes);
    }
    course.all.pieces = course.few.pieces = reinterpret_cast<float*>(pieces_.data());
    course.all.num_done = course.few.num_done = num_done_.data();
}

// A copy that nobody else can write: what has been checked is what is used.
Batch Workspace::copy(const Batch& batch) {
    require(batch.num_sequences > 0 && batch.num_sequences <= kMaxTokens, "a batch has 1 to 1048576 sequences");
    require(batch.num_wanted <= batch.num_tokens, "no more tokens are wanted than there are");
    const int64_t T = batch.num_tokens, S = batch.num_sequences;
    const int64_t sizes[] = {T, T, T, S + 1, S * batch.table_width, std::max<int64_t>(batch.num_wanted, 0)};
    const int32_t* sources[] = {batch.token_ids, batch.positions,    batch.slots,
                                batch.starts,    batch.block_tables, batch.wanted};
    indices_.resize(size_t(std::accumulate(std::begin(sizes), std::end(sizes), int64_t(0))));
    int32_t *next = indices_.data(), *copies[6];
    for (int i = 0; i < 6; next += sizes[i++]) {
        copies[i] = next;
        if (sizes[i]) std::memcpy(next, sources[i], size_t(sizes[i]) * sizeof(int32_t));
    }
    return {T,         S,         batch.table_width, copies[0], copies[1],
            copies[2], copies[3], copies[4],         copies[5], batch.num_wanted};
}

}  // namespace bitnet

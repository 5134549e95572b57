#include "portions.h"

#include <algorithm>

#include "kernels.h"

namespace bitnet {

namespace {

void note_sequences(const Batch& b, std::vector<int32_t>& sequences) {
    sequences.resize(size_t(b.num_tokens));
    for (int64_t s = 0; s < b.num_sequences; s++)
        for (int64_t t = b.starts[s]; t < b.starts[s + 1]; t++) sequences[size_t(t)] = int32_t(s);
}

}  // namespace

void Portion::choose() {
    const int64_t W = batch.num_wanted, S = batch.num_sequences;
    chosen_indices_.resize(size_t(W + S + 1));
    int32_t *positions = chosen_indices_.data(), *starts = positions + W;
    for (int64_t i = 0, s = 0; s <= S; s++) {
        starts[s] = int32_t(i);
        for (; s < S && i < W && batch.wanted[i] < batch.starts[s + 1]; i++)
            positions[i] = batch.positions[batch.wanted[i]];
    }
    chosen = {W, S, batch.table_width, nullptr, positions, nullptr, starts, batch.block_tables};
    note_sequences(chosen, chosen_sequences);
}

void Portions::cut(const Batch& batch, int64_t count, int64_t num_blocks) {
    if (count < 2 || !find_ends(batch, count) || !are_apart(batch, num_blocks)) ends_ = {0, batch.num_sequences};
    portions_.resize(ends_.size() - 1);
    for (size_t i = 0; i < portions_.size(); i++) {
        Portion& portion = portions_[i];
        take(batch, ends_[i], ends_[i + 1], portion);
        note_sequences(portion.batch, portion.sequences);
        portion.chosen = {};
        if (portion.batch.has_choice()) portion.choose();
    }
}

// Where sequences begin nearest to even shares; whether no share is much larger than that.
bool Portions::find_ends(const Batch& b, int64_t count) {
    ends_.assign(1, 0);
    const int64_t most = (b.num_tokens + count - 1) / count * 5 / 4;
    for (int64_t i = 1, s = 0; i <= count; i++) {
        const int64_t from = b.starts[s], wanted = b.num_tokens * i / count;
        while (s < b.num_sequences && 2 * wanted > b.starts[s] + b.starts[s + 1]) s++;
        if (i == count) s = b.num_sequences;
        if (b.starts[s] == from || b.starts[s] - from > most) return false;
        ends_.push_back(s);
    }
    return true;
}

bool Portions::are_apart(const Batch& b, int64_t num_blocks) {
    writers_.resize(size_t(num_blocks));
    const auto each_block = [&](const auto& see) {
        for (int32_t i = 1; i < int32_t(ends_.size()); i++)
            for (int64_t t = b.starts[ends_[size_t(i) - 1]]; t < b.starts[ends_[size_t(i)]]; t++)
                see(writers_[size_t(b.slots[t] / kBlockTokens)], i);
    };
    bool ok = true;
    each_block([&](int32_t& writer, int32_t i) {
        ok &= writer == 0 || writer == i;
        writer = i;
    });
    for (int32_t i = 1; ok && i < int32_t(ends_.size()); i++)
        for (int64_t s = ends_[size_t(i) - 1]; s < ends_[size_t(i)]; s++) {
            if (b.starts[s] == b.starts[s + 1]) continue;
            const int64_t last = b.positions[b.starts[s + 1] - 1] / kBlockTokens;
            for (int64_t at = s * b.table_width; at <= s * b.table_width + last; at++) {
                const int32_t writer = writers_[size_t(b.block_tables[at])];
                ok &= writer == 0 || writer == i;
            }
        }
    each_block([](int32_t& writer, int32_t) { writer = 0; });
    return ok;
}

// The sequences from `first` to `last`.
void Portions::take(const Batch& b, int64_t first, int64_t last, Portion& p) const {
    const int64_t token = b.starts[first], num_tokens = b.starts[last] - token;
    p.starts_.resize(size_t(last - first + 1));
    for (size_t s = 0; s < p.starts_.size(); s++) p.starts_[s] = b.starts[first + int64_t(s)] - int32_t(token);
    p.first_token = p.first_row = token;
    p.batch = {num_tokens,          last - first,    b.table_width,    b.token_ids + token,
               b.positions + token, b.slots + token, p.starts_.data(), b.block_tables + first * b.table_width};
    if (b.num_wanted < 0) return;
    const int32_t *begin = std::lower_bound(b.wanted, b.wanted + b.num_wanted, token),
                  *end = std::lower_bound(begin, b.wanted + b.num_wanted, token + num_tokens);
    p.wanted_.resize(size_t(end - begin));
    std::transform(begin, end, p.wanted_.begin(), [&](int32_t t) { return t - int32_t(token); });
    p.first_row = begin - b.wanted;
    p.batch.wanted = p.wanted_.data();
    p.batch.num_wanted = end - begin;
}

}  // namespace bitnet

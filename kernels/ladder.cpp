// `ladder check` checks every path of this machine against the generic one, `ladder time [path [verb]]` times them.
// `ladder hash` prints one number for the results of the generic and the best path, the same on every architecture.
#include "ladder.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "executor.h"
#include "float_mode.h"
#include "int8_table.h"
#include "screen.h"
#include "weights.h"

using namespace bitnet;

namespace {

Result check_ternary(const Kernels& kernels, Random random) {
    const int steps = 1 + random.below(70), tokens = 1 + random.below(kMaxTileTokens);
    const auto w = weights(random, steps * kStepBytes);
    const auto a = codes(random, steps * kStepColumns * tokens);
    std::vector<int32_t> acc(size_t(tokens * kGroupRows)), sums(static_cast<size_t>(tokens));
    kernels.ternary_tile(w.data(), a.data(), steps, tokens, acc.data());
    for (int32_t& sum : sums) sum = random.below(5000);
    const auto scales = floats(random, tokens), residual = floats(random, tokens * 40);
    const auto row_scales = floats(random, kGroupRows);
    std::vector<float> out(size_t(tokens * 40));
    const int rows = 1 + random.below(kGroupRows);
    kernels.ternary_store(acc.data(), tokens, rows, row_scales.data(), scales.data(), sums.data(), out.data(), 40,
                          random.below(2) ? residual.data() : nullptr, 40);
    Result result;
    append(result, acc);
    append(result, out);
    return result;
}

// The scores of a quantised head for up to 20 inputs, on two threads, and its rows as a table of embeddings in int8;
// and the rows and the best rows of a ternary one.
Result check_head(const Kernels& kernels, Random random) {
    const int64_t rows = 1 + random.below(60), columns = 1 + random.below(300), inputs = 1 + random.below(20);
    const auto w = floats(random, rows * columns), x = floats(random, inputs * columns);
    const DenseWeight head{w.data(), Dtype::f32, rows, columns};
    Executor executor(kernels.name, 2);
    std::vector<float> scores(size_t(inputs * rows));
    QuantisedHead(head, random.below(2) ? 8 : 6, executor).scores(executor, x.data(), inputs, scores.data());
    const Int8Table table(head, executor);
    const auto* rounded = static_cast<const int8_t*>(table.codes().data);
    std::vector<float> row(static_cast<size_t>(columns));
    kernels.embed(rounded, Dtype::i8, int(columns), row.data());
    Result result;
    append(result, scores);
    append(result, std::vector<int8_t>(rounded, rounded + rows * columns));
    append(result, std::vector<float>(table.scales(), table.scales() + rows));
    append(result, row);
    std::vector<float> ternary(w.size()), best(static_cast<size_t>(inputs));
    for (size_t i = 0; i < w.size(); i++) ternary[i] = w[i] > 0.5f ? 0.7f : w[i] < -0.5f ? -0.7f : 0.0f;
    std::vector<int32_t> ids(static_cast<size_t>(inputs));
    const auto codes = TernaryTable::of({ternary.data(), Dtype::f32, rows, columns}, executor);
    for (int64_t r = 0; r < rows; r++) codes->read(kernels, r, &ternary[size_t(r * columns)]);
    Screen({nullptr, Dtype::f32, rows, columns, codes.get()}, executor)
        .top(executor, x.data(), inputs, 1, ids.data(), best.data());
    append(result, ternary);
    append(result, ids);
    append(result, best);
    return result;
}

Result check_row(const Kernels& kernels, Random random) {
    const int width = 1 + random.below(200), padded = (width + 15) / 16 * 16;
    const auto x = floats(random, width), up = floats(random, width), norm = floats(random, width);
    std::vector<float> out(static_cast<size_t>(width)), scratch(static_cast<size_t>(padded));
    std::vector<int8_t> quantised(static_cast<size_t>(padded));
    float inverse_scale = 0;
    int32_t sum = 0;
    RowTask task{};
    task.x = x.data();
    if (random.below(2)) task.up = up.data();
    task.activation = task.up ? Activation(1 + random.below(4)) : Activation::none;
    if (!task.up || random.below(2)) task.weight = norm.data();
    task.eps = 1e-5f;
    task.width = width;
    task.scratch = scratch.data();
    const bool to_codes = random.below(2);
    task.out = to_codes ? nullptr : out.data();
    task.codes = to_codes ? quantised.data() : nullptr;
    task.padded_width = padded;
    task.inverse_scale = &inverse_scale;
    task.code_sum = &sum;
    kernels.row(task);
    Result result;
    append(result, out);
    append(result, quantised);
    append(result, std::vector<float>{inverse_scale, float(sum)});
    return result;
}

Result check_dense(const Kernels& kernels, Random random) {
    const bool is_gathered = random.below(4) == 0;
    const int rows = 1 + random.below(20), columns = 1 + random.below(1200);
    const int tokens = is_gathered ? 1 : 1 + random.below(40);
    const Dtype dtype = Dtype(random.below(3));
    const auto wide = floats(random, rows * columns);
    auto narrow = bytes(random, rows * columns * 2);
    for (size_t i = 1; i < narrow.size(); i += 2) narrow[i] &= 0xbf;  // no infinities, nothing huge
    const auto x = floats(random, tokens * columns), residual = floats(random, tokens * rows);
    std::vector<float> out(size_t(tokens * rows)), row(static_cast<size_t>(columns));
    DenseTask task{};
    task.weight = dtype == Dtype::f32 ? static_cast<const void*>(wide.data()) : narrow.data();
    task.dtype = dtype;
    task.rows = rows;
    task.columns = columns;
    task.x = x.data();
    task.x_stride = columns;
    task.tokens = tokens;
    task.out = out.data();
    task.out_stride = task.residual_stride = rows;
    task.residual = random.below(2) ? residual.data() : nullptr;
    std::vector<int32_t> row_ids;
    for (int i = 0; i < rows; i++) row_ids.push_back(random.below(rows));
    if (is_gathered) task.row_ids = row_ids.data();
    kernels.dense(task);
    kernels.embed(task.weight, dtype, columns, row.data());
    Result result;
    append(result, out);
    append(result, row);
    return result;
}

// `size`: that of keys and queries; values have its square.
Result attention_of(const Kernels& kernels, Random random, const std::vector<Dtype>& dtypes, float size) {
    const int kv_heads = 1 + random.below(2), heads = 1 + random.below(6);
    const int dim = random.below(2) ? 32 * (1 + random.below(4)) : 2 * (1 + random.below(40));
    const CacheLayout layout = cache_layout(dtypes[size_t(random.below(int(dtypes.size())))], kv_heads, dim);
    const int length = 1 + random.below(700), blocks = (length + kBlockTokens - 1) / kBlockTokens;
    const int tokens = 1 + random.below(std::min(length, random.below(4) ? 12 : 100));  // more than go together, too
    Memory cache(blocks * layout.block_bytes);
    std::vector<int32_t> table, positions;
    for (int i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
    for (int t = 0; t < length; t++) {
        auto k = floats(random, kv_heads * dim), v = floats(random, kv_heads * dim);
        const auto angles = floats(random, dim);
        for (float& x : k) x *= size;
        for (float& x : v) x *= size * size;
        kernels.rope(k.data(), kv_heads, dim, dim / 2, angles.data(), angles.data() + dim / 2);
        kernels.cache_write(layout, cache.data() + table[size_t(t / kBlockTokens)] * layout.block_bytes,
                            t % kBlockTokens, k.data(), v.data());
        if (t >= length - tokens) positions.push_back(t);
    }
    auto q = floats(random, tokens * heads * dim);
    for (float& x : q) x *= size;
    std::vector<float> out(q.size());
    Memory scratch(attend_scratch_floats(layout.padded_dim) * 4);
    const FloatMode mode(FloatMode::flushing);
    kernels.attend({layout, cache.data(), table.data(), cache.data(), tokens, positions.data(),
                    random.below(2) ? 1 + random.below(length) : 0, random.below(kv_heads), heads, q.data(),
                    heads * dim, out.data(), heads * dim, 0.125f / (size * size), (float*)scratch.data(), nullptr, 0,
                    0});
    Result result(cache.data(), cache.data() + cache.bytes());
    append(result, out);
    return result;
}

Result check_attention(const Kernels& kernels, Random random) {
    return attention_of(kernels, random, {Dtype::bf16, Dtype::bf16, Dtype::f32, Dtype::i8}, 1.0f);
}

// Products that are subnormal.
Result check_small_attention(const Kernels& kernels, Random random) {
    return attention_of(kernels, random, {Dtype::bf16, Dtype::f32}, 2e-19f);
}

// A layer with every verb for two sequences, and the screen, on three threads.
Result check_program(const Kernels& kernels, Random random) {
    constexpr int tokens = 40, hidden = 320, dim = 32, vocab = 300;
    const Format format = random.below(2) ? Format::u2 : Format::t5;
    const Dtype cache_dtype[] = {Dtype::f32, Dtype::bf16, Dtype::i8};
    Cache cache(cache_layout(cache_dtype[random.below(3)], 2, dim), 1);
    cache.reserve(5);
    const auto qkv = ternary_weight(random, 256, hidden, Format::u2), up = ternary_weight(random, 1280, hidden, format);
    const auto table = floats(random, vocab * hidden), output = floats(random, hidden * 128);
    const auto head = floats(random, vocab * 640), norm = floats(random, 640);
    const DenseWeight embedding{table.data(), Dtype::f32, vocab, hidden}, o{output.data(), Dtype::f32, hidden, 128};
    const DenseWeight logits{head.data(), Dtype::f32, vocab, 640};
    std::vector<float> frequencies;
    for (int i = 0; i < dim / 2; i++) frequencies.push_back(1.0f / float(1 + i * i * i));

    const auto rows = [](int64_t offset, int64_t stride, int64_t column, int64_t width) {
        return Rows{Base::arena, offset, stride, column, width};
    };
    const Rows x = rows(0, hidden, 0, hidden), q = rows(320, 256, 0, 128), k = rows(320, 256, 128, 64);
    const Rows v = rows(320, 256, 192, 64), angles = rows(576, dim, 0, dim), attended = rows(608, 128, 0, 128);
    const Rows gate = rows(736, 1280, 0, 640), other = rows(736, 1280, 640, 640), gated = rows(2016, 640, 0, 640);
    const Codes first{2656, hidden}, second{2656, hidden};
    Program program(2656 + 112);
    program.embed(&embedding, x);
    program.rows_to_codes({x, nullptr, Activation::none, norm.data(), 1e-5f}, first);
    program.ternary(&qkv, first, rows(320, 256, 0, 256), nullptr);
    program.rotations(frequencies, angles);
    program.rope_write(&cache, 0, q, k, v, angles);
    program.attend(&cache, 0, q, attended, 0.01f);
    program.dense(&o, attended, x, &x);
    program.rows_to_codes({x, nullptr, Activation::none, nullptr, 0.0f}, second);
    program.ternary(&up, second, rows(736, 1280, 0, 1280), nullptr);
    program.rows_to_floats({gate, &other, Activation(1 + random.below(2)), norm.data(), 1e-6f}, gated);
    program.dense(&logits, gated, {Base::output, 0, vocab, 0, vocab}, nullptr);

    std::vector<int32_t> ids, positions, slots;
    const std::vector<int32_t> starts{0, 25, tokens}, blocks{3, 0, 1, 2};
    for (int t = 0; t < tokens; t++) {
        ids.push_back(random.below(vocab));
        positions.push_back(t < 25 ? t : t - 25);
        slots.push_back(blocks[t < 25 ? 0 : 2] * kBlockTokens + positions.back());
    }
    const Batch batch{tokens, 2, 2, ids.data(), positions.data(), slots.data(), starts.data(), blocks.data()};
    Executor executor(kernels.name, 3);
    const int inputs = random.below(2) ? 3 : 5;  // few are scored another way than several
    std::vector<float> out(tokens * vocab), best(size_t(inputs) * 2);
    executor.run(program, tokens, &batch, nullptr, out.data());
    std::vector<int32_t> best_ids(best.size());
    Screen(embedding, executor).top(executor, table.data(), inputs, 2, best_ids.data(), best.data());
    Result result;
    append(result, out);
    append(result, best);
    append(result, best_ids);
    return result;
}

struct Verb {
    const char* name;
    Check check;
    uint64_t seeds;
    bool same_on_arm = true;  // which takes for subnormal what is rounded up to 2^-126
};

const Verb kVerbs[] = {{"ternary", check_ternary, 60}, {"many", check_many, 60},
                       {"groups", check_groups, 60},   {"row", check_row, 60},
                       {"dense", check_dense, 60},     {"head", check_head, 60},
                       {"int8", check_int8, 60},       {"attention", check_attention, 60},
                       {"program", check_program, 6},  {"small", check_small_attention, 20, false}};

int hash_all() {
    int count;
    const Kernels* const* paths = available_kernels(&count);
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (const Kernels* path : {generic_kernels(), paths[0]})
        for (const Verb& verb : kVerbs)
            for (uint64_t seed = 0; verb.same_on_arm && seed < verb.seeds; seed++)
                for (uint8_t byte : verb.check(*path, {seed})) hash = (hash ^ byte) * 0x100000001b3;
    std::printf("%016llx\n", static_cast<unsigned long long>(hash));
    return 0;
}

// For how much of ten seconds a team is whole whose regions take `usual_s`, where threads wait for each other for a
// part of it, and one after every `undisturbed_s` takes `disturbed_s`, most of which all but one wait.
double whole_share(int most, double usual_s, double waited, double undisturbed_s, double disturbed_s) {
    Team team(most);
    double whole = 0, since = 0;
    for (double now = 0, took = 0; now < 10; now += took) {
        const int size = team.size(now);
        took = usual_s;
        if (size > 1) {
            const bool disturbed = since >= undisturbed_s;
            took = disturbed ? disturbed_s : usual_s;
            since = disturbed ? 0 : since + took;
            team.learn(now + took, took, (disturbed ? 0.9 : waited) * took * (size - 1), 0);
        }
        if (size == most) whole += took;
    }
    return whole / 10;
}

// An executor uses fewer threads where another process has most of a processor, and only there.
bool check_team() {
    const double hiccups = whole_share(2, 0.0004, 0.3, 0.3, 0.02), many = whole_share(64, 0.01, 0.2, 1, 0.03),
                 third = whole_share(2, 0.03, 0.1, 0.06, 0.03), most = whole_share(2, 0.0004, 0.1, 0.001, 0.004),
                 always = whole_share(2, 0.025, 0, 0, 0.05);
    return std::min({hiccups, many, third}) > 0.99 && std::max(most, always) < 0.25;
}

int check_all() {
    int count, failed = !check_team(), passed = !failed;
    if (failed) std::printf("the team of threads does not adapt as it should\n");
    const Kernels* const* paths = available_kernels(&count);
    for (int i = 0; i < count; i++)
        for (const auto& [verb, check, seeds, _] : kVerbs)
            for (uint64_t seed = 0; seed < seeds; seed++) {
                const bool same = check(*paths[i], {seed}) == check(*generic_kernels(), {seed});
                (same ? passed : failed)++;
                if (!same) std::printf("%s: %s differs from generic with seed %d\n", paths[i]->name, verb, int(seed));
            }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

// The gate and up projections of BitNet b1.58 2B-4T: 13824 x 2560, one thread, weights in cache or in memory.
void time_ternary(const Kernels& kernels) {
    const double most = peak(kernels);
    Random random{1};
    const int steps = 2560 / kStepColumns;
    const auto a = codes(random, steps * kStepColumns * kMaxTileTokens);
    for (const Format format : {Format::u2, Format::t5}) {
        if (format == Format::t5 && !kernels.block_tile) continue;
        const int group_bytes = format == Format::u2 ? steps * kStepBytes : steps / kBlockSteps * kBlockBytes;
        for (const int groups : {32, 6912}) {  // 0.7 MB and 142 MB of U2
            const auto source = weights(random, int64_t(groups) * group_bytes);
            const Memory w(int64_t(source.size()));  // in huge pages, as the executor's weights are
            std::memcpy(w.data(), source.data(), source.size());
            for (const int tokens : {1, 2, 3, 4, 6, 8, 10, 12}) {
                int32_t acc[kMaxTileTokens * kGroupRows];
                const double t = median_seconds([&] {
                    for (int g = 0; g < groups; g++) {
                        const uint8_t* group = w.data() + int64_t(g) * group_bytes;
                        if (format == Format::u2)
                            kernels.ternary_tile(group, a.data(), steps, tokens, acc);
                        else
                            kernels.block_tile(group, a.data(), steps / kBlockSteps, tokens, acc);
                    }
                });
                const double macs = double(groups) * kGroupRows * 2560 * tokens;
                std::printf("%-8s %s %6.1f MB, %d tokens: %6.1f GMAC/s (%.0f%% of the peak), %5.1f GB/s of weights\n",
                            kernels.name, format == Format::u2 ? "U2" : "T5", double(w.bytes()) / 1e6, tokens,
                            macs / t / 1e9, 100 * macs / t / most, double(w.bytes()) / t / 1e9);
            }
        }
    }
}

void time_dense(const Kernels& kernels) {
    Random random{2};
    const auto time = [&](const char* name, int64_t rows, int columns, int tokens) {
        const std::vector<uint16_t> w(size_t(rows * columns), 0x3f80);
        const auto x = floats(random, tokens * columns);
        std::vector<float> out(size_t(tokens * rows));
        const double t = median_seconds([&] {
            kernels.dense({w.data(), Dtype::bf16, rows, columns, x.data(), columns, tokens, out.data(), rows, nullptr,
                           0, nullptr});
        });
        std::printf("%-8s bf16 %s %2d tokens: %5.1f GFMA/s, %5.1f GB/s\n", kernels.name, name, tokens,
                    double(rows * columns) * tokens / t / 1e9, double(w.size()) * 2 / t / 1e9);
    };
    for (const int tokens : {1, 4}) time("head, 40000 x 2560,", 40000, 2560, tokens);
    for (const int tokens : {1, 4, 64}) time("in the first cache, 64 x 256,", 64, 256, tokens);
    for (const int tokens : {4, 12, 128}) time("prompts, 2048 x 2048,", 2048, 2048, tokens);
}

const std::pair<const char*, void (*)(const Kernels&)> kTimings[] = {
    {"ternary", time_ternary}, {"many", time_many},   {"groups", time_groups},
    {"int8", time_int8},       {"dense", time_dense}, {"floats", time_floats}};

}  // namespace

int main(int argc, char** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "check") return check_all();
    if (what == "hash") return hash_all();
    if (what != "time")
        return std::fprintf(stderr, "usage: ladder check | ladder hash | ladder time [path [verb]]\n"), 2;
    int count;
    const Kernels* const* paths = available_kernels(&count);
    for (int i = 0; i < count; i++) {
        if (argc > 2 && std::strcmp(argv[2], paths[i]->name)) continue;
        for (const auto& [verb, time] : kTimings)
            if (argc <= 3 || !std::strcmp(argv[3], verb)) time(*paths[i]);
    }
    return 0;
}

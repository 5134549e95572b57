// Times the float steps of the 2B-4T shape, as the executor runs them: on one thread.
#include <cstdio>
#include <cstring>

#include "executor.h"
#include "ladder.h"

namespace bitnet {

namespace {

constexpr int64_t kHidden = 2560, kInner = 6912, kKeys = 640, kDim = 128;

Rows rows(int64_t offset, int64_t width) { return {Base::arena, offset, width, 0, width}; }

// What a sequence of `length` positions needs: one step of its last `tokens` of them.
struct Sequence {
    std::vector<int32_t> ids, positions, slots, starts, blocks;
    Sequence(int length, int tokens) : ids(size_t(tokens)), starts{0, tokens} {
        for (int t = length - tokens; t < length; t++) positions.push_back(t);
        for (int b = 0; b <= length / kBlockTokens; b++) blocks.push_back(b);
        slots = positions;
    }
    Batch batch() const {
        return {
            int64_t(ids.size()), 1, int64_t(blocks.size()), ids.data(), positions.data(), slots.data(), starts.data(),
            blocks.data()};
    }
};

double time_program(const Kernels& kernels, const Program& program, int length, int tokens) {
    const Sequence sequence(length, tokens);
    const Batch batch = sequence.batch();
    Executor executor(kernels.name, 1);
    return median_seconds([&] { executor.run(program, tokens, &batch, nullptr, nullptr); });
}

void time_attention(const Kernels& kernels, int length, int tokens, int layers) {
    Cache cache(cache_layout(Dtype::bf16, int(kKeys / kDim), int(kDim)), layers);
    cache.reserve(length / kBlockTokens + 1);
    std::memset(cache.layer(0), 0, size_t(cache.num_blocks() * cache.block_bytes()));  // untouched, it is one page
    Program program(2 * kHidden);
    for (int layer = 0; layer < layers; layer++)
        program.attend(&cache, layer, rows(0, kHidden), rows(kHidden, kHidden), 0.088f);
    const double t = time_program(kernels, program, length, tokens) / layers;
    std::printf("%-8s attention, a layer of 20 / 5 heads of 128, %d tokens at %d, %d layers: %.0f us\n", kernels.name,
                tokens, length, layers, t * 1e6);
}

void time_rows(const Kernels& kernels) {
    constexpr int tokens = 128;
    const std::vector<float> norm(size_t(kInner), 1.0f);
    Cache cache(cache_layout(Dtype::bf16, int(kKeys / kDim), int(kDim)), 1);
    cache.reserve(tokens / kBlockTokens + 1);
    const int64_t codes = kInner * 2, end = codes + kInner / 4 + 16;
    const Rows up = rows(kInner, kInner);
    Program normed(end), gated(end), rope(kHidden + 2 * kKeys + kDim);
    normed.rows_to_codes({rows(0, kHidden), nullptr, Activation::none, norm.data(), 1e-5f}, {codes, kHidden});
    gated.rows_to_codes({rows(0, kInner), &up, Activation::relu2, norm.data(), 1e-5f}, {codes, kInner});
    rope.rope_write(&cache, 0, rows(0, kHidden), rows(kHidden, kKeys), rows(kHidden + kKeys, kKeys),
                    rows(kHidden + 2 * kKeys, kDim));
    const std::pair<const char*, const Program*> steps[] = {{"norm and quantise 2,560", &normed},
                                                            {"gate, norm and quantise 6,912", &gated},
                                                            {"rope and write 25 heads of 128", &rope}};
    for (const int t : {1, tokens})
        for (const auto& [name, program] : steps)
            std::printf("%-8s %s, %d tokens: %.2f us each\n", kernels.name, name, t,
                        time_program(kernels, *program, tokens, t) / t * 1e6);
}

}  // namespace

void time_floats(const Kernels& kernels) {
    time_rows(kernels);
    time_attention(kernels, 512, 512, 1);
    time_attention(kernels, 3000, 256, 1);
    time_attention(kernels, 2048, 1, 1);
    time_attention(kernels, 2048, 1, 30);  // from memory
}

}  // namespace bitnet

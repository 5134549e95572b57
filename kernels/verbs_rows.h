// Gate, RMSNorm and int8 quantisation of a row; exp and the activations.
#pragma once
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace {

using namespace bitnet;

// exp for lanes up to 88.37; 0 below -87.33. Cephes' expf: n = round(x / ln 2), a polynomial in x - n ln 2, times 2^n.
BITNET_INLINE Lanes exp(const Lanes& x) {
    const Lanes lowest = set1(-87.33654475f);
    Lanes y = min(set1(88.3762626647949f), max(lowest, x));
    Lanes n = round(mul(y, set1(1.44269504088896341f)));
    Lanes r = fma(n, set1(-0.693359375f), y);
    r = fma(n, set1(2.12194440e-4f), r);
    Lanes p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return below(x, lowest, mul(p, power_of_two(n)), set1(0.0f));
}

BITNET_INLINE Lanes activate(Activation kind, const Lanes& x) {
    if (kind == Activation::silu) return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x))));
    Lanes r = max(x, set1(0.0f));  // relu2
    return mul(r, r);
}

// 16 elements from p, of which n exist; the others are 0.
BITNET_INLINE Lanes load_first(const float* p, int n) {
    if (n >= 16) return load(p);
    float tail[16] = {};
    std::memcpy(tail, p, size_t(n) * 4);
    return load(tail);
}

inline void store_first(float* p, int n, const Lanes& x) {
    if (n >= 16) return store(p, x);
    float tail[16];
    store(tail, x);
    std::memcpy(p, tail, size_t(n) * 4);
}

// Where the columns 4 n .. 4 n + 3 stand once T5 blocks are expanded.
inline int in_block_order(int n) {
    const int block = n / 20, step = n % 20 / 5, field = n % 5;
    return block * 20 + (field < 4 ? step * 4 + field : 16 + step);
}

void store_codes(const RowTask& t, const float* y) {
    Lanes largest = set1(0.0f), poison = set1(0.0f);  // 0, or not a number where one element is not finite
    for (int k = 0; k < t.width; k += 16) {
        const Lanes v = load_first(y + k, t.width - k);
        largest = max(largest, abs(v));
        poison = fma(v, set1(0.0f), poison);
    }
    float top = reduce_max(largest);
    if (top < 1e-5f) top = 1e-5f;
    const float scale = (1.0f / top) * 127.0f;  // two roundings, as torch evaluates 127 / top
    const Lanes by = set1(scale);
    int32_t sum = 0;
    alignas(16) int8_t codes[16];
    for (int k = 0; k < t.padded_width; k += 16) {
        store_int8(codes, k < t.width ? mul(load_first(y + k, t.width - k), by) : set1(0.0f));
        for (int i = 0; i < 16; i++) sum += codes[i];
        for (int i = 0; i < 4; i++) {
            const int four = t.block_order ? in_block_order(k / 4 + i) : k / 4 + i;
            std::memcpy(t.codes + 4 * four * int64_t(t.lane_stride), codes + 4 * i, 4);
        }
    }
    *t.inverse_scale = 1.0f / scale + reduce_add(poison);  // codes say nothing of infinities
    *t.code_sum = sum;
}

void row(const RowTask& t) {
    const float* y = t.x;
    if (t.up) {
        float* gated = t.weight || t.codes ? t.scratch : t.out;
        for (int k = 0; k < t.width; k += 16) {
            int n = t.width - k;
            store_first(gated + k, n, mul(activate(t.activation, load_first(t.x + k, n)), load_first(t.up + k, n)));
        }
        y = gated;
    }
    if (t.weight) {
        Lanes squares = set1(0.0f);
        for (int k = 0; k < t.width; k += 16) {
            Lanes v = load_first(y + k, t.width - k);
            squares = fma(v, v, squares);
        }
        const float r = 1.0f / std::sqrt(reduce_add(squares) / float(t.width) + t.eps);
        float* normed = t.codes ? t.scratch : t.out;
        for (int k = 0; k < t.width; k++) normed[k] = (y[k] * r) * t.weight[k];
        y = normed;
    }
    if (t.codes) store_codes(t, y);
}

}  // namespace

// Gate, RMSNorm and int8 quantisation of a row, and the activations.
#pragma once
#include <cmath>
#include <cstring>

#include "exp.h"
#include "fetch.h"
#include "kernels.h"

namespace {

using namespace bitnet;

BITNET_INLINE Lanes activate(Activation kind, const Lanes& x) {
    if (kind == Activation::silu || kind == Activation::silu7) return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x))));
    if (kind == Activation::gelu) {  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        const Lanes cubic = fma(mul(x, x), set1(-0.0713548162726f), set1(-1.59576912160573f));
        return div(x, add(set1(1.0f), exp(mul(x, cubic))));
    }
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

// The sum of whole numbers.
inline int32_t sum_of(const Lanes& x) {
    float lanes[16];
    store(lanes, x);
    int32_t sum = 0;
    for (float lane : lanes) sum += int32_t(lane);
    return sum;
}

// f(k, n) for every 16 columns from k on, of which the last n may be fewer.
template <class F>
BITNET_INLINE void each_16(int width, F f) {
    int k = 0;
    for (; k + 16 <= width; k += 16) f(k, 16);
    if (k < width) f(k, width - k);
}

// What decides the scale of a row: its largest magnitude, and 0, or not a number where one element is not finite.
struct Extent {
    Lanes largest, poison;
    BITNET_INLINE void add(const Lanes& v) {
        largest = max(largest, abs(v));
        poison = fma(v, set1(0.0f), poison);
    }
};

BITNET_INLINE void store_codes(const RowTask& t, const float* y, const Extent& extent) {
    float top = reduce_max(extent.largest);
    if (top < 1e-5f) top = 1e-5f;
    const float scale = (1.0f / top) * 127.0f;  // two roundings, as torch evaluates 127 / top
    Lanes sums = set1(0.0f);                    // exact: whole, and far below 2^24
    each_16(t.width, [&](int k, int n) {
        store_int8(t.codes + k, mul(load_first(y + k, n), set1(scale)));
        sums = add(sums, load_i8(t.codes + k));
    });
    const int written = (t.width + 15) / 16 * 16;
    std::memset(t.codes + written, 0, size_t(t.padded_width - written));
    *t.inverse_scale = 1.0f / scale + reduce_add(extent.poison);  // codes say nothing of infinities
    *t.code_sum = sum_of(sums);
}

// activation(gate) * up; returns what the squares of each lane add up to.
BITNET_INLINE Lanes gate_row(const RowTask& t, Activation kind, float* gated) {
    Lanes squares = set1(0.0f);
    each_16(t.width, [&](int k, int n) {
        Lanes x = load_first(t.x + k, n), up = load_first(t.up + k, n);
        if (kind == Activation::silu7) {
            x = min(set1(7.0f), x);  // what is no number stays so: the second of two counts then
            up = max(set1(-7.0f), min(set1(7.0f), up));
        }
        const Lanes v = mul(activate(kind, x), up);
        squares = fma(v, v, squares);
        store_first(gated + k, n, v);
    });
    return squares;
}

void row(const RowTask& t) {
    const float* y = t.x;
    Lanes squares = set1(0.0f);
    if (t.up) {
        float* gated = t.weight || t.codes ? t.scratch : t.out;
        squares = t.activation == Activation::silu    ? gate_row(t, Activation::silu, gated)  // loops without a branch
                  : t.activation == Activation::silu7 ? gate_row(t, Activation::silu7, gated)
                  : t.activation == Activation::gelu  ? gate_row(t, Activation::gelu, gated)
                                                      : gate_row(t, Activation::relu2, gated);
        y = gated;
    } else if (t.weight) {
        each_16(t.width, [&](int k, int n) {
            const Lanes v = load_first(y + k, n);
            squares = fma(v, v, squares);
        });
    }
    Extent extent{set1(0.0f), set1(0.0f)};
    if (t.weight) {
        const Lanes r = set1(1.0f / std::sqrt(reduce_add(squares) / float(t.width) + t.eps));
        float* normed = t.codes ? t.scratch : t.out;
        each_16(t.width, [&](int k, int n) {
            const Lanes v = mul(mul(load_first(y + k, n), r), load_first(t.weight + k, n));
            store_first(normed + k, n, v);
            extent.add(first(n, v, set1(0.0f)));
        });
        y = normed;
    } else if (t.codes) {
        each_16(t.width, [&](int k, int n) { extent.add(load_first(y + k, n)); });
    }
    if (t.codes) store_codes(t, y, extent);
}

}  // namespace

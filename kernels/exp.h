// exp over lanes.
#pragma once
#include <cmath>

#include "kernels.h"

namespace {

// exp of numbers up to 88.37; 0 below -87.33. Cephes' expf: n = round(x / ln 2), a polynomial in x - n ln 2, times 2^n.
// Of N at once, because each step has to wait for the one before.
template <int N>
BITNET_INLINE void exp_each(Lanes (&x)[N]) {
    const Lanes lowest = set1(-87.33654475f);
    Lanes n[N], r[N], p[N];
    const auto all = [](auto step) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) step(i);
    };
    all([&](int i) { r[i] = max(lowest, x[i]); });
    all([&](int i) { n[i] = round(mul(r[i], set1(1.44269504088896341f))); });
    all([&](int i) { r[i] = fma(n[i], set1(-0.693359375f), r[i]); });
    all([&](int i) { r[i] = fma(n[i], set1(2.12194440e-4f), r[i]); });
    all([&](int i) { p[i] = fma(set1(1.9875691500e-4f), r[i], set1(1.3981999507e-3f)); });
    all([&](int i) { p[i] = fma(p[i], r[i], set1(8.3334519073e-3f)); });
    all([&](int i) { p[i] = fma(p[i], r[i], set1(4.1665795894e-2f)); });
    all([&](int i) { p[i] = fma(p[i], r[i], set1(1.6666665459e-1f)); });
    all([&](int i) { p[i] = fma(p[i], r[i], set1(5.0000001201e-1f)); });
    all([&](int i) { p[i] = fma(p[i], mul(r[i], r[i]), add(r[i], set1(1.0f))); });
    all([&](int i) { x[i] = below(x[i], lowest, scaled(p[i], n[i]), set1(0.0f)); });
}

BITNET_INLINE Lanes exp(const Lanes& x) {
    Lanes one[1] = {min(set1(88.3762626647949f), x)};
    exp_each(one);
    return one[0];
}

}  // namespace

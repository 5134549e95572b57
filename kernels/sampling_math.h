// Arithmetic of the sampler that gives the same bits on every CPU: one rounding an operation, no libm.
// Must be compiled with -ffp-contract=off and without -ffast-math. Baseline vector units may compute several at once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace bitnet {

// exp(0) as a weight: weights are fixed-point numbers, so that their sums are exact in any order.
constexpr int kWeightBits = 40;
constexpr uint64_t kWeightOfBest = uint64_t{1} << kWeightBits;

template <class To, class From>
inline To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// exp(-d) for d >= 0 (infinity too), as torch's float32 softmax would have it: relative error below 2e-6, for d < 1
// below 3e-7. 2^-y = 2^-n * 2^r, |r| <= 1/2, and 2^r by its Taylor polynomial of degree 6. Clamps as integers:
// compilers turn a comparison of floats, which may trap, into a branch.
inline float exp_of_minus(float d) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(y) in the low bits
    constexpr int32_t kMax = 0x42800000;   // the bits of 64.0f; d is not negative, so its bits are in its order
    const int32_t bits = bit_cast<int32_t>(d);
    const float y = bit_cast<float>(bits < kMax ? bits : kMax) * 1.44269504f;
    const float shifted = y + kRound;
    const float r = (shifted - kRound) - y;
    float p = 1.5403530393381608e-04f;  // ln(2)^6 / 6!
    p = p * r + 1.3333558146428443e-03f;
    p = p * r + 9.6181291076284769e-03f;
    p = p * r + 5.5504108664821576e-02f;
    p = p * r + 2.4022650695910072e-01f;
    p = p * r + 6.9314718055994529e-01f;
    p = p * r + 1.0f;
    return bit_cast<float>(bit_cast<uint32_t>(p) - (bit_cast<uint32_t>(shifted) << 23));
}

// round(2^40 * x) for 0 <= x <= 1: behind 2^12 the last bit of a double is 2^-40.
inline uint64_t weight_of(float x) {
    return bit_cast<uint64_t>(static_cast<double>(x) + 4096.0) & ((uint64_t{1} << 52) - 1);
}

// Natural logarithm of a positive normal number: exponent * ln 2 + 2 atanh((m - 1) / (m + 1)), m in [0.7, 1.42).
inline double log_of(double x) {
    const uint64_t bits = bit_cast<uint64_t>(x);
    int exponent = static_cast<int>(bits >> 52) - 1023;
    double m = bit_cast<double>((bits & ((uint64_t{1} << 52) - 1)) | (uint64_t{1023} << 52));
    if (m > 1.4142135623730951) {
        m = m * 0.5;
        exponent += 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double z = s * s;
    double sum = 0.0;
    for (int k = 25; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
    return exponent * 0.69314718055994531 + 2.0 * s * sum;
}

// Which noise: the draw for the token at `position` of alternative `choice` of the request with this seed.
struct NoiseKey {
    uint64_t seed;
    uint64_t choice;
    uint64_t position;
};

// 64 random bits: the first two words of Philox4x32-10 (Salmon et al. 2011) with key = seed and
// counter = (position, choice), low words first. Triton's and CUDA's generators compute the same function.
inline uint64_t noise_of(const NoiseKey& key) {
    uint32_t c0 = static_cast<uint32_t>(key.position), c1 = static_cast<uint32_t>(key.position >> 32);
    uint32_t c2 = static_cast<uint32_t>(key.choice), c3 = static_cast<uint32_t>(key.choice >> 32);
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t left = uint64_t{0xD2511F53u} * c0, right = uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<uint32_t>(right >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(right);
        c2 = static_cast<uint32_t>(left >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(left);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return uint64_t{c1} << 32 | c0;
}

// Into the version of the pass that calls it.
#define BITNET_INLINE inline __attribute__((always_inline))

// Four words of Threefry4x32-13 (Salmon et al. 2011) with key = (noise, 0, 0), low word first, and
// counter = (counter, of, 0, 0): its additions and rotations fit into vectors of any processor. The rounds are
// unrolled here, for compilers make vectors of loops that hold no other.
struct Words {
    uint32_t w0, w1, w2, w3;
};

template <uint32_t round>
BITNET_INLINE void threefry_round(Words& x, const uint32_t (&key)[5]) {
    constexpr int kRotations[8][2] = {{10, 26}, {11, 21}, {13, 27}, {23, 5}, {6, 20}, {17, 11}, {25, 10}, {18, 20}};
    constexpr int kLeft = kRotations[round % 8][0], kRight = kRotations[round % 8][1];
    uint32_t &left = round % 2 == 0 ? x.w1 : x.w3, &right = round % 2 == 0 ? x.w3 : x.w1;
    x.w0 += left;
    left = std::rotl(left, kLeft) ^ x.w0;
    x.w2 += right;
    right = std::rotl(right, kRight) ^ x.w2;
    if constexpr (round % 4 == 3) {
        constexpr uint32_t kTime = round / 4 + 1;
        x.w0 += key[kTime % 5];
        x.w1 += key[(kTime + 1) % 5];
        x.w2 += key[(kTime + 2) % 5];
        x.w3 += key[(kTime + 3) % 5] + kTime;
    }
}

template <uint32_t... rounds>
BITNET_INLINE Words threefry(uint64_t noise, uint32_t counter, uint32_t of,
                             std::integer_sequence<uint32_t, rounds...>) {
    const uint32_t low = static_cast<uint32_t>(noise), high = static_cast<uint32_t>(noise >> 32);
    const uint32_t key[5] = {low, high, 0, 0, 0x1BD11BDAu ^ low ^ high};
    Words x{counter + low, of + high, 0, 0};
    (threefry_round<rounds>(x, key), ...);
    return x;
}

// What the 32 bits are that things get, under the 64 bits of a draw. 16 counters make the words of 64 things on end,
// first the first word of each, then the second, and so on.
enum class Word : uint32_t { token, block, place };
constexpr size_t kBlock = 64, kCounters = kBlock / 4;

BITNET_INLINE Words threefry(uint64_t noise, size_t counter, Word of) {
    return threefry(noise, static_cast<uint32_t>(counter), static_cast<uint32_t>(of),
                    std::make_integer_sequence<uint32_t, 13>());
}

BITNET_INLINE void words_of(uint64_t noise, size_t block, Word of, uint32_t* words) {
    for (size_t j = 0; j < kCounters; ++j) {
        const Words four = threefry(noise, block * kCounters + j, of);
        words[j] = four.w0;
        words[kCounters + j] = four.w1;
        words[2 * kCounters + j] = four.w2;
        words[3 * kCounters + j] = four.w3;
    }
}

inline uint32_t word_of(uint64_t noise, size_t thing, Word of) {
    const Words four = threefry(noise, thing / kBlock * kCounters + thing % kCounters, of);
    const uint32_t words[4] = {four.w0, four.w1, four.w2, four.w3};
    return words[thing % kBlock / kCounters];
}

// -log(1 - u) for u = (word + 1/2) / 2^32: a standard exponential variable, at least 2^-33. The logarithm is of an
// exact number that keeps all its digits, so that small words, which win, are as good as others.
inline double exponential_of(uint32_t word) { return -log_of(1.0 - (static_cast<double>(word) + 0.5) * 0x1p-32); }

// Minus its logarithm is a standard Gumbel variable, the noise of a token: an exponential variable of its own. Those of
// a block are made the least first: of 64 it is a 64th of one, in any place as likely, and as they have no memory each
// of the others is that much and another one. So a block tells by its first how far its tokens get at most.
inline double time_of(uint64_t noise, size_t token) {
    const size_t block = token / kBlock;
    const double first = exponential_of(word_of(noise, block, Word::block)) / kBlock;
    const bool is_first = word_of(noise, block, Word::place) >> 26 == token % kBlock;
    return is_first ? first : first + exponential_of(word_of(noise, token, Word::token));
}

// How a token does in the race for a draw, whose noise this is: it is so far behind the best.
inline double score_of(uint64_t noise, size_t token, float distance) {
    return -log_of(time_of(noise, token)) - static_cast<double>(distance);
}

}  // namespace bitnet

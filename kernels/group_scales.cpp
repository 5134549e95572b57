#include "group_scales.h"

#include <cstring>
#include <vector>

#include "lanes_generic.h"

namespace bitnet {

namespace {

// Whether a finite number is one of 16 bits; which one.
bool to_half(float x, uint16_t* half) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const int exponent = int(bits >> 23 & 255) - 127;
    const uint32_t mantissa = (bits & 0x7fffff) | 0x800000;
    *half = uint16_t(bits >> 16 & 0x8000);
    if ((bits & 0x7fffffff) == 0) return true;
    if (exponent > 15 || exponent < -24) return false;
    const int shift = exponent < -14 ? -1 - exponent : 13;
    *half |= uint16_t(exponent < -14 ? mantissa >> shift : uint32_t(exponent + 14) * 1024 + (mantissa >> shift));
    return (mantissa & ((1u << shift) - 1)) == 0;
}

}  // namespace

GroupScales::GroupScales(int64_t count) : count_(count), memory_(count * 4) {}

float* GroupScales::floats() {
    if (is_half_) {
        Memory wide(count_ * 4);
        const auto* halves = reinterpret_cast<const uint16_t*>(memory_.data());
        for (int64_t i = 0; i < count_; i++) reinterpret_cast<float*>(wide.data())[i] = half_to_float(halves[i]);
        memory_ = wide;
        is_half_ = false;
    }
    return reinterpret_cast<float*>(memory_.data());
}

void GroupScales::settle(const std::function<Memory(int64_t)>& take) {
    const float* scales = floats();
    std::vector<uint16_t> halves(static_cast<size_t>(count_));
    bool fit = true;
    for (int64_t i = 0; i < count_ && fit; i++) fit = to_half(scales[i], &halves[size_t(i)]);
    Memory settled = take(count_ * (fit ? 2 : 4));
    std::memcpy(settled.data(), fit ? static_cast<const void*>(halves.data()) : scales, size_t(settled.bytes()));
    memory_ = settled;
    is_half_ = fit;
}

}  // namespace bitnet

#include "weights.h"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

#include "lanes_generic.h"

namespace bitnet {

Memory::Memory(int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0) return;
    void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = {static_cast<uint8_t*>(p), Unmap{size_t(bytes)}};
#ifdef MADV_HUGEPAGE
    madvise(p, size_t(bytes), MADV_HUGEPAGE);
#endif
}

void Unmap::operator()(uint8_t* p) const { munmap(p, size); }

namespace {

constexpr uint64_t kLowBits = 0x0303030303030303;

// One output dword of a step: 16 codes of one row, as bytes, packed field by field.
inline uint32_t pack_step(uint64_t low, uint64_t high) {
    return uint32_t(low) | uint32_t(low >> 32) << 2 | uint32_t(high) << 4 | uint32_t(high >> 32) << 6;
}

// The codes 0..2 of 8 columns of a row, one a byte, whatever the source layout.
struct Source {
    const uint8_t* row;
    int shift;
    bool signed_codes;

    uint64_t eight(int64_t column) const {
        uint64_t x;
        std::memcpy(&x, row + column, 8);
        if (signed_codes) {  // -1, 0, 1 -> 0, 1, 2 without a carry between bytes
            const uint64_t top = 0x8080808080808080;
            return ((x & ~top) + 0x0101010101010101) ^ (x & top);
        }
        return x >> shift & kLowBits;
    }
    uint8_t one(int64_t column) const { return signed_codes ? uint8_t(row[column] + 1) : row[column] >> shift & 3; }
};

// Bits that are set in no valid code: anything above 2, and the pair 11.
inline uint64_t invalid(uint64_t codes) { return (codes & ~kLowBits) | (codes & codes >> 1 & 0x0101010101010101); }

[[noreturn]] void refuse(const Source& source, int64_t row, int64_t columns) {
    int64_t column = 0;
    while (column < columns - 1 && source.one(column) <= 2) column++;
    throw std::invalid_argument("row " + std::to_string(row) + ", column " + std::to_string(column) +
                                " holds no ternary code");
}

void pack_row(const Source& source, int64_t row, int64_t columns, uint8_t* out) {
    uint64_t bad = 0;
    int64_t k = 0;
    for (; k + kStepColumns <= columns; k += kStepColumns, out += kStepBytes) {
        const uint64_t low = source.eight(k), high = source.eight(k + 8);
        bad |= invalid(low) | invalid(high);
        const uint32_t packed = pack_step(low, high);
        std::memcpy(out, &packed, 4);
    }
    if (k < columns) {
        uint8_t tail[16];
        std::memset(tail, 1, 16);
        for (int64_t i = k; i < columns; i++) tail[i - k] = source.one(i);
        uint64_t low, high;
        std::memcpy(&low, tail, 8);
        std::memcpy(&high, tail + 8, 8);
        bad |= invalid(low) | invalid(high);
        const uint32_t packed = pack_step(low, high);
        std::memcpy(out, &packed, 4);
    }
    if (bad) refuse(source, row, columns);
}

}  // namespace

TernaryWeight::TernaryWeight(int64_t columns, const std::vector<int64_t>& rows)
    : columns_(columns), steps_((columns + kStepColumns - 1) / kStepColumns), part_rows_(rows) {
    if (columns < 1 || columns > kMaxColumns) throw std::invalid_argument("a ternary matrix has 1 to 262144 columns");
    first_groups_.push_back(0);
    for (int64_t part : rows) {
        if (part < 1) throw std::invalid_argument("a ternary matrix has at least one row");
        for (int64_t r = 0; r < part; r += kGroupRows)
            groups_.push_back({rows_ + r, int(part - r < kGroupRows ? part - r : kGroupRows), 0.0f});
        rows_ += part;
        first_groups_.push_back(int64_t(groups_.size()));
    }
    memory_ = Memory(int64_t(groups_.size()) * steps_ * kStepBytes);
}

void TernaryWeight::pack(int part, const uint8_t* data, Layout layout, float scale) {
    const int64_t rows = part_rows_[size_t(part)], quarter = (rows + 3) / 4;
    const int64_t first = first_groups_[size_t(part)], last = first_groups_[size_t(part) + 1];
    for (int64_t g = first; g < last; g++) {
        groups_[size_t(g)].scale = scale;
        uint8_t* group = memory_.data() + g * steps_ * kStepBytes;
        for (int r = 0; r < kGroupRows; r++) {
            const int64_t row = (g - first) * kGroupRows + r;
            if (row >= rows) {  // padding: weight 0
                for (int64_t s = 0; s < steps_; s++) std::memset(group + s * kStepBytes + 4 * r, 0x55, 4);
            } else if (layout == Layout::codes) {
                pack_row({data + row * columns_, 0, true}, row, columns_, group + 4 * r);
            } else {
                const int shift = int(2 * (row / quarter));
                pack_row({data + row % quarter * columns_, shift, false}, row, columns_, group + 4 * r);
            }
        }
    }
}

namespace {

template <class Read>
float ternarize_with(Read read, int64_t count, int8_t* codes) {
    double lanes[16] = {};
    for (int64_t i = 0; i < count; i++) lanes[i % 16] += std::fabs(read(i));
    double sum = 0;
    for (double lane : lanes) sum += lane;
    float mean = float(sum / double(count));
    const float s = 1.0f / (mean < 1e-5f ? 1e-5f : mean);
    // round half to even of |w s|: above 0.5 is 1, 0.5 itself is 0
    for (int64_t i = 0; i < count; i++) {
        const float w = read(i) * s;
        codes[i] = int8_t((w > 0.5f) - (w < -0.5f));
    }
    return 1.0f / s;
}

}  // namespace

float ternarize(const void* weights, Dtype dtype, int64_t count, int8_t* codes) {
    const auto* f32 = static_cast<const float*>(weights);
    const auto* u16 = static_cast<const uint16_t*>(weights);
    switch (dtype) {
        case Dtype::f32:
            return ternarize_with([&](int64_t i) { return f32[i]; }, count, codes);
        case Dtype::f16:
            return ternarize_with([&](int64_t i) { return half_to_float(u16[i]); }, count, codes);
        default:
            return ternarize_with([&](int64_t i) { return bits_to_float(uint32_t(u16[i]) << 16); }, count, codes);
    }
}

// Sine and cosine in double precision with operations that every machine rounds alike (a libm may choose its code by
// CPU). Reduction by pi/2 in two parts and the polynomials of fdlibm's k_sin.c and k_cos.c; good to 2^20 radians.
static void sine_cosine(double x, double* sine, double* cosine) {
    const int64_t quadrant = int64_t(x * 0.63661977236758134308 + 0.5);
    const double n = double(quadrant);
    const double r = (x - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
    const double z = r * r;
    double s = 1.58969099521155010221e-10;
    for (double c : {-2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
                     8.33333333332248946124e-03, -1.66666666666666324348e-01})
        s = s * z + c;
    s = r + r * z * s;
    double c = -1.13596475577881948265e-11;
    for (double k : {2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
                     -1.38888888888741095749e-03, 4.16666666666666019037e-02})
        c = c * z + k;
    c = 1.0 - (0.5 * z - z * z * c);
    *sine = quadrant & 1 ? c : s;
    *cosine = quadrant & 1 ? s : c;
    if (quadrant & 2) *sine = -*sine;
    if ((quadrant + 1) & 2) *cosine = -*cosine;
}

void rotation(int32_t position, const float* inverse_frequencies, int count, float* cosine, float* sine) {
    for (int j = 0; j < count; j++) {
        double s, c;
        sine_cosine(double(float(position) * inverse_frequencies[j]), &s, &c);
        cosine[j] = float(c);
        sine[j] = float(s);
    }
}

}  // namespace bitnet

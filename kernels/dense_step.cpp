#include "dense_step.h"

#include <algorithm>

#include "ternary_table.h"

namespace bitnet {

namespace {

struct DenseStep final : Step {
    const DenseWeight* weight;
    Rows x, out, residual{};
    bool has_residual;
    static constexpr int64_t kRows = 8;  // a unit
    DenseStep(const DenseWeight* w, Rows i, Rows o, const Rows* r)
        : weight(w), x(i), out(o), has_residual(r != nullptr) {
        if (r) residual = *r;
    }
    int64_t units(const Context&) const override { return (weight->rows + kRows - 1) / kRows; }
    int64_t chunk(const Context&) const override {
        if (weight->codes) return kGroupRows / kRows;
        return std::max<int64_t>(1, kChunkBytes / (kRows * weight->row_bytes()));
    }
    // For the floats of a unit that is made of codes.
    int64_t scratch_floats(int64_t) const override { return weight->codes ? kRows * weight->columns : 0; }
    void work(const Context& c, int64_t first, int64_t last, int thread) const override {
        const int64_t end = std::min(last * kRows, weight->rows);
        const auto* data = static_cast<const uint8_t*>(weight->data);
        if (!weight->codes) return multiply(c, first * kRows, end, data + first * kRows * weight->row_bytes());
        float* floats = c.scratch_of(thread);
        for (int64_t row = first * kRows, next; row < end; row = next) {
            next = std::min(row + kRows, end);
            for (int64_t r = row; r < next; r++)
                weight->codes->read(c.kernels, r, floats + (r - row) * weight->columns);
            multiply(c, row, next, floats);
        }
    }
    void multiply(const Context& c, int64_t row, int64_t end, const void* data) const {
        DenseTask task{};
        task.weight = data;
        task.dtype = weight->dtype;
        task.rows = end - row;
        task.columns = int(weight->columns);
        task.x = c.at(x, 0);
        task.x_stride = x.stride;
        task.tokens = int(c.num_tokens);
        task.out = c.at(out, 0) + row;
        task.out_stride = out.stride;
        task.residual = has_residual ? c.at(residual, 0) + row : nullptr;
        task.residual_stride = residual.stride;
        c.kernels.dense(task);
    }
};

}  // namespace

std::unique_ptr<Step> dense_step(const DenseWeight* weight, Rows x, Rows out, const Rows* residual) {
    return std::make_unique<DenseStep>(weight, x, out, residual);
}

}  // namespace bitnet

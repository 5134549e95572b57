// Inputs of heads in 16 bits: x = a h + b l + e with int8 codes h and l, of which l may be left out.
#pragma once
#include <cstdint>
#include <vector>

#include "executor.h"

namespace bitnet {

constexpr int kInputsInMatrix = 16;  // of one matrix product, and the most that are scored in one pass over the head

// The codes of inputs: h and l of each side by side; h alone; or h and l as a matrix product takes them.
enum class InputForm { whole, rough, matrix };
inline int vectors_of(InputForm form) { return form == InputForm::rough ? 1 : 2; }

// Up to kInputsInMatrix inputs [count, columns] as codes, with the constants that bound their errors (screen.h).
class HeadInputs {
  public:
    // A tile of inputs has `most_vectors` at most; a score is rounded so many times, each time by no more than the
    // largest that it can be.
    HeadInputs(Executor& executor, const float* x, int count, int64_t columns, InputForm form, int most_vectors,
               int roundings);

    int count() const { return count_; }
    const HeadInput& operator[](int i) const { return inputs_[i]; }
    InputForm form() const { return form_; }
    int num_tiles() const {
        const int most = most_vectors_ / vectors_each();
        return form_ == InputForm::matrix ? 1 : (count_ + most - 1) / most;
    }
    int first_of(int tile) const { return count_ * tile / num_tiles(); }
    int count_of(int tile) const { return first_of(tile + 1) - first_of(tile); }
    // The vectors of each input: [columns / 4][vectors_of(tile)][4], in a matrix [vectors_of(tile)][padded_columns].
    const int8_t* codes(int tile) const {
        return reinterpret_cast<const int8_t*>(lines_.data()) + vectors_each() * first_of(tile) * padded_;
    }
    // The vectors of an input and of a tile.
    int vectors_each() const { return bitnet::vectors_of(form_); }
    int vectors_of(int tile) const { return vectors_each() * count_of(tile); }
    int64_t padded_columns() const { return padded_; }

  private:
    // Where the first four codes of an input stand, and how far it is to the next four.
    struct Place {
        int8_t *high, *low;
        int64_t to_high, to_low;
    };
    // `unread` has room for the four codes that are left out.
    Place place_of(int index, int8_t* unread);
    void quantise(const float* x, int index, int64_t columns);

    int count_, most_vectors_, roundings_;
    InputForm form_;
    int64_t padded_;
    HeadInput inputs_[kInputsInMatrix];
    struct alignas(64) Line {  // tiles of a matrix product load several times slower off these boundaries
        int8_t codes[64] = {};
    };
    std::vector<Line> lines_;
};

// |d| and |s q| (screen.h) of each row, rounded up.
struct RowErrors {
    std::vector<float> error, size;
    void set(int64_t row, double error, double size);
};

}  // namespace bitnet

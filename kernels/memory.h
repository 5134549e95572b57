// Memory that weights and caches are kept in.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace bitnet {

// Zeroed memory on a page boundary, taken from the system page by page as it is touched, in huge pages where it can.
class Memory {
  public:
    Memory() = default;
    explicit Memory(int64_t bytes);
    uint8_t* data() const { return data_.get(); }
    int64_t bytes() const { return bytes_; }
    // So many the system has not had to give yet, because nobody has written to their pages; 0 where it does not tell.
    int64_t untouched_bytes() const;

  private:
    friend class Arena;
    Memory(int64_t bytes, std::shared_ptr<uint8_t> data) : bytes_(bytes), data_(std::move(data)) {}

    int64_t bytes_ = 0;
    std::shared_ptr<uint8_t> data_;
};

// Throws std::invalid_argument where what is asked for cannot be.
inline void require(bool ok, const char* why) {
    if (!ok) throw std::invalid_argument(why);
}

// A mutex of the process that made it, which in a fork may be held for ever.
class HomeMutex {
  public:
    // `owner` is what it guards, as errors name it.
    explicit HomeMutex(const char* owner);
    bool is_at_home() const;
    // Throws std::invalid_argument in another process.
    std::unique_lock<std::mutex> lock() const;

  private:
    const char* owner_;
    const int64_t process_;
    mutable std::mutex mutex_;
};

// Pieces of memory on end, so that huge pages cover all of it: a matrix by itself has small ones at both ends, which
// cost a tenth of the speed at which it is read.
class Arena {
  public:
    // Zeroed, on a boundary of 64 bytes; lives as long as it is used. Throws std::invalid_argument in another process
    // than the one that made the arena.
    Memory take(int64_t bytes);

  private:
    HomeMutex mutex_{"an arena"};
    Memory chunk_;
    int64_t used_ = 0;
};

}  // namespace bitnet

#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace bitnet {

constexpr size_t kHugePage = 1 << 21;
constexpr int64_t kArenaChunk = 1 << 26;

Memory::Memory(int64_t bytes) : bytes_(bytes) {
    if (bytes < 0 || bytes > int64_t(1) << 46) throw std::bad_alloc();
    if (bytes == 0) return;
    const size_t size = size_t(bytes), whole = size + kHugePage;
    void* p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    const auto unmap = [p, whole](uint8_t*) { munmap(p, whole); };
    const size_t misaligned = reinterpret_cast<uintptr_t>(p) % kHugePage;
    data_ = {static_cast<uint8_t*>(p) + (misaligned ? kHugePage - misaligned : 0), unmap};
#ifdef MADV_HUGEPAGE
    madvise(data_.get(), size, MADV_HUGEPAGE);
#endif
}

int64_t Memory::untouched_bytes() const {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), at_a_time = size_t(1) << 16;
    std::vector<unsigned char> here(at_a_time);
    int64_t untouched = 0;
    for (size_t at = 0; at < size_t(bytes_); at += at_a_time * page) {
        const size_t length = std::min(size_t(bytes_) - at, at_a_time * page), count = (length + page - 1) / page;
#ifdef __APPLE__
        if (mincore(data() + at, length, reinterpret_cast<char*>(here.data()))) return 0;
#else
        if (mincore(data() + at, length, here.data())) return 0;
#endif
        untouched +=
            std::count_if(here.begin(), here.begin() + int64_t(count), [](unsigned char is) { return !(is & 1); });
    }
    return std::min(bytes_, untouched * int64_t(page));
}

HomeMutex::HomeMutex(const char* owner) : owner_(owner), process_(getpid()) {}

bool HomeMutex::is_at_home() const { return getpid() == process_; }

std::unique_lock<std::mutex> HomeMutex::lock() const {
    if (!is_at_home())
        throw std::invalid_argument(std::string(owner_) + " does not survive fork(): make one in this process");
    return std::unique_lock<std::mutex>(mutex_);
}

Memory Arena::take(int64_t bytes) {
    if (bytes <= 0) return Memory(bytes);
    const auto guard = mutex_.lock();
    const int64_t start = (used_ + 63) / 64 * 64;
    if (bytes > chunk_.bytes() - start) {
        chunk_ = Memory(std::max(bytes, kArenaChunk));
        used_ = bytes;
        return Memory(bytes, {chunk_.data_, chunk_.data()});
    }
    used_ = start + bytes;
    return Memory(bytes, {chunk_.data_, chunk_.data() + start});
}

}  // namespace bitnet

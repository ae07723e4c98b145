#include "testing/guarded_buffer.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.hpp"

namespace folio::inline v0::verify {
namespace {

size_t os_page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void set_page_access(void* begin, size_t bytes, int access) {
  if (bytes > 0 && mprotect(begin, bytes, access) != 0) core::fail(ErrorCode::kOutOfMemory, "mprotect failed");
}

constexpr size_t kMostKept = size_t{1} << 18;  ///< bytes; of larger buffers few are of the same size

/// Kept mappings that no buffer has.
class Spares {
 public:
  /// Null if there is none of this size.
  void* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& all = by_bytes_[bytes];
    if (all.empty()) return nullptr;
    void* const mapping = all.back();
    all.pop_back();
    return mapping;
  }
  void give(void* mapping, size_t bytes) {
    const std::lock_guard lock(mutex_);
    by_bytes_[bytes].push_back(mapping);
  }

 private:
  std::mutex mutex_;
  std::map<size_t, std::vector<void*>> by_bytes_;
};

Spares& spares() {
  static Spares all;
  return all;
}

}  // namespace

GuardedBuffer::GuardedBuffer(size_t bytes, GuardedEnd end, uint8_t fill_value) : bytes_(bytes) {
  const size_t page = os_page();
  const size_t inner = (bytes + page - 1) / page * page;
  mapped_ = inner + 2 * page;
  mapping_ = spares().take(mapped_);
  kept_ = mapping_ != nullptr;
  if (!kept_) mapping_ = mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    core::fail(ErrorCode::kOutOfMemory, "mmap of ", mapped_, " bytes failed");
  }
  auto* first = static_cast<std::byte*>(mapping_) + page;
  open_ = {{first, inner}};
  set_access(PROT_READ | PROT_WRITE);
  if (kept_) std::memset(first, 0, inner);
  data_ = end == GuardedEnd::kBack ? first + (inner - bytes) : first;
  if (fill_value != 0) fill(fill_value);
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      kept_(std::exchange(other.kept_, false)),
      open_(std::exchange(other.open_, {})) {}

GuardedBuffer& GuardedBuffer::operator=(GuardedBuffer&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(kept_, other.kept_);
  std::swap(open_, other.open_);
  return *this;
}

GuardedBuffer::~GuardedBuffer() {
  if (kept_) {
    spares().give(mapping_, mapped_);
  } else if (mapping_ != nullptr) {
    munmap(mapping_, mapped_);
  }
}

bool GuardedBuffer::can_be_kept() const {
  return mapping_ != data_ && mapped_ <= kMostKept;
}

void GuardedBuffer::fill(uint8_t value) const {
  if (bytes_ > 0) std::memset(data_, value, bytes_);
}

GuardedBuffer GuardedBuffer::sparse(size_t bytes) {
  GuardedBuffer buffer;
  buffer.bytes_ = bytes;
  buffer.mapped_ = (bytes + os_page() - 1) / os_page() * os_page();
  void* mapping = mmap(nullptr, buffer.mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED)
    core::fail(ErrorCode::kOutOfMemory, "mmap of ", buffer.mapped_, " bytes of addresses failed");
  buffer.mapping_ = buffer.data_ = mapping;
  return buffer;
}

void GuardedBuffer::open(size_t offset, size_t bytes, uint8_t fill_value) {
  auto* const base = static_cast<std::byte*>(mapping_);
  size_t begin = offset / os_page() * os_page();
  const size_t end = (offset + bytes + os_page() - 1) / os_page() * os_page();
  if (!open_.empty()) begin = std::max(begin, static_cast<size_t>(open_.back().begin - base) + open_.back().bytes);
  if (begin >= end) return;
  open_.push_back({base + begin, end - begin});
  set_page_access(open_.back().begin, open_.back().bytes, PROT_READ | PROT_WRITE);
  std::memset(open_.back().begin, fill_value, open_.back().bytes);
}

void GuardedBuffer::set_access(int access) const {
  for (const Range& range : open_) set_page_access(range.begin, range.bytes, access);
}

void GuardedBuffer::protect() const {
  set_access(PROT_READ);
}

void GuardedBuffer::unprotect() const {
  set_access(PROT_READ | PROT_WRITE);
}

}  // namespace folio::inline v0::verify

#include "replay/memory.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <utility>

#include "folio/types/error.hpp"

namespace folio::replay {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

MappedMemory::MappedMemory(size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  mapped_ = bytes + kHugePage;  // room to align in
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw Error(ErrorCode::kOutOfMemory, fmt::format("{} MiB of memory could not be had", bytes >> 20));
  }
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<std::byte*>((address + kHugePage - 1) & ~(kHugePage - 1));
#ifdef MADV_HUGEPAGE
  if (bytes >= 8 * kHugePage) madvise(data_, bytes & ~(kHugePage - 1), MADV_HUGEPAGE);  // only advice: failing is fine
#endif
}

MappedMemory::~MappedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

}  // namespace folio::replay

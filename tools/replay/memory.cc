#include "replay/memory.hpp"

#include <fmt/format.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <climits>
#include <utility>
#include <vector>

#include "folio/types/error.hpp"
#include "replay/gpu.hpp"

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

MappedMemory MappedMemory::on(const Context& context, size_t bytes) {
  if (!gpu::is_gpu(context)) return MappedMemory(bytes);
  MappedMemory memory;
  memory.gpu_ = bytes == 0 ? nullptr : gpu::allocate(context, bytes);
  memory.data_ = memory.gpu_.get();
  memory.bytes_ = bytes;
  return memory;
}

MappedMemory MappedMemory::of_cache_on(const Context& context, size_t bytes) {
  MappedMemory memory = on(context, bytes);
  if (memory.mapping_ != nullptr) interleave_over_nodes(memory.data_, bytes);
  return memory;
}

MappedMemory MappedMemory::shared_with(const Context& context, size_t bytes) {
  if (!gpu::is_gpu(context)) return MappedMemory(bytes);
  MappedMemory memory;
  memory.gpu_ = bytes == 0 ? nullptr : gpu::allocate_shared(context, bytes);
  memory.data_ = memory.gpu_.get();
  memory.bytes_ = bytes;
  return memory;
}

MappedMemory::~MappedMemory() {
  if (mapping_ != nullptr) munmap(mapping_, mapped_);
}

size_t MappedMemory::resident_bytes() const {
  if (gpu_ != nullptr) return 0;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  constexpr size_t kPagesAtOnce = 4096;
  std::vector<unsigned char> states(kPagesAtOnce);
  size_t resident = 0;
  for (size_t at = 0; at < bytes_; at += kPagesAtOnce * page) {
    const size_t length = std::min(bytes_ - at, kPagesAtOnce * page);
    if (mincore(data_ + at, length, states.data()) != 0) return 0;
    const auto pages = static_cast<std::ptrdiff_t>((length + page - 1) / page);
    resident += page * static_cast<size_t>(std::count_if(states.begin(), states.begin() + pages,
                                                         [](unsigned char state) { return (state & 1) != 0; }));
  }
  return resident;
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : gpu_(std::move(other.gpu_)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(gpu_, other.gpu_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool interleave_over_nodes(void* data, size_t bytes) {
  // As many nodes as any Linux build knows; shorter masks are refused.
  std::array<unsigned long, 1024 / (sizeof(unsigned long) * CHAR_BIT)> nodes{};
  constexpr unsigned long kBits = 1024;
  int policy = MPOL_DEFAULT;
  if (syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) != 0 || policy != MPOL_DEFAULT) return false;
  if (syscall(SYS_get_mempolicy, nullptr, nodes.data(), kBits, nullptr, MPOL_F_MEMS_ALLOWED) != 0) return false;
  return syscall(SYS_mbind, data, bytes, MPOL_INTERLEAVE, nodes.data(), kBits, 0U) == 0;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

}  // namespace folio::replay

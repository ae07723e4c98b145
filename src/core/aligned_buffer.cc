#include "core/aligned_buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>

#include "core/error.hpp"

namespace folio::inline v0::core {

AlignedBuffer::AlignedBuffer(size_t bytes, size_t alignment) {
  require(std::has_single_bit(alignment) && alignment <= kHugePage, "alignment is ", alignment,
          "; powers of two up to ", kHugePage, " are taken");
  if (bytes == 0) return;
  const bool huge = bytes >= kHugePageThreshold;
  // posix_memalign wants at least a pointer's alignment.
  const size_t boundary = huge ? kHugePage : std::max(alignment, sizeof(void*));
  void* memory = nullptr;
  // Sizes beyond PTRDIFF_MAX cannot exist; some allocators abort on them instead of returning null.
  if (bytes > static_cast<size_t>(std::numeric_limits<std::ptrdiff_t>::max()) - boundary ||
      posix_memalign(&memory, boundary, bytes) != 0) {
    fail(ErrorCode::kOutOfMemory, "no memory for ", bytes, " bytes aligned to ", boundary);
  }
  data_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  // Advice only: where the kernel has no transparent huge pages, ordinary ones serve. Whole huge pages are advised, so
  // that the neighbours of the buffer keep their own setting.
#ifdef MADV_HUGEPAGE
  if (huge) madvise(data_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

AlignedBuffer::~AlignedBuffer() {
  std::free(data_);
}

}  // namespace folio::inline v0::core

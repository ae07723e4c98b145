// Copies that arrive late: cp.async, and TMA with its tensor maps.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "emulated_cta.hpp"

namespace folio::emulation {
namespace {

void complete(const Copy& copy) {
  std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, static_cast<size_t>(copy.zeros));
}
void complete(const Box& copy) {
  TensorMap map;
  std::memcpy(&map, &copy.map, sizeof(map));
  uint32_t linear = 0;
  uint32_t i[5];
  for (i[4] = 0; i[4] < map.box[4]; ++i[4]) {
    for (i[3] = 0; i[3] < map.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < map.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < map.box[1]; ++i[1]) {
          for (i[0] = 0; i[0] < map.box[0]; ++i[0], linear += map.bytes) {
            bool inside = true;
            unsigned char* element = map.data;
            for (int d = 0; d < 5; ++d) {
              const int64_t c = int64_t{copy.at[d]} + i[d];
              inside = inside && c >= 0 && c < static_cast<int64_t>(map.dims[d]);
              element += c * static_cast<int64_t>(map.strides[d]);
            }
            uint32_t to = copy.shared + linear;
            if (map.side_by_side > 0) to ^= map.side_by_side == 128 ? (to >> 7 & 7) << 4 : (to >> 7 & 3) << 4;
            if (copy.store) {
              if (inside) std::memcpy(element, grid->base + to, map.bytes);
            } else if (inside) {
              std::memcpy(grid->base + to, element, map.bytes);
            } else {
              std::memset(grid->base + to, 0, map.bytes);
            }
          }
        }
      }
    }
  }
  if (copy.store) return;
  Barrier& barrier = grid->barriers.at(copy.barrier);
  barrier.bytes -= linear;
  end_phase(barrier);
}

/// At once or later.
template <typename AnyCopy>
void begin(const AnyCopy& copy, std::vector<AnyCopy>& late) {
  if (next_random() % 2 == 0) {
    complete(copy);
  } else {
    late.push_back(copy);
  }
}
template <typename AnyCopy>
void complete_late(std::vector<AnyCopy>& late, size_t n) {
  const AnyCopy copy = late[n];
  late[n] = late.back();
  late.pop_back();
  complete(copy);
}

/// Completes the running thread's cp.async of groups below `groups`.
void complete_groups(int32_t groups) {
  auto& copies = grid->copies[static_cast<size_t>(grid->current)];
  for (size_t n = copies.size(); n-- > 0;) {
    if (copies[n].group < groups) complete_late(copies, n);
  }
}

}  // namespace

void complete_any() {
  auto& copies = grid->copies[next_random() % grid->copies.size()];
  if (!copies.empty()) complete_late(copies, next_random() % copies.size());
  if (!grid->boxes.empty()) {
    complete_late(grid->boxes, next_random() % grid->boxes.size());
    grid->idle = 0;
  } else if (!grid->arrivals.empty()) {
    const size_t n = next_random() % grid->arrivals.size();
    const Arrival arrival = grid->arrivals[n];
    grid->arrivals.erase(grid->arrivals.begin() + static_cast<std::ptrdiff_t>(n));
    mbarrier_arrive(arrival.barrier, 1);
  }
}

void copy_later(void* to, const void* from, int32_t bytes, int32_t zeros) {
  const auto thread = static_cast<size_t>(grid->current);
  begin(Copy{to, from, bytes, zeros, grid->groups[thread]}, grid->copies[thread]);
}
void commit_copies() {
  ++grid->groups[static_cast<size_t>(grid->current)];
}
void finish_groups(int32_t pending) {
  complete_groups(grid->groups[static_cast<size_t>(grid->current)] - pending);
}
void cp_async_mbarrier_arrive(uint32_t barrier) {
  complete_groups(std::numeric_limits<int32_t>::max());  // late enough: others have run since
  if (next_random() % 2 == 0) {
    mbarrier_arrive(barrier, 1);
  } else {
    grid->arrivals.push_back({barrier, grid->current});
  }
}

void finish_copies() {
  complete_groups(std::numeric_limits<int32_t>::max());
  for (size_t n = grid->boxes.size(); n-- > 0;) {
    if (grid->boxes[n].owner == grid->current && grid->boxes[n].store) complete_late(grid->boxes, n);
  }
}

CUresult encode_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* dims,
                    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                    CUtensorMapFloatOOBfill fill) {
  static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
  const uint16_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const bool exchanges = swizzle != CU_TENSOR_MAP_SWIZZLE_NONE;
  const uint16_t side_by_side = !exchanges ? 0 : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;
  if ((type != CU_TENSOR_MAP_DATA_TYPE_UINT16 && type != CU_TENSOR_MAP_DATA_TYPE_UINT8) || rank != 5 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      (exchanges && swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_64B) ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || (exchanges && box[0] * bytes > side_by_side) ||
      box[0] * bytes % 16 != 0 || reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap made{};
  made.bytes = bytes;
  made.side_by_side = side_by_side;
  made.data = static_cast<unsigned char*>(data);
  for (int d = 0; d < 5; ++d) {
    made.dims[d] = dims[d];
    made.strides[d] = d == 0 ? bytes : strides[d - 1];
    made.box[d] = box[d];
    const bool stride_fits = d == 0 || (made.strides[d] % 16 == 0 && made.strides[d] < uint64_t{1} << 40);
    if (dims[d] == 0 || dims[d] > uint64_t{1} << 32 || box[d] == 0 || box[d] > 256 || steps[d] != 1 || !stride_fits) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

namespace {

/// Returns the bytes of the box.
uint32_t check_box(uint32_t shared, const CUtensorMap& map) {
  TensorMap read{};
  std::memcpy(&read, &map, sizeof(read));
  if (shared % 128 != 0) throw std::runtime_error("a box begins at no multiple of 128");
  if (read.side_by_side > 0 && shared % 512 != 0) {
    throw std::runtime_error("a box with exchanged pieces begins at no multiple of 512");
  }
  uint32_t bytes = read.bytes;
  for (const uint32_t box : read.box) bytes *= box;
  return bytes;
}

}  // namespace

void note_read(uint32_t shared) {
  if (!grid->barriers.empty()) grid->reads[static_cast<size_t>(grid->current)].push_back(shared);
}
void complete_reads() {
  grid->reads[static_cast<size_t>(grid->current)].clear();
}

void copy_box(uint32_t shared, const CUtensorMap* map, uint32_t barrier, const int32_t (&at)[5]) {
  const uint32_t end = shared + check_box(shared, *map);
  for (const std::vector<uint32_t>& reads : grid->reads) {
    for (const uint32_t at_16B : reads) {
      if (at_16B >= shared && at_16B < end) throw std::runtime_error("TMA may overtake a read of what it overwrites");
    }
  }
  begin({*map, {at[0], at[1], at[2], at[3], at[4]}, shared, barrier, grid->current, false}, grid->boxes);
}

void store_box(const CUtensorMap* map, uint32_t shared, const int32_t (&at)[5]) {
  check_box(shared, *map);
  begin({*map, {at[0], at[1], at[2], at[3], at[4]}, shared, 0, grid->current, true}, grid->boxes);
}

}  // namespace folio::emulation

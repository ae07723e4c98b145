#include "kernels/cpu/generic/cache/cache_kernels.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

/// Slots are dealt to groups in runs of 16: a multiple of a token pair, and long enough for neighbouring writes to stay
/// in one thread's cache lines.
constexpr int kRunShift = 4;

/// The group of a slot's run. Multiplying by 2^64 / golden ratio spreads runs evenly, also where engines write at equal
/// offsets of many pages; the high halves of the products are multiplied down into [0, num_groups).
int64_t group_of(int64_t slot, int64_t num_groups) noexcept {
  const uint64_t mixed = (static_cast<uint64_t>(slot >> kRunShift) * 0x9e3779b97f4a7c15u) >> 32;
  return static_cast<int64_t>((mixed * static_cast<uint64_t>(num_groups)) >> 32);
}

void write_row(const WriteHalf& half, int64_t token, int64_t page, int64_t offset, int64_t head) noexcept {
  const ConstRow from{half.from.row(token, head), 1};
  const Row to{half.to.row(page, offset, head), half.to.step};
  if (half.to.has_scales()) {
    quantize_row(half.conversion, from, to, half.head_dim, 1.0f, half.to.scale(page, offset, head));
  } else {
    convert_row(half.conversion, from, to, half.head_dim, 1.0f, half.to_scale.at(0, head));
  }
}

}  // namespace

void write_slots(const WriteParams& params, int64_t group, int64_t head_begin, int64_t head_end) noexcept {
  for (int64_t token = 0; token < params.num_slots; ++token) {
    const int64_t slot = params.slots[token];
    if (slot < 0 || (params.num_groups > 1 && group_of(slot, params.num_groups) != group)) continue;
    const int64_t page = slot / params.page_size;
    const int64_t offset = slot % params.page_size;
    const bool whole_pair = params.has_v && params.v.to.step == 2 && !params.v.to.has_scales() && offset % 2 == 0 &&
                            token + 1 < params.num_slots && params.slots[token + 1] == slot + 1;
    for (int64_t head = head_begin; head < head_end; ++head) {
      write_row(params.k, token, page, offset, head);
      if (whole_pair) {
        const WriteHalf& v = params.v;
        write_row(params.k, token + 1, page, offset + 1, head);
        convert_pair(v.conversion, v.from.row(token, head), v.from.row(token + 1, head), v.to.row(page, offset, head),
                     v.head_dim, 1.0f, v.to_scale.at(0, head));
      } else if (params.has_v) {
        write_row(params.v, token, page, offset, head);
      }
    }
    token += whole_pair ? 1 : 0;
  }
}

}  // namespace folio::inline v0::kernels::generic

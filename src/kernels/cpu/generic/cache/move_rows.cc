#include <algorithm>

#include "kernels/cpu/generic/cache/cache_kernels.hpp"

namespace folio::inline v0::kernels::generic {
namespace {

void convert_half(const PageHalf& half, int64_t page_size, int64_t from_page, int64_t to_page, int64_t head) noexcept {
  const float from_scale = half.from_scale.at(0, head);
  const float to_scale = half.to_scale.at(0, head);
  if (half.from.has_scales() && half.to.has_scales()) {  // values are copied
    for (int64_t token = 0; token < page_size; ++token) {
      half.to.scale(to_page, token, head) = half.from.scale(from_page, token, head);
    }
  } else if (half.from.has_scales() || half.to.has_scales()) {
    for (int64_t token = 0; token < page_size; ++token) {
      const ConstRow from{half.from.row(from_page, token, head), half.from.step};
      const Row to{half.to.row(to_page, token, head), half.to.step};
      if (half.to.has_scales()) {
        quantize_row(half.conversion, from, to, half.head_dim, from_scale, half.to.scale(to_page, token, head));
      } else {
        convert_row(half.conversion, from, to, half.head_dim, half.from.scale(from_page, token, head), to_scale);
      }
    }
    return;
  }
  if (half.from.step == 1 && half.to.step == 2) {
    for (int64_t token = 0; token < page_size; token += 2) {
      convert_pair(half.conversion, half.from.row(from_page, token, head), half.from.row(from_page, token + 1, head),
                   half.to.row(to_page, token, head), half.head_dim, from_scale, to_scale);
    }
    return;
  }
  // With equal steps, what is contiguous on both sides converts in one go: a token pair, or a head's whole page.
  const bool pairs = half.from.step == 2 && half.to.step == 2;
  const int64_t rows = pairs ? page_size / 2 : page_size;
  const int64_t row = pairs ? 2 * half.head_dim : half.head_dim;
  const bool solid = half.from.step == half.to.step && half.from.token_stride == row * half.from.element_bytes &&
                     half.to.token_stride == row * half.to.element_bytes;
  if (solid) {
    half.conversion.convert(half.from.row(from_page, 0, head), half.to.row(to_page, 0, head), rows * row, from_scale,
                            to_scale);
    return;
  }
  for (int64_t token = 0; token < page_size; ++token) {
    convert_row(half.conversion, {half.from.row(from_page, token, head), half.from.step},
                {half.to.row(to_page, token, head), half.to.step}, half.head_dim, from_scale, to_scale);
  }
}

void gather_row(const GatherHalf& half, int64_t row, int64_t page, int64_t offset, int64_t head,
                int64_t target) noexcept {
  const float scale = half.from.has_scales() ? half.from.scale(page, offset, head) : half.from_scale.at(row, head);
  convert_row(half.conversion, {half.from.row(page, offset, head), half.from.step}, {half.to.row(target, head), 1},
              half.head_dim, scale, 1.0f);
}

}  // namespace

ScaleTable scale_table(const Scale& scale) noexcept {
  switch (scale.granularity) {
    case ScaleGranularity::kPerTensor: return {scale.data, scale.value, 0, 0};
    case ScaleGranularity::kPerHead: return {scale.data, scale.value, 0, 1};
    case ScaleGranularity::kPerRequest: return {scale.data, scale.value, 1, 0};
    case ScaleGranularity::kPerRequestAndHead: return {scale.data, scale.value, scale.request_stride, 1};
  }
  return {};
}

void convert_page_head(const PageParams& params, int64_t index, int64_t head) noexcept {
  const int64_t from_page = params.source[index];
  const int64_t to_page = params.destination[index];
  convert_half(params.k, params.page_size, from_page, to_page, head);
  if (params.has_v) convert_half(params.v, params.page_size, from_page, to_page, head);
}

void gather_tokens(const GatherParams& params, int64_t begin, int64_t end) noexcept {
  const PageTableView& table = params.table;
  int64_t row_begin = 0;  // of the row's tokens among all
  for (int64_t row = 0; row < params.num_rows && row_begin < end; ++row) {
    if (params.kv_len[row] == 0) continue;  // such a row's place in the table was not checked
    const int64_t row_end = row_begin + params.kv_len[row];
    const int64_t first_page =
        table.kind == PageTableKind::kCsr ? table.indptr[row] : row * table.row_stride + table.first_column;
    for (int64_t target = std::max(begin, row_begin); target < std::min(end, row_end); ++target) {
      const int64_t token = target - row_begin;
      const int64_t page = table.indices[first_page + token / params.page_size];
      const int64_t offset = token % params.page_size;
      for (int64_t head = 0; head < params.num_heads; ++head) {
        gather_row(params.k, row, page, offset, head, target);
        gather_row(params.v, row, page, offset, head, target);
      }
    }
    row_begin = row_end;
  }
}

}  // namespace folio::inline v0::kernels::generic

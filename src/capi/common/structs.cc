#include "capi/common/structs.hpp"

#include <algorithm>
#include <bit>

namespace folio::inline v0::capi {

void check_struct_size(uint64_t size, const KnownSizes& known, const char* name, const char* init_function) {
  const bool earlier = std::find(known.earlier.begin(), known.earlier.end(), size) != known.earlier.end();
  const bool right = earlier || (size >= known.now && size <= kLargestStruct);
  core::require(right, name, ".struct_size is ", size, "; it has ", known.now, " bytes in this version (",
                init_function, " or the ..._INIT macro sets it, with every default)");
}

void check_struct(const void* data, uint32_t size, const KnownSizes& known, const char* name,
                  const char* init_function) {
  check_struct_size(size, known, name, init_function);
  const auto* bytes = static_cast<const unsigned char*>(data);
  if (size <= known.now) return;
  const bool known_only = std::all_of(bytes + known.now, bytes + size, [](unsigned char byte) { return byte == 0; });
  if (!known_only) {
    core::fail(ErrorCode::kUnsupported, name, " has fields beyond byte ", known.now,
               " that are not 0; this version of the library does not know them");
  }
}

std::string to_string(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

DType to_dtype(int32_t value, const char* name) {
  return to_enum(value, DType::kInt8, name);
}

// Views have the same layout on both sides (layout.cc).
TensorView to_view(const folio_tensor_view& view, const char* name) {
  to_dtype(view.dtype, name);
  return std::bit_cast<TensorView>(view);
}

ConstTensorView to_view(const folio_const_tensor_view& view, const char* name) {
  to_dtype(view.dtype, name);
  return std::bit_cast<ConstTensorView>(view);
}

LseView to_lse(const folio_lse_view* lse) {
  if (lse == nullptr) return {};
  to_enum(lse->base, LseBase::k2, "lse.base");
  return std::bit_cast<LseView>(*lse);
}

PageTableView to_table(const folio_page_table_view& table, const char* name) {
  to_enum(table.kind, PageTableKind::kDense, name);
  return std::bit_cast<PageTableView>(table);
}

KvCacheView to_cache(const folio_kv_cache& given, const char* name) {
  const std::string field(name);
  to_enum(given.view.format, KvFormat::kFp8DsMla, (field + ".format").c_str());
  to_dtype(given.view.dtype, (field + ".dtype").c_str());
  return std::bit_cast<KvCacheView>(given);
}

Scale to_scale(const folio_scale& scale, const char* name) {
  to_enum(scale.granularity, ScaleGranularity::kPerRequestAndHead, name);
  Scale converted = std::bit_cast<Scale>(scale);
  if (converted.value == 0.0f) converted.value = Scale{}.value;
  return converted;
}

Scale to_scale(const folio_scale* scale, const char* name) {
  return scale == nullptr ? Scale{} : to_scale(*scale, name);
}

KvShard to_shard(const folio_kv_shard& shard) {
  const bool zero = shard.world == 0 && shard.rank == 0 && shard.interleave == 0;
  return zero ? KvShard{} : std::bit_cast<KvShard>(shard);
}

KvShard to_shard(const folio_kv_shard* shard) {
  return shard == nullptr ? KvShard{} : to_shard(*shard);
}

folio_kv_cache to_c(const KvCacheView& view) {
  return std::bit_cast<folio_kv_cache>(view);
}

}  // namespace folio::inline v0::capi

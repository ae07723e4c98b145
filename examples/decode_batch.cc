// Attention of a decode batch in one call. Two requests generate one token each. Their 20 and 7 keys lie in the pages
// 4 and 1, and 2, of a cache of 5 pages of 16 tokens.
#include <folio/folio.hpp>
#include <vector>

int main() {
  const folio::KvCacheShape shape{5, 16, /*num_kv_heads=*/2, /*head dims=*/64, 64, folio::DType::kFloat32};
  std::vector<float> k(5 * 16 * 2 * 64, 0.5f), v(k.size(), 2.0f), q(2 * 8 * 64, 1.0f), out(q.size());
  const std::vector<int32_t> page_table{4, 1, 2, 0}, seq_lens{20, 7};
  folio::PagedAttention attention(folio::Context::cpu());  // once
  attention({.q = {q.data(), shape.dtype, {2, 8, 64}},     // once a layer and step
             .cache = folio::make_nhd_view(shape, k.data(), v.data()),
             .page_table = folio::dense_table(page_table, /*num_rows=*/2, /*row_stride=*/2),
             .seq_lens = seq_lens,
             .out = {out.data(), shape.dtype, {2, 8, 64}}});
  return out.front() == 2.0f && out.back() == 2.0f ? 0 : 1;  // all values are 2, so every weighted mean is
}

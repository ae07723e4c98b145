#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backends/common/context_memory.hpp"
#include "backends/token_pool/device/kv_lists_rule.hpp"
#include "backends/token_pool/step.hpp"

namespace folio::inline v0::backends::token_pool {

/// Which keys a reading takes from the cache.
struct ReadingKind {
  WrapperRole role = WrapperRole::kFull;
  bool ragged = false;  ///< new tokens' keys come from k and v
  MaskKind mask = MaskKind::kCausal;
  int32_t page_size = 1;  ///< tokens of an entry of its lists
  friend bool operator==(const ReadingKind&, const ReadingKind&) = default;
};

/// Memory that lists are given; what is empty is their own. On the context's device.
struct ListMemory {
  std::span<int32_t> kv_indptr;
  std::span<int32_t> kv_last_page_len;
  std::span<int32_t> kv_indices;  ///< of captured batches: its size is the most that fits
  bool fixed = false;             ///< nothing may move: kv_indices is given, the others have room for max_rows
  ListReport* report = nullptr;   ///< of a GPU: what its kernels cannot list
};

/// The lists of one reading: which tokens, where they lie, at which positions; on the host, for planning and for
/// engines that look, and on the context's device, for kernels.
class KvLists {
 public:
  KvLists(const Context& context, const TokenPoolConfig& config, const ReadingKind& kind, const ListMemory& memory);

  /// Throws what create_kv_indices throws, on a GPU as far as lengths say. There a kernel builds the lists on `stream`:
  /// of the tokens that the step's lengths on the host say, for a plan from these; with `device_lengths` of those that
  /// the device's lengths say, for a plan on the device. The host's lists are lengths and positions only, and empty
  /// where the host knows no lengths.
  void build(const Step& step, bool device_lengths, Stream stream);

  std::span<const int32_t> lens() const { return lens_; }              ///< (host)
  std::span<const int32_t> whole_lens() const { return whole_lens_; }  ///< (host) with the keys of other ranks
  std::span<const int32_t> first_pos() const { return first_pos_; }    ///< (host)
  const int32_t* device_lens() const { return device_.kv_lens; }
  const int32_t* device_whole_lens() const { return device_.whole_lens; }  ///< over ranks
  const int32_t* device_first_pos() const { return device_.first_pos; }
  const int32_t* device_cu_q() const { return device_.cu_q; }

  PageTableView table() const;
  KvWrapper wrapper() const;

 private:
  const PageTableView& request_table() const;
  void build_on_host(const Step& step);
  void check_places(const Step& step) const;
  void build_on_gpu(const Step& step, const KvRangeJob& ranges, bool device_lengths, Stream stream);

  Device where_;
  const TokenPoolConfig* config_;
  ReadingKind kind_;
  ListMemory memory_;
  std::vector<int32_t> lens_, whole_lens_, first_pos_, table_starts_;          ///< (host) [R]
  std::span<const int32_t> cu_q_, kv_indptr_, kv_last_page_len_, kv_indices_;  ///< the step's, on the device
  int32_t num_rows_ = 0;
  std::vector<int32_t> upload_;  ///< what a plan on the host was made from, on its way to the device
  std::vector<int32_t> own_indptr_, own_indices_, own_last_page_len_;
  ContextMemory gpu_lists_, gpu_indices_;
  struct DeviceLists {
    const int32_t* kv_lens = nullptr;
    const int32_t* whole_lens = nullptr;
    const int32_t* first_pos = nullptr;
    const int32_t* cu_q = nullptr;
  } device_;
};

}  // namespace folio::inline v0::backends::token_pool

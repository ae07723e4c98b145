// Batches made from others for a GPU: on the host, from the host's copies, and then enqueued there.
#include "backends/common/batch_checks.hpp"
#include "backends/common/gpu_memory.hpp"
#include "core/error.hpp"
#include "folio/backends/virtual_batches.hpp"

namespace folio::inline v0::backends {
namespace {

/// The arrays of a storage, one after the other in its memory on the device.
class DeviceArrays {
 public:
  DeviceArrays(const Context& context, VirtualBatchStorage& storage, size_t entries, Stream stream)
      : device_(context.device().index), stream_(stream) {
    const size_t bytes = entries * sizeof(int32_t);
    if (bytes > storage.device_bytes) {
      storage.device = gpu::allocate(device_, bytes);
      storage.device_bytes = bytes;
    }
    next_ = static_cast<int32_t*>(storage.device.get());
  }
  std::span<const int32_t> add(std::span<const int32_t> values) {
    const std::span<const int32_t> there(next_, values.size());
    gpu::upload(device_, next_, values.data(), values.size_bytes(), stream_);
    next_ += values.size();
    return there;
  }

 private:
  int32_t device_;
  Stream stream_;
  int32_t* next_;
};

}  // namespace

CommonAttentionMetadata make_local_attention_virtual_batches(const Context& context, int32_t chunk,
                                                             const CommonAttentionMetadata& batch, int32_t page_size,
                                                             VirtualBatchStorage& storage, Stream stream) {
  if (!on_gpu(context)) return make_local_attention_virtual_batches(chunk, batch, page_size, storage);
  CommonAttentionMetadata host = host_batch(context, batch);
  core::require(batch.block_table_host.data != nullptr || batch.num_reqs == 0,
                "block_table_host is empty; on a GPU the pages of virtual batches are read from it");
  host.block_table = batch.block_table_host;
  CommonAttentionMetadata local = make_local_attention_virtual_batches(chunk, host, page_size, storage);
  DeviceArrays arrays(context, storage,
                      storage.query_start_loc.size() + storage.seq_lens.size() + storage.block_table.size(), stream);
  local.where = Where::kDevice;
  local.query_start_loc_host = storage.query_start_loc;
  local.seq_lens_host = storage.seq_lens;
  local.block_table_host = local.block_table;
  local.query_start_loc = arrays.add(storage.query_start_loc);
  local.seq_lens = arrays.add(storage.seq_lens);
  local.block_table.data = arrays.add(storage.block_table).data();
  return local;
}

CommonAttentionMetadata make_kv_sharing_fast_prefill_common_attn_metadata(const Context& context,
                                                                          const CommonAttentionMetadata& batch,
                                                                          std::span<const int32_t> logits_indices_host,
                                                                          VirtualBatchStorage& storage, Stream stream) {
  if (!on_gpu(context)) return make_kv_sharing_fast_prefill_common_attn_metadata(batch, storage);
  CommonAttentionMetadata host = host_batch(context, batch);
  core::require(logits_indices_host.size() == batch.logits_indices_padded.size(), "logits_indices_host has ",
                logits_indices_host.size(), " entries; logits_indices_padded has ", batch.logits_indices_padded.size());
  host.logits_indices_padded = logits_indices_host;
  CommonAttentionMetadata result = make_kv_sharing_fast_prefill_common_attn_metadata(host, storage);
  const bool made = result.query_start_loc.data() == storage.query_start_loc.data();
  result.where = Where::kDevice;
  result.seq_lens = batch.seq_lens;
  result.seq_lens_host = batch.seq_lens_host;
  result.query_start_loc_host = host.query_start_loc;
  result.query_start_loc = batch.query_start_loc;
  result.positions = made ? std::span<const int64_t>() : batch.positions;
  if (made) {
    DeviceArrays arrays(context, storage, storage.query_start_loc.size(), stream);
    result.query_start_loc_host = storage.query_start_loc;
    result.query_start_loc = arrays.add(storage.query_start_loc);
  }
  return result;
}

}  // namespace folio::inline v0::backends

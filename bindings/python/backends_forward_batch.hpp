#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "backends.hpp"
#include "backends_names.hpp"
#include "folio/backends/token_pool.hpp"
#include "pools.hpp"

/// The token-pool backend's batches.
namespace folio::python::token_pool {

using bk::ForwardMode;

/// SpecInfo, with its arrays.
struct Spec {
  int32_t draft_token_num = 0;
  Numbers<uint8_t> tree_mask, tree_mask_cpu;
  Numbers<int32_t> kv_indptr, kv_indices, kv_indptr_cpu;

  bk::SpecInfo view() const {
    return {draft_token_num,  tree_mask.view(),  tree_mask_cpu.view(),
            kv_indptr.view(), kv_indices.view(), kv_indptr_cpu.view()};
  }
};

/// ForwardBatch, with its arrays.
struct Batch {
  ForwardMode forward_mode = ForwardMode::kIdle;
  int32_t batch_size = 0;
  int64_t seq_lens_sum = -1;
  Numbers<int32_t> req_pool_indices, seq_lens, seq_lens_cpu;
  Numbers<int32_t> extend_prefix_lens, extend_prefix_lens_cpu, extend_seq_lens, extend_seq_lens_cpu;
  Numbers<int32_t> encoder_lens, encoder_lens_cpu;
  Numbers<int64_t> out_cache_loc, encoder_out_cache_loc, window_out_cache_loc;
  Spec spec_info;
  nb::object pool_object, window_pool_object;
  const Pool* pool = nullptr;
  const Pool* window_pool = nullptr;

  bk::ForwardBatch view() const {
    bk::ForwardBatch batch;
    batch.forward_mode = forward_mode;
    batch.batch_size = batch_size;
    batch.req_pool_indices = req_pool_indices.view();
    batch.seq_lens = seq_lens.view();
    batch.seq_lens_cpu = seq_lens_cpu.view();
    batch.seq_lens_sum = seq_lens_sum;
    batch.out_cache_loc = out_cache_loc.view();
    batch.extend_prefix_lens = extend_prefix_lens.view();
    batch.extend_prefix_lens_cpu = extend_prefix_lens_cpu.view();
    batch.extend_seq_lens = extend_seq_lens.view();
    batch.extend_seq_lens_cpu = extend_seq_lens_cpu.view();
    batch.encoder_lens = encoder_lens.view();
    batch.encoder_lens_cpu = encoder_lens_cpu.view();
    batch.encoder_out_cache_loc = encoder_out_cache_loc.view();
    batch.spec_info = spec_info.view();
    batch.token_to_kv_pool = pool == nullptr ? nullptr : pool->pool.get();
    batch.window_token_to_kv_pool = window_pool == nullptr ? nullptr : window_pool->pool.get();
    batch.window_out_cache_loc = window_out_cache_loc.view();
    return batch;
  }
};

/// Where an array of a batch lies, and must lie.
struct Placed {
  const char* name;
  const std::optional<Array>* array;
  bool given;
  bool host;  ///< whatever the context
};

template <typename Element>
Placed placed(const char* name, const Numbers<Element>& numbers, bool host = false) {
  return {name, &numbers.array(), !numbers.view().empty(), host};
}

/// Throws Error(kInvalidArgument) where an array lies elsewhere than a backend on `device` reads it.
void require_places(const Device& device, std::initializer_list<Placed> all);
void require_spec_places(const Device& device, const Spec& spec);
void require_batch_places(const Device& device, const Batch& batch);

/// A KvPool or None. Throws nb::type_error.
const Pool* to_pool(nb::handle source, const std::string& name);
void require_pool_on(const Device& device, const Pool* pool, const char* name);

void bind_forward_batch(nb::module_& m);
void bind_step_inputs(nb::module_& m);

}  // namespace folio::python::token_pool

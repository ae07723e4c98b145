#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "backends/token_pool/pool_test_util.hpp"

namespace folio::inline v0::backends::testing {

/// A batch of decodes or drafts through a captured shape of `captured_bs` requests, padded.
struct Replayed {
  Replayed(PoolFixture& batch_fixture, TokenPoolBackend& used, int32_t captured_bs)
      : fixture(batch_fixture),
        drafts(is_target_verify(fixture.lengths.mode) ? fixture.batch.spec_info.draft_token_num : 1),
        bs(captured_bs),
        inputs(captured_bs + 2, drafts),
        backend(used) {
    const size_t tokens = static_cast<size_t>(bs) * static_cast<size_t>(drafts);
    const auto rows = [&](const std::vector<std::byte>& memory, int64_t row) {
      std::vector<std::byte> padded(memory);
      padded.resize(tokens * static_cast<size_t>(row * size_of(fixture.setup.q_dtype)));
      return padded;
    };
    q_memory = rows(fixture.q_memory, fixture.q.shape[1]);
    k_memory = rows(fixture.k_memory, fixture.k.shape[1]);
    v_memory = rows(fixture.v_memory, fixture.v.shape[1]);
    out_memory = rows(fixture.out_memory, fixture.out.shape[1]);
  }

  GraphBatchExtras extras(const ForwardBatch& batch) const {
    return {batch.encoder_lens, batch.encoder_lens_cpu, batch.spec_info};
  }

  void capture() {
    ForwardBatch nothing = fixture.batch;
    nothing.batch_size = 0;
    nothing.req_pool_indices = nothing.seq_lens = nothing.seq_lens_cpu = {};
    nothing.encoder_lens = nothing.encoder_lens_cpu = {};
    nothing.out_cache_loc = {};
    const bool tree = !nothing.spec_info.tree_mask.empty();
    ForwardBatch padding = own.copy(tree ? inputs.pad(fixture.batch, bs) : inputs.pad(nothing, bs));
    const std::vector<int32_t> encoders(static_cast<size_t>(bs), 0), ones(static_cast<size_t>(bs), 1),
        rows(static_cast<size_t>(bs), 0);
    if (fixture.setup.encoder_decoder) padding.encoder_lens = padding.encoder_lens_cpu = encoders;
    backend.init_forward_metadata_capture_cuda_graph(bs, bs * drafts, rows, ones, fixture.lengths.mode,
                                                     extras(padding));
  }

  std::string replay(const RadixAttention& layer) {
    const ForwardBatch padded = own.copy(inputs.pad(fixture.batch, bs));
    GraphBatchExtras more = extras(padded);
    std::span<const int32_t> seq_lens_cpu = padded.seq_lens_cpu;
    if (!host_lengths) seq_lens_cpu = more.encoder_lens_cpu = {};
    backend.init_forward_metadata_replay_cuda_graph(bs, padded.req_pool_indices, padded.seq_lens, padded.seq_lens_sum,
                                                    padded.forward_mode, seq_lens_cpu, more);
    const int64_t tokens = int64_t{bs} * drafts;
    const auto view = [&](const std::vector<std::byte>& memory, const ConstTensorView& like) {
      return ConstTensorView(memory.data(), like.dtype, {tokens, like.shape[1]});
    };
    const TensorView out(out_memory.data(), fixture.out.dtype, {tokens, fixture.out.shape[1]});
    layer.forward(backend, view(q_memory, fixture.q),
                  layer.is_cross_attention ? ConstTensorView() : view(k_memory, fixture.k),
                  layer.is_cross_attention ? ConstTensorView() : view(v_memory, fixture.v), padded, out);
    std::memcpy(fixture.out_memory.data(), out_memory.data(), fixture.out_memory.size());
    return fixture.wrong_output(layer, false);
  }

  bool host_lengths = true;  ///< replays are given them
  PoolFixture& fixture;
  int32_t drafts;
  int32_t bs;
  GraphInputs inputs;
  OwnBatch own;
  TokenPoolBackend& backend;
  std::vector<std::byte> q_memory, k_memory, v_memory, out_memory;
};

}  // namespace folio::inline v0::backends::testing

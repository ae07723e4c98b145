#include "folio/backends/token_pool/graph_inputs.hpp"

#include <algorithm>
#include <numeric>

#include "backends/common/context_memory.hpp"
#include "backends/token_pool/device/graph_inputs_rule.hpp"
#include "backends/token_pool/gpu.hpp"
#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::backends {
namespace {

using core::require;
using token_pool::GraphInput;
using token_pool::GraphInputsJob;
using token_pool::StagedArrays;

/// The arrays of a batch's inputs, wherever they lie; what the batch does not have is empty.
struct Arrays {
  std::span<const int32_t> rows, seq_lens, encoder_lens;
  std::span<const int64_t> slots, window_slots;
  std::span<const uint8_t> tree;
};

/// Memory for the inputs of the largest batch.
struct Memory {
  int32_t *rows = nullptr, *seq_lens = nullptr, *encoder_lens = nullptr;
  int64_t *slots = nullptr, *window_slots = nullptr;
  uint8_t* tree = nullptr;
};

/// `given`, or its twin on the host where there is one and it is to be read.
template <typename T>
std::span<const T> prefer(bool host, std::span<const T> twin, std::span<const T> given) {
  return host && !twin.empty() ? twin : given;
}

Arrays arrays_of(const ForwardBatch& batch, bool host) {
  Arrays arrays;
  arrays.rows = batch.req_pool_indices;
  arrays.seq_lens = prefer(host, batch.seq_lens_cpu, batch.seq_lens);
  arrays.encoder_lens = prefer(host, batch.encoder_lens_cpu, batch.encoder_lens);
  arrays.slots = batch.out_cache_loc;
  arrays.window_slots = batch.window_out_cache_loc;
  arrays.tree = prefer(host, batch.spec_info.tree_mask_cpu, batch.spec_info.tree_mask);
  return arrays;
}

/// Only what has a copy on the host.
Arrays host_copies_of(const ForwardBatch& batch) {
  Arrays arrays;
  arrays.seq_lens = batch.seq_lens_cpu;
  arrays.encoder_lens = batch.encoder_lens_cpu;
  arrays.tree = batch.spec_info.tree_mask_cpu;
  return arrays;
}

/// Where inputs go, as far as `has` has them.
template <typename T>
GraphInput<T> input(std::span<const T> has, T* to, bool all) {
  return {has.data(), all || !has.empty() ? to : nullptr};
}

void check_count(const char* name, size_t size, size_t count) {
  require(size == count, name, " has ", size, " entries; the batch has ", count);
}

/// Both on the host, where both are given.
template <typename T>
void check_equal(const char* name, std::span<const T> given, std::span<const T> twin) {
  require(given.empty() || twin.empty() || std::ranges::equal(given, twin), name, " and ", name, "_cpu differ");
}

}  // namespace

std::vector<int32_t> capture_batch_sizes(int32_t max_running_requests) {
  require(max_running_requests >= 1, "max_running_requests is ", max_running_requests, "; it must be 1 or more");
  std::vector<int32_t> sizes;
  const auto next = [](int32_t size) {
    if (size < 4) return size * 2;
    if (size < 16) return size + 4;
    if (size < 256) return size + 8;
    return size < 496 ? size + 16 : size == 496 ? 512 : size + 32;
  };
  for (int32_t size = 1; size <= max_running_requests; size = next(size)) sizes.push_back(size);
  return sizes;
}

struct GraphInputs::State {
  State(const Device& device, int32_t most, int32_t per_request)
      : where(device), max_bs(most), tokens(per_request), host_memory(Device{}), gpu_memory(device) {
    require(most >= 1 && per_request >= 1, "max_bs is ", most, " and tokens_per_request ", per_request,
            "; both must be 1 or more");
    job.tokens_per_request = per_request;
    host = lay_out(host_memory);
    if (!on_gpu()) return;
    gpu = lay_out(gpu_memory);
    stages = token_pool::gpu::make_stages(where.index);
  }

  bool on_gpu() const { return where.type != DeviceType::kCpu; }

  Memory lay_out(ContextMemory& memory) const {
    const auto requests = static_cast<size_t>(max_bs);
    const size_t slots = core::checked_mul(requests, static_cast<size_t>(tokens));
    const size_t tree = core::checked_mul(requests, static_cast<size_t>(job.tree_bytes()));
    memory.reserve(core::checked_add(core::checked_mul(slots, 2 * sizeof(int64_t)),
                                     core::checked_add(3 * requests * sizeof(int32_t), tree)));
    Memory inputs;
    inputs.slots = memory.as<int64_t>();
    inputs.window_slots = inputs.slots + slots;
    inputs.rows = reinterpret_cast<int32_t*>(inputs.window_slots + slots);
    inputs.seq_lens = inputs.rows + requests;
    inputs.encoder_lens = inputs.seq_lens + requests;
    inputs.tree = reinterpret_cast<uint8_t*>(inputs.encoder_lens + requests);
    return inputs;
  }

  void check(const ForwardBatch& batch, const Arrays& arrays, int32_t padded_bs) const {
    require(is_decode_or_idle(batch.forward_mode) || is_target_verify(batch.forward_mode), "forward_mode is ",
            to_string(batch.forward_mode), "; decode, idle and target_verify are captured");
    require(batch.batch_size >= 0 && batch.batch_size <= padded_bs && padded_bs <= max_bs, "a batch of ",
            batch.batch_size, " requests is padded to ", padded_bs, "; the inputs have room for ", max_bs);
    require(!is_target_verify(batch.forward_mode) || batch.spec_info.draft_token_num == tokens,
            "spec_info.draft_token_num is ", batch.spec_info.draft_token_num, "; the inputs are for ", tokens,
            " tokens a request");
    require(batch.spec_info.kv_indptr.empty(),
            "spec_info.kv_indptr is given; draft rows are padded by who builds them");
    const auto requests = static_cast<size_t>(batch.batch_size);
    const size_t slots = requests * static_cast<size_t>(tokens);
    const size_t tree = requests * static_cast<size_t>(job.tree_bytes());
    check_count("req_pool_indices", arrays.rows.size(), requests);
    check_count("seq_lens", arrays.seq_lens.size(), requests);
    check_count("out_cache_loc", arrays.slots.size(), slots);
    if (!arrays.window_slots.empty()) check_count("window_out_cache_loc", arrays.window_slots.size(), slots);
    if (!arrays.encoder_lens.empty()) check_count("encoder_lens", arrays.encoder_lens.size(), requests);
    if (!arrays.tree.empty()) check_count("tree_mask", arrays.tree.size(), tree);
    const Arrays copies = host_copies_of(batch);
    if (!copies.seq_lens.empty()) check_count("seq_lens_cpu", copies.seq_lens.size(), requests);
    if (!copies.encoder_lens.empty()) check_count("encoder_lens_cpu", copies.encoder_lens.size(), requests);
    if (!copies.tree.empty()) check_count("tree_mask_cpu", copies.tree.size(), tree);
    if (on_gpu()) return;
    check_equal("seq_lens", batch.seq_lens, batch.seq_lens_cpu);
    check_equal("encoder_lens", batch.encoder_lens, batch.encoder_lens_cpu);
    check_equal("spec_info.tree_mask", batch.spec_info.tree_mask, batch.spec_info.tree_mask_cpu);
  }

  /// `all`: what every batch has, besides what this one has more.
  GraphInputsJob job_of(const Arrays& from, const Memory& to, bool all) const {
    GraphInputsJob filled = job;
    filled.rows = input(from.rows, to.rows, all);
    filled.seq_lens = input(from.seq_lens, to.seq_lens, all);
    filled.slots = input(from.slots, to.slots, all);
    filled.encoder_lens = input(from.encoder_lens, to.encoder_lens, false);
    filled.window_slots = input(from.window_slots, to.window_slots, false);
    filled.tree = input(from.tree, to.tree, false);
    return filled;
  }

  void fill_on_host(const GraphInputsJob& filled) const {
    for (int32_t r = 0; r < filled.padded; ++r) fill_graph_request(filled, r, 0, 1);
  }

  void fill_on_gpu(const Arrays& arrays, bool from_host, Stream stream) {
    if (!from_host) {
      token_pool::gpu::fill_graph_inputs(where.index, job_of(arrays, gpu, true), stream);
      return;
    }
    const size_t bytes = StagedArrays::bytes_of(arrays.rows) + StagedArrays::bytes_of(arrays.seq_lens) +
                         StagedArrays::bytes_of(arrays.encoder_lens) + StagedArrays::bytes_of(arrays.slots) +
                         StagedArrays::bytes_of(arrays.window_slots) + StagedArrays::bytes_of(arrays.tree);
    StagedArrays stage(stages->take(bytes, stream));
    const auto staged = [&stage](auto values) { return decltype(values)(stage.add(values), values.size()); };
    const Arrays moved{staged(arrays.rows),  staged(arrays.seq_lens),     staged(arrays.encoder_lens),
                       staged(arrays.slots), staged(arrays.window_slots), staged(arrays.tree)};
    token_pool::gpu::fill_graph_inputs(where.index, job_of(moved, gpu, true), stream);
    stages->used(stream);
  }

  ForwardBatch pad(const ForwardBatch& batch, int32_t padded_bs, bool from_host, Stream stream) {
    from_host |= !on_gpu();
    const Arrays arrays = arrays_of(batch, from_host);
    check(batch, arrays, padded_bs);
    job.num_requests = batch.batch_size;
    job.padded = padded_bs;
    const Arrays known = from_host ? arrays : host_copies_of(batch);
    if (on_gpu()) fill_on_gpu(arrays, from_host, stream);
    fill_on_host(job_of(known, host, !on_gpu()));
    return padded_batch(batch, arrays, known);
  }

  ForwardBatch padded_batch(const ForwardBatch& batch, const Arrays& arrays, const Arrays& known) const {
    const Memory& inputs = on_gpu() ? gpu : host;
    const auto padded = static_cast<size_t>(job.padded);
    const size_t slots = padded * static_cast<size_t>(tokens), tree = padded * static_cast<size_t>(job.tree_bytes());
    ForwardBatch result = batch;
    result.batch_size = job.padded;
    result.req_pool_indices = {inputs.rows, padded};
    result.seq_lens = {inputs.seq_lens, padded};
    result.out_cache_loc = {inputs.slots, slots};
    if (!arrays.window_slots.empty()) result.window_out_cache_loc = {inputs.window_slots, slots};
    if (!arrays.encoder_lens.empty()) result.encoder_lens = {inputs.encoder_lens, padded};
    if (!arrays.tree.empty()) result.spec_info.tree_mask = {inputs.tree, tree};
    // A batch without requests has no lengths that the host would not know.
    const bool lengths_known = !known.seq_lens.empty() || job.num_requests == 0;
    result.seq_lens_cpu = {};
    if (lengths_known) {
      if (known.seq_lens.empty()) std::fill_n(host.seq_lens, padded, token_pool::kPadLength);
      result.seq_lens_cpu = {host.seq_lens, padded};
      result.seq_lens_sum = std::accumulate(result.seq_lens_cpu.begin(), result.seq_lens_cpu.end(), int64_t{0});
    } else if (batch.seq_lens_sum >= 0) {
      result.seq_lens_sum = batch.seq_lens_sum + (job.padded - job.num_requests) * int64_t{token_pool::kPadLength};
    }
    if (!known.encoder_lens.empty()) result.encoder_lens_cpu = {host.encoder_lens, padded};
    if (!known.tree.empty()) result.spec_info.tree_mask_cpu = {host.tree, tree};
    return result;
  }

  Device where;
  int32_t max_bs;
  int32_t tokens;
  GraphInputsJob job;  ///< the present batch's sizes
  ContextMemory host_memory, gpu_memory;
  Memory host, gpu;
  std::unique_ptr<token_pool::HostStages> stages;  ///< of a GPU
};

GraphInputs::GraphInputs(int32_t max_bs, int32_t tokens_per_request)
    : state_(std::make_unique<State>(Device{}, max_bs, tokens_per_request)) {}

GraphInputs::GraphInputs(const Context& context, int32_t max_bs, int32_t tokens_per_request)
    : state_(std::make_unique<State>(context.device(), max_bs, tokens_per_request)) {}

GraphInputs::~GraphInputs() = default;
GraphInputs::GraphInputs(GraphInputs&&) noexcept = default;
GraphInputs& GraphInputs::operator=(GraphInputs&&) noexcept = default;

ForwardBatch GraphInputs::pad(const ForwardBatch& batch, int32_t padded_bs, Stream stream) {
  return state_->pad(batch, padded_bs, /*from_host=*/false, stream);
}

ForwardBatch GraphInputs::pad_from_host(const ForwardBatch& batch, int32_t padded_bs, Stream stream) {
  return state_->pad(batch, padded_bs, /*from_host=*/true, stream);
}

}  // namespace folio::inline v0::backends

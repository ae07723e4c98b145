#include "replay/backend_stack.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "replay/backend_rank.hpp"
#include "replay/gpu.hpp"
#include "replay/step_inputs.hpp"
#if defined(FOLIO_REPLAY_HAS_NCCL)
#include "folio/distributed/nccl_group.hpp"
#endif

namespace folio::replay {
namespace {

template <typename Family>
class BackendStack final : public AttentionStack {
 public:
  BackendStack(const Context& context, const StackConfig& config, distributed::ProcessGroup* processes)
      : context_(context), config_(config), inputs_(context, config), processes_(processes) {
    if (config.ranks == 1) {
      ranks_.push_back(std::make_unique<BackendRank<Family>>(context, config, nullptr));
    } else if (processes != nullptr) {
      ranks_.push_back(std::make_unique<BackendRank<Family>>(context, config, processes));
    } else {
      make_ranks();
    }
    describe();
  }

  void order(std::vector<StepItem>& items) override {
    scheduled_.clear();
    computed_.clear();
    for (const StepItem& item : items) {
      scheduled_.push_back(item.count);
      computed_.push_back(item.first);
    }
    Family::order(ranks_.front()->builder(), scheduled_, computed_, [&](int32_t a, int32_t b) {
      std::swap(items[static_cast<size_t>(a)], items[static_cast<size_t>(b)]);
    });
  }

  void step(const StepBatch& batch, PhaseClock& clock, const OutputObserver& observe) override {
    const RankStep step = describe_step(batch);
    clock.begin();
    on_ranks([&](BackendRank<Family>& rank) { rank.build(step); });
    wait();
    clock.end(Phase::kPlan);
    count_work();
    if (config_.plan_only) return;
    work_.add_writes(config_, batch.num_tokens());
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      inputs_.make_kv(batch, layer);
      inputs_.make_q(batch, layer);
      clock.end(Phase::kInputs, layer);
      for (const auto& rank : ranks_) rank->write(layer, tensors(batch, rank->rank()));
      wait();
      clock.end(Phase::kWrite, layer);
      on_ranks([&](const BackendRank<Family>& rank) { rank.attend(layer, tensors(batch, rank.rank())); });
      wait();
      clock.end(Phase::kRun, layer);
      gather_outputs(batch.num_tokens());
      LayerOutput output = inputs_.output(layer, batch.num_tokens());
      output.fp8_mma_from = fp8_mma_from(batch, layer);
      observe(batch, output);
      clock.end(Phase::kChecks, layer);
    }
  }

  bool stops(bool wanted) override {
    if (processes_ == nullptr) return wanted;
    float votes = wanted ? 1.0f : 0.0f;
    processes_->all_reduce_sum(&votes, 1);
    return votes > 0.0f;
  }

  const StackConfig& config() const override { return config_; }
  const AttentionConfig& attention() const override { return attention_; }
  std::string kernel_name() const override { return kernel_label(ranks_.front()->builder().kernel_name(), fp8_mma_); }
  const WorkCounts& work() const override { return work_; }
  size_t pool_bytes() const override { return ranks_.size() * ranks_.front()->pool().bytes(); }
  size_t workspace_bytes() const override { return workspace_bytes_; }
  /// The builders' workspaces count whole: how much of them was touched is not known here.
  size_t resident_bytes() const override {
    size_t bytes = workspace_bytes_;
    for (const auto& rank : ranks_) bytes += rank->pool().resident_bytes();
    return bytes;
  }
  const KvCacheView& cache(int32_t layer) const override { return ranks_.front()->cache(layer); }

 private:
  /// Ranks of this process, a thread each: on GPUs of their own over NCCL where there are as many, else all on one
  /// device.
  void make_ranks() {
    distributed::ThreadGroupOptions options;
    contexts_.assign(static_cast<size_t>(config_.ranks), context_);
#if defined(FOLIO_REPLAY_HAS_NCCL)
    if (gpu::is_gpu(context_) && gpu::count() >= config_.ranks) {
      for (int32_t r = 0; r < config_.ranks; ++r) contexts_[static_cast<size_t>(r)] = Context::cuda(r);
      threads_ = distributed::make_thread_groups(config_.ranks, options);
      make_gpu_groups();
    }
#endif
    if (gpus_.empty()) {
      options.context = context_;
      threads_ = distributed::make_thread_groups(config_.ranks, options);
    }
    for (size_t r = 0; r < threads_.size(); ++r) {
      distributed::ProcessGroup* const group = gpus_.empty() ? threads_[r].get() : gpus_[r].get();
      ranks_.push_back(std::make_unique<BackendRank<Family>>(contexts_[r], config_, group));
    }
  }

#if defined(FOLIO_REPLAY_HAS_NCCL)
  /// Collective, so on a thread a rank.
  void make_gpu_groups() {
    distributed::NcclGroupOptions nccl;
    nccl.id = distributed::nccl_unique_id();
    nccl.size = config_.ranks;
    gpus_.resize(threads_.size());
    on_threads(threads_.size(), [&](size_t r) {
      distributed::NcclGroupOptions own = nccl;
      own.rank = static_cast<int32_t>(r);
      own.control = threads_[r].get();
      gpus_[r] = distributed::make_nccl_group(contexts_[r], own);
    });
  }
#endif

  /// For every device that ranks are on.
  void wait() const {
    gpu::wait(context_);
    if (gpus_.empty()) return;
    for (const Context& context : contexts_) gpu::wait(context);
  }

  void describe() {
    attention_.num_q_heads = config_.num_q_heads;
    attention_.num_kv_heads = config_.num_kv_heads;
    attention_.head_dim_qk = attention_.head_dim_v = config_.head_dim_qk;
    attention_.q = config_.q;
    attention_.kv = config_.kv;
    attention_.out = config_.out();
    attention_.page_size = config_.page_size;
    attention_.window_left = config_.window_left;
    attention_.determinism = config_.determinism;
  }

  /// The batch as every rank sees it. The dense table is what engines keep; columns grow to the longest request seen.
  RankStep describe_step(const StepBatch& batch) {
    const auto rows = static_cast<size_t>(batch.num_requests());
    for (size_t r = 0; r < rows; ++r)
      columns_ = std::max(columns_, static_cast<size_t>(batch.indptr[r + 1] - batch.indptr[r]));
    block_table_.resize(std::max(block_table_.size(), rows * columns_));
    token_row_.clear();
    positions_.clear();
    RankStep step;
    backends::CommonAttentionMetadata& common = step.common;
    common.query_start_loc = batch.cu_q;
    common.seq_lens = batch.kv_len;
    common.num_reqs = batch.num_requests();
    common.num_actual_tokens = batch.num_tokens();
    for (size_t r = 0; r < rows; ++r) {
      std::copy(batch.indices.begin() + batch.indptr[r], batch.indices.begin() + batch.indptr[r + 1],
                block_table_.begin() + static_cast<std::ptrdiff_t>(r * columns_));
      const int32_t query_len = common.query_len(static_cast<int32_t>(r));
      token_row_.insert(token_row_.end(), static_cast<size_t>(query_len), static_cast<int32_t>(r));
      common.max_query_len = std::max(common.max_query_len, query_len);
      common.max_seq_len = std::max(common.max_seq_len, batch.kv_len[r]);
    }
    for (const TokenRow& token : batch.rows) positions_.push_back(token.position);
    const auto columns = static_cast<int32_t>(columns_);
    common.block_table = {block_table_.data(), common.num_reqs, columns, columns};
    step.token_row = token_row_;
    step.positions = positions_;
    if (config_.cascade == backends::CascadeMode::kHeuristic) step.common_prefix_len = common_prefix(batch);
    return step;
  }

  /// What vLLM's runner hands its backend: what all requests have in common, if the backend finds that it pays.
  int32_t common_prefix(const StepBatch& batch) {
    query_lens_.clear();
    for (size_t r = 0; r + 1 < batch.cu_q.size(); ++r) query_lens_.push_back(batch.cu_q[r + 1] - batch.cu_q[r]);
    backends::CascadeHeuristicInput input;
    input.common_prefix_len = batch.common_prefix_pages(finder_, full_pages_, config_.page_size) * config_.page_size;
    input.query_lens = query_lens_;
    input.num_query_heads = config_.num_q_heads;
    input.num_kv_heads = config_.num_kv_heads;
    input.use_sliding_window = config_.window_left >= 0;
    input.num_sms = context_.concurrency();
    return ranks_.front()->builder().use_cascade_attention(input) ? input.common_prefix_len : 0;
  }

  LayerTensors tensors(const StepBatch& batch, int32_t rank) const {
    const int32_t tokens = batch.num_tokens();
    LayerTensors tensors;
    tensors.q = inputs_.q(tokens, rank);
    tensors.k = inputs_.k(tokens);
    tensors.v = inputs_.v(tokens);
    tensors.out = inputs_.out(tokens, rank);
    return tensors;
  }

  /// Calls body(rank) for every rank that lives here, each on a thread of its own, since ranks wait for each other.
  template <typename Body>
  void on_ranks(const Body& body) {
    if (ranks_.size() == 1) {
      body(*ranks_.front());
    } else {
      on_threads(ranks_.size(), [&](size_t r) { body(*ranks_[r]); });
    }
  }

  /// Calls body(r) for each r. A rank that throws makes the others fail.
  template <typename Body>
  void on_threads(size_t count, const Body& body) {
    std::vector<std::exception_ptr> errors(count);
    std::vector<std::thread> threads;
    for (size_t r = 0; r < count; ++r) {
      threads.emplace_back([&, r] {
        try {
          body(r);
        } catch (const std::exception& error) {
          errors[r] = std::current_exception();
          threads_[r]->fail(error.what());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }

  /// Of ranks in other processes, so that every process can check all heads.
  void gather_outputs(int32_t num_tokens) {
    if (processes_ == nullptr) return;
    const size_t bytes = inputs_.output_bytes_of_rank(num_tokens);
    std::byte* const all = inputs_.outputs();
    processes_->all_gather(all + static_cast<size_t>(processes_->rank()) * bytes, all, bytes);
  }

  int32_t window_of(int32_t layer) const {
    return config_.has_window(layer) ? config_.window_left : -1;
  }

  int32_t layers_of(int32_t window_left) const {
    int32_t layers = 0;
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) layers += window_of(layer) == window_left ? 1 : 0;
    return layers;
  }

  /// Of the layer's plans on all ranks.
  int32_t fp8_mma_from(const StepBatch& batch, int32_t layer) {
    int32_t least = kNoQueries;
    for (const auto& rank : ranks_) {
      const auto& metadata = rank->metadata();
      for_each_plan(metadata, [&](int32_t window_left, const AttentionPlan& plan) {
        if (window_left != window_of(layer)) return;
        least = std::min(least, fp8_rows_.least_queries(plan.op(), batch, metadata.use_cascade));
      });
    }
    return least;
  }

  void count_work() {
    workspace_bytes_ = 0;
    for (const auto& rank : ranks_) {
      rank->build_alone();
      workspace_bytes_ += rank->metadata().workspace.bytes;
      for_each_plan(rank->metadata(), [&](int32_t window_left, const AttentionPlan& plan) {
        fp8_mma_ = fp8_mma_ || plan.op().fp8_mma();
        work_.add_plan(config_, plan, layers_of(window_left));
        ++work_.plans;
        work_.plans_with_cascade += rank->metadata().use_cascade ? 1 : 0;
      });
      for_each_plan(rank->metadata_alone(), [&](int32_t window_left, const AttentionPlan& plan) {
        work_.add_plan_alone(config_, plan, layers_of(window_left));
      });
    }
  }

  Context context_;
  StackConfig config_;
  StepInputs inputs_;
  distributed::ProcessGroup* processes_;
  std::vector<std::unique_ptr<distributed::ProcessGroup>> threads_;
  std::vector<std::unique_ptr<distributed::ProcessGroup>> gpus_;  ///< of ranks on GPUs of their own, over threads_
  std::vector<Context> contexts_;                            ///< of the ranks of this process, where there are several
  std::vector<std::unique_ptr<BackendRank<Family>>> ranks_;  ///< those of this process
  AttentionConfig attention_;
  WorkCounts work_;
  Fp8Rows fp8_rows_;
  bool fp8_mma_ = false;  ///< of some plan so far
  size_t workspace_bytes_ = 0;
  std::vector<int32_t> scheduled_;
  std::vector<int32_t> computed_;
  SharedPrefixFinder finder_;
  std::vector<int32_t> full_pages_;
  std::vector<int32_t> query_lens_;
  std::vector<int32_t> block_table_;
  std::vector<int32_t> token_row_;
  std::vector<int32_t> positions_;
  size_t columns_ = 1;
};

void check(const Context& context, const StackConfig& config, const distributed::ProcessGroup* processes) {
  const auto refuse = [](ErrorCode code, const std::string& why) { throw Error(code, why); };
  if (config.layout == KvLayout::kCpuPacked) {
    refuse(ErrorCode::kUnsupported,
           fmt::format("the {} backend's caches are strided; --kv-format cpu-packed is for --backend none",
                       to_string(config.backend)));
  }
  if (config.cascade != backends::CascadeMode::kOff && config.ranks > 1) {
    refuse(ErrorCode::kUnsupported,
           fmt::format(
               "what requests share is not divided over ranks as well; --cascade {} is for --ranks 1, and --ranks {} "
               "for --cascade off",
               to_string(config.cascade), config.ranks));
  }
  if (config.head_dim_v != config.head_dim_qk) {
    refuse(ErrorCode::kUnsupported, fmt::format("head dims are {} and {}; the {} backend has one head size for both",
                                                config.head_dim_qk, config.head_dim_v, to_string(config.backend)));
  }
  const int32_t group = config.num_q_heads / config.num_kv_heads;
  if (config.ranks < 1 || group % config.ranks != 0) {
    refuse(ErrorCode::kInvalidArgument,
           fmt::format("{} ranks divide groups of {} query heads: they must divide them evenly", config.ranks, group));
  }
  if (config.ranks > 1 && is_fp8(config.kv) && config.determinism != Determinism::kScheduleInvariant) {
    refuse(
        ErrorCode::kUnsupported,
        "over divided fp8 caches new tokens are attended to before they are rounded, which the replay's checks do not "
        "follow; --determinism schedule-invariant reads all of them from the cache");
  }
  if (processes != nullptr && processes->size() != config.ranks) {
    refuse(ErrorCode::kInvalidArgument, fmt::format("{} processes were started; --ranks {} needs as many as its ranks",
                                                    processes->size(), config.ranks));
  }
  if (processes != nullptr && gpu::is_gpu(context)) {
    refuse(ErrorCode::kUnsupported,
           "processes hand each other the host's memory; with --device cuda the ranks are threads of one process: "
           "start it without mpirun");
  }
}

}  // namespace

std::unique_ptr<AttentionStack> make_backend_stack(const Context& context, const StackConfig& config,
                                                   distributed::ProcessGroup* processes) {
  check(context, config, processes);
  switch (config.backend) {
    case ServingBackend::kFlashInfer:
      return std::make_unique<BackendStack<FlashInferFamily>>(context, config, processes);
    case ServingBackend::kFlashAttention:
      return std::make_unique<BackendStack<FlashAttentionFamily>>(context, config, processes);
    case ServingBackend::kTokenPool:  // token_pool_stack.hpp
    case ServingBackend::kNone: break;
  }
  throw Error(ErrorCode::kInvalidArgument, "no backend was asked for");
}

}  // namespace folio::replay

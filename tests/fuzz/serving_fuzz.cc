// A random sequence of an engine's calls: requests begin, grow, fork, end and are evicted; steps are planned and run
// plainly, with shared prefixes, in two parts that are merged, and through the three backends for engines, which write
// the new keys themselves; ranks of threads meet, and one of them may fail. After every call the model
// (serving_model.hpp) knows what must be there: values are compared with the float64 oracle, counts with its own, and
// what must be refused is refused and changes nothing.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>

#include "folio/distributed.hpp"
#include "serving_flash_attn.hpp"
#include "serving_flashinfer.hpp"
#include "serving_model.hpp"
#include "serving_step.hpp"
#include "serving_token_pool.hpp"

namespace {

using namespace serving;
using folio::DType;
using folio::Error;
using folio::ErrorCode;

folio::AttentionConfig take_config(FuzzInput& input) {
  folio::AttentionConfig config;
  config.num_kv_heads = input.take_between(1, 2);
  config.num_q_heads = config.num_kv_heads * input.take_between(1, 2);
  config.head_dim_qk = config.head_dim_v = 8 * input.take_between(1, 2);
  config.q = config.kv = DType::kFloat32;
  config.page_size = 1 << input.take_between(0, 3);
  config.window_left = input.take<uint8_t>() % 3 == 0 ? input.take_between(0, 20) : -1;
  config.determinism = static_cast<folio::Determinism>(input.take_between(0, 3));
  return config;
}

/// The pool's keys and values in one allocation, so that a backend's cache is one tensor over both.
struct PoolMemory {
  PoolMemory(const folio::AttentionConfig& attention, folio::KvPoolLayout layout) {
    config.num_slots = kPoolTokens;
    config.page_size = attention.page_size;
    config.num_layers = 1;
    config.num_kv_heads = attention.num_kv_heads;
    config.head_dim_qk = attention.head_dim_qk;
    config.head_dim_v = attention.head_dim_v;
    config.dtype = DType::kFloat32;
    config.layout = layout;
    const size_t k_floats = folio::KvPool::k_bytes_per_layer(config) / sizeof(float);
    values.assign(k_floats + folio::KvPool::v_bytes_per_layer(config) / sizeof(float), 0.0f);
    k = {values.data()};
    v = {values.data() + k_floats};
  }
  folio::KvPoolConfig config;
  std::vector<float> values;
  std::array<void*, 1> k{}, v{};
};

struct FreeMemory {
  void operator()(void* memory) const { std::free(memory); }
};

class Engine {
 public:
  explicit Engine(FuzzInput& input)
      : input_(input),
        config_(take_config(input)),
        op_(folio::prepare(shared_context(), config_)),
        buffer_(folio::make_plan_buffer(op_)),
        planner_(op_, input.take_between(0, 3)),
        memory_(config_, static_cast<folio::KvPoolLayout>(input.take<uint8_t>() % 2)),
        pool_(memory_.config, memory_.k, memory_.v),
        allocator_(kPoolTokens, config_.page_size),
        cache_({.page_size = config_.page_size}) {}

  ~Engine() {
    while (!requests_.empty()) end_request(0);
    folio::SlotChanges changes;
    cache_.evict({.slots = kPoolTokens}, changes);
    allocator_.free(changes.freed);
    FUZZ_CHECK(cache_.size() == 0 && allocator_.available() == kPoolTokens);
  }

  void call() {
    const auto kind = input_.take<uint8_t>();
    switch (kind < 168 ? kind % 12 : 12 + kind % 4) {
      case 0:
      case 1: begin_request(); break;
      case 2:
      case 3: run_step(); break;
      case 4: run_in_two_parts(); break;
      case 5: run_with_shared_prefixes(); break;
      case 6: grow(pick()); break;
      case 7: fork_request(pick()); break;
      case 8:
        if (pick() != nullptr) end_request(input_.take<uint8_t>() % requests_.size());
        break;
      case 9: evict(input_.take_between(0, kPoolTokens)); break;
      case 10: refuse(); break;
      case 11: meet(); break;
      case 12: run_with_flashinfer(); break;
      case 13: run_with_flash_attention(); break;
      case 14: run_with_token_pool(); break;
      default: refuse_in_backends(); break;
    }
    check_counts();
  }

 private:
  Request* pick() { return requests_.empty() ? nullptr : &requests_[input_.take<uint8_t>() % requests_.size()]; }

  /// Slots for tokens from `slots.size()` on; false, and nothing changed, if even eviction does not make room.
  bool take_slots(Request& request) {
    const std::vector<int32_t> from = {static_cast<int32_t>(request.slots.size())}, to = {request.length()};
    const std::vector<int32_t> last = {request.slots.empty() ? -1 : request.slots.back()};
    std::vector<int32_t> fresh(static_cast<size_t>(to[0] - from[0]));
    if (!allocator_.alloc_extend(from, to, last, fresh)) {
      evict(static_cast<int32_t>(fresh.size()) + config_.page_size);
      if (!allocator_.alloc_extend(from, to, last, fresh)) return false;
    }
    request.slots.insert(request.slots.end(), fresh.begin(), fresh.end());
    write(request, from[0]);
    return true;
  }

  void write(const Request& request, int32_t first) {
    std::vector<float> k, v;
    for (int32_t p = first; p < request.length(); ++p) {
      append_row(k, request.tokens[static_cast<size_t>(p)], p, kKey, config_.num_kv_heads, config_.head_dim_qk);
      append_row(v, request.tokens[static_cast<size_t>(p)], p, kValue, config_.num_kv_heads, config_.head_dim_v);
    }
    const std::vector<int64_t> slots(request.slots.begin() + first, request.slots.end());
    const auto count = static_cast<int64_t>(slots.size());
    folio::write_kv_cache(
        shared_context(),
        pool_.write_args(0, {k.data(), DType::kFloat32, {count, config_.num_kv_heads, config_.head_dim_qk}},
                         {v.data(), DType::kFloat32, {count, config_.num_kv_heads, config_.head_dim_v}}, slots));
  }

  void begin_request() {
    if (requests_.size() == kMostRequests) return;
    Request request;
    const int32_t length = input_.take_between(1, kMostTokens / 2);
    // Few families of prompts, so that requests have beginnings in common; where one leaves its family is drawn too.
    const int32_t family = input_.take_between(0, 1), common = input_.take_between(0, length);
    const int32_t own = 100 + input_.take<uint8_t>();
    for (int32_t p = 0; p < length; ++p) request.tokens.push_back(p < common ? family : own);
    const auto all = std::span<const int32_t>(request.tokens);
    const int64_t there = cache_.match({all.first(all.size() - 1)});
    request.lock = cache_.acquire({all.first(all.size() - 1)}, request.slots);
    FUZZ_CHECK(request.lock->length() == there && static_cast<int64_t>(request.slots.size()) == there);
    FUZZ_CHECK(there % config_.page_size == 0 && there < length);
    if (!take_slots(request)) return;  // the lock goes; nothing else was taken
    requests_.push_back(std::move(request));
    share_prefix(requests_.back());
  }

  /// Hands a request's whole pages to the prefix cache.
  void share_prefix(Request& request) {
    if (!request.lock) return;
    folio::SlotChanges changes;
    cache_.extend(*request.lock, {request.tokens}, request.slots, changes);
    FUZZ_CHECK(request.lock->length() == request.length() / config_.page_size * config_.page_size);
    allocator_.free(changes.freed);
  }

  void grow(Request* request) {
    if (request == nullptr) return;
    const int32_t more = input_.take_between(1, 5);
    if (request->length() + more > kMostTokens) return;
    const auto before = static_cast<ptrdiff_t>(request->tokens.size());
    for (int32_t i = 0; i < more; ++i) request->tokens.push_back(200 + input_.take<uint8_t>() % 4);
    if (!take_slots(*request)) {
      request->tokens.erase(request->tokens.begin() + before, request->tokens.end());
    } else if (input_.take<uint8_t>() % 2 == 0) {
      share_prefix(*request);
    }
  }

  /// A copy of the request's pages becomes a request of its own.
  void fork_request(const Request* request) {
    if (request == nullptr || requests_.size() == kMostRequests) return;
    Request copy;
    copy.tokens = request->tokens;
    copy.slots.resize(request->slots.size());
    if (!allocator_.alloc(copy.slots)) return;
    std::vector<int32_t> from, to;
    for (size_t i = 0; i < copy.slots.size(); i += static_cast<size_t>(config_.page_size)) {
      from.push_back(request->slots[i] / config_.page_size);
      to.push_back(copy.slots[i] / config_.page_size);
    }
    folio::copy_pages(shared_context(), pool_.view(0), pool_.view(0), from, to);
    requests_.push_back(std::move(copy));
  }

  void end_request(size_t index) {
    Request request = std::move(requests_[index]);
    requests_.erase(requests_.begin() + static_cast<ptrdiff_t>(index));
    folio::SlotChanges changes;
    if (request.lock && input_.take<uint8_t>() % 2 == 0) {
      cache_.finish(std::move(*request.lock), {request.tokens}, request.slots, changes);
    } else {
      const auto first = request.lock ? request.lock->length() : 0;
      changes.freed.assign(request.slots.begin() + first, request.slots.end());
    }
    allocator_.free(changes.freed);
  }

  void evict(int32_t slots) {
    const int64_t evictable = cache_.evictable();
    folio::SlotChanges changes;
    const auto gone = cache_.evict({.slots = slots}, changes);
    FUZZ_CHECK(gone.slots >= std::min<int64_t>(slots, evictable) && gone.slots <= evictable);
    FUZZ_CHECK(changes.freed.size() == static_cast<size_t>(gone.slots));
    allocator_.free(changes.freed);
  }

  /// Slots of the tree and of the requests are all that is held, in whole pages.
  void check_counts() {
    cache_.check_invariants();
    allocator_.check_invariants();
    int64_t held = cache_.size();
    for (const Request& request : requests_) {
      const int64_t own = request.length() - (request.lock ? request.lock->length() : 0);
      held += (own + config_.page_size - 1) / config_.page_size * config_.page_size;
    }
    FUZZ_CHECK(allocator_.available() == kPoolTokens - held);
  }

  std::vector<StepEntry> take_entries() {
    std::vector<StepEntry> entries;
    for (size_t r = 0; r < requests_.size(); ++r) {
      if (input_.take<uint8_t>() % 4 == 0) continue;
      const int32_t q_len = input_.take<uint8_t>() % 2 == 0 ? 1 : input_.take_between(0, requests_[r].length());
      entries.push_back({r, q_len});
    }
    return entries;
  }
  Step take_step() { return make_step(take_entries(), requests_, config_); }

  folio::BatchView batch_of(const Step& step, std::span<const folio::KvSegment> segments) const {
    folio::BatchView batch;
    batch.num_requests = static_cast<int32_t>(step.requests.size());
    batch.num_tokens = step.rows();
    batch.cu_q = step.cu_q.data();
    batch.q_first_pos = step.q_first_pos.data();
    batch.segments = segments;
    return batch;
  }

  void run(const folio::AttentionPlan& plan, const Step& step, std::span<const folio::PageTableView> tables,
           StepOutput& output) {
    const int64_t rows = step.rows(), heads = config_.num_q_heads;
    output.out.assign(static_cast<size_t>(rows * heads * config_.head_dim_v), kUntouched);
    output.lse.assign(static_cast<size_t>(rows * heads), kUntouched);
    std::vector<folio::SegmentArgs> segments(tables.size());
    for (size_t s = 0; s < tables.size(); ++s) {
      segments[s].cache = pool_.view(0);
      segments[s].table = tables[s];
    }
    folio::AttentionArgs args;
    args.q = {step.q.data(), DType::kFloat32, {rows, heads, config_.head_dim_qk}};
    args.out = {output.out.data(), DType::kFloat32, {rows, heads, config_.head_dim_v}};
    args.lse = {output.lse.data(), heads, 1, folio::LseBase::kE};
    args.segments = segments;
    const size_t bytes = folio::workspace_size(plan) + 256;
    const std::unique_ptr<void, FreeMemory> memory(std::aligned_alloc(256, bytes / 256 * 256));
    const folio::Workspace workspace = {memory.get(), bytes / 256 * 256};
    folio::init_workspace(op_, workspace);
    folio::validate(plan, args);
    folio::run(plan, args, workspace);
    last_plan_ = plan;
  }

  void check(const Step& step, const StepOutput& output) const {
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const Request& request = requests_[step.requests[i]];
      check_rows(config_, request, step.cu_q[i + 1] - step.cu_q[i], 0, request.length(), output,
                 static_cast<size_t>(step.cu_q[i]));
    }
  }

  void run_step() {
    const Step step = take_step();
    folio::KvSegment segment;
    segment.kv_len = step.kv_len.data();
    const folio::PageTableView table = folio::csr_table(step.pages, step.indptr);
    StepOutput output;
    const auto stale = last_plan_;
    run(folio::plan(op_, batch_of(step, {&segment, 1}), buffer_), step, {&table, 1}, output);
    check(step, output);
    if (stale) {
      StepOutput other;
      FUZZ_CHECK(refused(ErrorCode::kStalePlan, [&] { run(*stale, step, {&table, 1}, other); }));
      FUZZ_CHECK(std::all_of(other.out.begin(), other.out.end(), [](float x) { return x == kUntouched; }));
    }
  }

  /// Keys before and behind a page's edge apart, and their states merged.
  void run_in_two_parts() {
    const Step step = take_step();
    const int32_t edge = config_.page_size * input_.take_between(0, 6);
    std::vector<int32_t> lens[2], first_pos[2], indptr[2] = {{0}, {0}}, pages[2];
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const int32_t middle = std::min(edge, step.kv_len[i] / config_.page_size * config_.page_size);
      const auto first_page = step.pages.begin() + step.indptr[i];
      const auto middle_page = first_page + middle / config_.page_size;
      pages[0].insert(pages[0].end(), first_page, middle_page);
      pages[1].insert(pages[1].end(), middle_page, step.pages.begin() + step.indptr[i + 1]);
      const int32_t part_lens[] = {middle, step.kv_len[i] - middle}, part_firsts[] = {0, middle};
      for (size_t part = 0; part < 2; ++part) {
        lens[part].push_back(part_lens[part]);
        first_pos[part].push_back(part_firsts[part]);
        indptr[part].push_back(static_cast<int32_t>(pages[part].size()));
      }
    }
    StepOutput parts[2];
    for (size_t part = 0; part < 2; ++part) {
      folio::KvSegment segment;
      segment.kv_len = lens[part].data();
      segment.first_pos = first_pos[part].data();
      const folio::PageTableView table = folio::csr_table(pages[part], indptr[part]);
      run(folio::plan(op_, batch_of(step, {&segment, 1}), buffer_), step, {&table, 1}, parts[part]);
    }
    const int64_t rows = step.rows(), heads = config_.num_q_heads;
    const auto out = [&](StepOutput& output) {
      return folio::TensorView(output.out.data(), DType::kFloat32, {rows, heads, config_.head_dim_v});
    };
    if (input_.take<uint8_t>() % 2 == 0) {
      folio::merge_state(shared_context(), {out(parts[0]), parts[0].lse.data(), heads, 1},
                         {out(parts[1]), parts[1].lse.data(), heads, 1}, out(parts[0]),
                         {parts[0].lse.data(), heads, 1});
    } else {
      folio::merge_state_in_place(shared_context(), out(parts[0]), {parts[0].lse.data(), heads, 1},
                                  {out(parts[1]), parts[1].lse.data(), heads, 1});
    }
    check(step, parts[0]);
  }

  void run_with_shared_prefixes() {
    const Step step = take_step();
    folio::CascadeBatch batch;
    batch.num_requests = static_cast<int32_t>(step.requests.size());
    batch.cu_q = step.cu_q.data();
    batch.kv_len = step.kv_len.data();
    batch.table = folio::csr_table(step.pages, step.indptr);
    const folio::Cascade& cascade = planner_.discover(batch);
    if (config_.determinism >= folio::Determinism::kBatchInvariant) FUZZ_CHECK(cascade.num_levels() == 0);
    StepOutput output;
    run(folio::plan(op_, batch_of(step, cascade.segments), buffer_), step, cascade.tables, output);
    check(step, output);
  }

  /// A backend is made when it is first asked for, and now and then anew, with other options.
  template <typename Serving>
  Serving& serving(std::optional<Serving>& backend) {
    if (!backend || input_.take<uint8_t>() % 8 == 0) backend.emplace(input_, config_, pool_);
    return *backend;
  }

  void run_with_flashinfer() { serving(flashinfer_).step(input_, take_entries(), requests_); }

  void run_with_flash_attention() {
    std::vector<std::vector<StepEntry>> steps;
    for (int32_t i = input_.take_between(1, 3); i > 0; --i) steps.push_back(take_entries());
    serving(flash_attn_).steps(input_, steps, requests_);
  }

  void run_with_token_pool() {
    TokenPoolServing& backend = serving(token_pool_);
    if (input_.take<uint8_t>() % 4 == 0) {
      backend.captured(input_, take_entries(), requests_);
    } else {
      backend.step(input_, take_entries(), requests_);
    }
  }

  void refuse_in_backends() {
    const std::vector<StepEntry> entries = take_entries();
    switch (input_.take<uint8_t>() % 3) {
      case 0: serving(flashinfer_).refuse(input_, entries, requests_); break;
      case 1: serving(flash_attn_).refuse(input_, entries, requests_); break;
      default: serving(token_pool_).refuse(input_, entries, requests_);
    }
  }

  /// Calls that cannot be: each is refused, and what comes after finds everything as it was.
  void refuse() {
    const auto kBad = ErrorCode::kInvalidArgument;
    const int32_t past_end = static_cast<int32_t>(pool_.view(0).num_pages);
    const std::vector<int32_t> bad_page = {past_end + input_.take_between(0, 3)}, good_page = {1};
    FUZZ_CHECK(
        refused(kBad, [&] { folio::copy_pages(shared_context(), pool_.view(0), pool_.view(0), bad_page, good_page); }));
    FUZZ_CHECK(
        refused(kBad, [&] { folio::copy_pages(shared_context(), pool_.view(0), pool_.view(0), good_page, bad_page); }));
    std::vector<float> row(static_cast<size_t>(2 * config_.num_kv_heads * config_.head_dim_qk), kUntouched);
    const std::vector<int64_t> slots = {1, int64_t{past_end} * config_.page_size};
    FUZZ_CHECK(refused(kBad, [&] {
      const folio::TensorView rows(row.data(), DType::kFloat32, {2, config_.num_kv_heads, config_.head_dim_qk});
      folio::write_kv_cache(shared_context(), pool_.write_args(0, rows, rows, slots));
    }));
    const std::vector<int32_t> dummy = {0};
    FUZZ_CHECK(refused(kBad, [&] { allocator_.free(dummy); }));
    Step step = take_step();
    if (step.requests.empty()) return;
    folio::KvSegment segment;
    step.kv_len.back() = -1 - input_.take<uint8_t>();
    segment.kv_len = step.kv_len.data();
    FUZZ_CHECK(refused(kBad, [&] { folio::plan(op_, batch_of(step, {&segment, 1}), buffer_); }));
  }

  /// Ranks of threads add up what they have; where one leaves before, nobody waits for it and nobody gets a sum.
  void meet() {
    const int32_t world = input_.take_between(2, 4);
    const int32_t leaver = input_.take<uint8_t>() % 2 == 0 ? input_.take_between(0, world - 1) : -1;
    const bool throws = input_.take<uint8_t>() % 2 == 0;
    std::vector<float> sums(static_cast<size_t>(world), kUntouched);
    const auto body = [&](folio::distributed::ProcessGroup& group) {
      float mine = static_cast<float>(group.rank() + 1);
      group.all_reduce_sum(&mine, 1);
      FUZZ_CHECK(mine == static_cast<float>(world * (world + 1) / 2));
      if (group.rank() == leaver) {
        if (throws) throw Error(ErrorCode::kUnavailable, "this rank leaves");
        return group.fail("this rank leaves");
      }
      group.all_reduce_sum(&mine, 1);
      sums[static_cast<size_t>(group.rank())] = mine;
    };
    const auto all = [&] {
      folio::distributed::run_ranks(world, body, {.timeout = std::chrono::seconds(10), .context = std::nullopt});
    };
    if (leaver < 0) {
      all();
      for (const float sum : sums) FUZZ_CHECK(sum == static_cast<float>(world * world * (world + 1) / 2));
    } else {
      FUZZ_CHECK(refused(ErrorCode::kUnavailable, all));
      for (const float sum : sums) FUZZ_CHECK(sum == kUntouched);
    }
  }

  FuzzInput& input_;
  folio::AttentionConfig config_;
  folio::AttentionOp op_;
  folio::PlanBuffer buffer_;
  folio::CascadePlanner planner_;
  PoolMemory memory_;
  folio::KvPool pool_;
  folio::TokenAllocator allocator_;
  folio::PrefixCache cache_;
  std::vector<Request> requests_;
  std::optional<folio::AttentionPlan> last_plan_;
  std::optional<FlashInferServing> flashinfer_;
  std::optional<FlashAttentionServing> flash_attn_;
  std::optional<TokenPoolServing> token_pool_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kBytesPerCall = 6;  // about: an input ends with its calls
  FuzzInput input(data, size);
  Engine engine(input);
  for (size_t call = 0; call < size / kBytesPerCall; ++call) engine.call();
  return 0;
}

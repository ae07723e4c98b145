#include "testing/case_runner.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/error.hpp"
#include "testing/compare.hpp"
#include "testing/factors.hpp"
#include "testing/gpu_mapping.hpp"
#include "testing/oracle.hpp"

namespace folio::inline v0::verify {
namespace {

Slice padded(const Problem& problem, uint64_t seed) {
  Random random(seed ^ 0x706164u);
  Slice slice = whole_problem(problem);
  slice.padding_tokens = random.below(4);
  slice.padding_requests = random.below(3);
  return slice;
}

int32_t shared_levels(const Problem& problem) {
  return static_cast<int32_t>(std::count_if(problem.segments.begin(), problem.segments.end(),
                                            [](const SegmentModel& segment) { return segment.shared; }));
}

/// The tightest bounds that a batch fits.
GraphBounds bounds_of(const Problem& problem, const Slice& slice) {
  GraphBounds bounds;
  bounds.max_requests = static_cast<int32_t>(slice.parts.size()) + slice.padding_requests;
  bounds.max_tokens = slice.padding_tokens;
  for (size_t r = 0; r < problem.requests.size(); ++r) {
    bounds.max_tokens += problem.requests[r].q_len;
    bounds.max_q_len = std::max(bounds.max_q_len, problem.requests[r].q_len);
    bounds.max_kv_len = std::max(bounds.max_kv_len, problem.num_keys(r));
  }
  bounds.max_shared_levels = shared_levels(problem);
  return bounds;
}

}  // namespace

Workspace DirtyWorkspace::take(const AttentionOp& op, size_t bytes) {
  const size_t needed = std::max(bytes, workspace_size(op));
  if (memory_.data() == nullptr || memory_.size() < needed) {
    mapping_.reset();
    memory_ = GuardedBuffer(needed, GuardedEnd::kBack, kNanByte);
    const GuardedBuffer* const mapped[] = {&memory_};
    mapping_.emplace(op.context(), mapped);
  }
  const auto tail = [&](size_t size) { return Workspace{memory_.as<std::byte>() + (memory_.size() - size), size}; };
  init_workspace(op, tail(workspace_size(op)));
  return tail(bytes);
}

CaseRunner::CaseRunner(const ConformanceCase& c)
    : case_(c),
      problem_(make_problem(c)),
      kv_(c, problem_),
      in_order_(static_cast<int32_t>(c.seed % 4) + 1, level<ExecutorLevel>(c, kExecutor) == ExecutorLevel::kShuffled,
                c.seed),
      other_(3, true, c.seed + 1),
      whole_(padded(problem_, c.seed)),
      op_(make_op(make_context(), num_workers_of(c))),
      buffer_(make_plan_buffer(op_)),
      kv_mapping_(op_.context(), kv_.buffers()) {}

Context CaseRunner::make_context() const {
  if (is_gpu_kernel(case_.kernel)) return context_of_kernel(case_.kernel);
  if (level<ExecutorLevel>(case_, kExecutor) == ExecutorLevel::kPool) return pool_context(2);
  return in_order_.context();
}

AttentionOp CaseRunner::make_op(const Context& context, int32_t num_workers) const {
  PrepareOptions options = problem_.options;
  options.num_workers = num_workers;
  options.allow_fp8_mma = is_on(case_, kFp8Products);
  if (case_.seed % 4 == 0) options.bounds = bounds_of(problem_, whole_);
  return prepare(context, problem_.config, options);
}

/// Bounds are what planning on the device needs; every other case that has them.
bool CaseRunner::plans_on_device() const {
  return case_.seed % 8 == 0 && shared_levels(problem_) == 0 && problem_.segments.size() <= 4 &&
         problem_.config.mask != MaskKind::kCustom;
}

RunOutput CaseRunner::execute(const AttentionOp& op, PlanBuffer& buffer, const Slice& slice) {
  BatchMemory batch(case_, problem_, kv_, slice);
  const bool on_gpu = op.context().device().type == DeviceType::kCuda;
  const GpuMapping batch_mapping(op.context(), batch.buffers());
  if (on_gpu && plans_on_device()) batch.move_lengths_to_device();
  const AttentionPlan plan = folio::plan(op, batch.view(), buffer);
  if (on_gpu && plans_on_device()) batch_mapping.synchronize();
  batch.spoil_lengths();
  if (!on_gpu) validate(plan, batch.args());
  const size_t bytes = workspace_size(plan);
  const bool promised = shared_levels(problem_) == 0 || case_.seed % 4 == 0;
  core::require(!promised || bytes <= workspace_size(op), "workspace_size(plan) is ", bytes,
                ", workspace_size(op) only ", workspace_size(op));
  const Workspace workspace = workspace_.take(op, bytes);
  folio::run(plan, batch.args(), workspace);
  batch_mapping.synchronize();
  return batch.collect();
}

std::string CaseRunner::run(CaseReport& report) {
  if (!case_.kernel.empty() && op_.kernel_name() != case_.kernel) {
    return "kernel \"" + case_.kernel + "\" was forced, but \"" + op_.kernel_name() + "\" runs";
  }
  if (std::string failure = check_main(report); !failure.empty()) return failure;
  const Determinism level = problem_.config.determinism;
  if (level >= Determinism::kRunToRun) {
    if (std::string failure = check_repeat(); !failure.empty()) return failure;
  }
  if (level >= Determinism::kBatchInvariant) {
    if (std::string failure = check_alone(); !failure.empty()) return failure;
  }
  if (level >= Determinism::kScheduleInvariant) {
    if (std::string failure = check_chunked(); !failure.empty()) return failure;
  }
  if (level >= Determinism::kRunToRun && case_.seed % 3 == 0) return check_isolation();
  return {};
}

std::string CaseRunner::check_main(CaseReport& report) {
  Slice decoy = whole_problem(problem_);  // another batch first: it leaves its traces in the buffer and the workspace
  decoy.parts.resize((decoy.parts.size() + 1) / 2);
  static_cast<void>(execute(op_, buffer_, decoy));

  const AttentionResult<float> plain = plain_attention(problem_);
  AttentionResult<double> oracle;
  {
    const BatchMemory batch(case_, problem_, kv_, whole_);
    oracle = oracle_attention(problem_, batch);
    base_ = batch.args().lse.base;
  }
  if (std::string failure = compare_references(problem_, oracle, plain); !failure.empty()) return failure;
  main_ = execute(op_, buffer_, whole_);
  if (!main_.stray_write.empty()) return main_.stray_write;
  return compare_output(problem_, oracle, Tolerance(problem_, oracle, plain, op_.p_dtype(), op_.kv_dtype()), main_,
                        base_, report);
}

std::string CaseRunner::check_repeat() {
  return same_bits("a second run", whole_, execute(op_, buffer_, whole_));
}

std::string CaseRunner::check_alone() {
  const bool on_gpu = is_gpu_kernel(case_.kernel);
  const AttentionOp other = make_op(on_gpu ? make_context() : other_.context(), num_workers_of(case_) == 5 ? 2 : 5);
  PlanBuffer buffer = make_plan_buffer(other);
  if (std::string failure = same_bits("another number of workers", whole_, execute(other, buffer, whole_));
      !failure.empty()) {
    return failure;
  }
  for (size_t r = 0; r < problem_.requests.size(); ++r) {
    Slice alone;
    alone.parts = {{r, 0, problem_.requests[r].q_len, 0}};
    alone.padding_requests = std::min(static_cast<int32_t>(r % 2), whole_.padding_requests);
    if (std::string failure = same_bits("the request alone", alone, execute(op_, buffer_, alone)); !failure.empty()) {
      return failure;
    }
  }
  return {};
}

/// How many of the last segment's tokens none of the request's first `q_end` queries can see: an earlier step would not
/// have had them yet.
int32_t CaseRunner::droppable(size_t request, int32_t q_end) const {
  const SegmentModel& last = problem_.segments.back();
  const bool plain = last.mask == SegmentMask::kAsConfig && last.shard.world == 1 && !last.shared;
  if (!plain || problem_.config.mask != MaskKind::kCausal) return 0;
  const KvRowModel& row = last.rows[static_cast<size_t>(last.row_of_request[request])];
  const RequestModel& model = problem_.requests[request];
  if (!model.causal) return 0;
  int32_t reach = model.q_first_pos + q_end;
  for (int32_t i = 0; i < q_end && !model.spans.empty(); ++i) {
    reach = std::max(reach, model.spans[static_cast<size_t>(i)].end);
  }
  const int32_t beyond = row.first_pos + row.kv_len - reach;
  return std::clamp(beyond, 0, row.kv_len);
}

std::string CaseRunner::check_chunked() {
  Random random(case_.seed ^ 0x63687564u);
  Slice first, second;
  for (size_t r = 0; r < problem_.requests.size(); ++r) {
    const int32_t q_len = problem_.requests[r].q_len;
    const int32_t cut = random.one_in(3) ? q_len - std::min(q_len, 1) : random.between(0, q_len);
    first.parts.push_back({r, 0, cut, droppable(r, cut)});
    second.parts.push_back({r, cut, q_len, droppable(r, q_len)});
  }
  if (std::string failure = same_bits("the first chunks", first, execute(op_, buffer_, first)); !failure.empty()) {
    return failure;
  }
  return same_bits("the second chunks", second, execute(op_, buffer_, second));
}

/// A NaN in one request's keys and values must not reach the others.
std::string CaseRunner::check_isolation() {
  if (problem_.requests.size() < 2) return {};
  const size_t victim = case_.seed / 3 % problem_.requests.size();
  for (size_t s = 0; s < problem_.segments.size(); ++s) {
    const SegmentModel& segment = problem_.segments[s];
    if (segment.source != KvSource::kPaged || segment.shared) continue;
    kv_.poison_row(problem_, s, static_cast<size_t>(segment.row_of_request[victim]));
  }
  RunOutput output = execute(op_, buffer_, whole_);
  int64_t first = 0;
  for (size_t r = 0; r < victim; ++r) first += problem_.requests[r].q_len;
  const auto copy_rows = [&](auto& to, const auto& from) {
    const int64_t row = num_rows() == 0 ? 0 : static_cast<int64_t>(from.size()) / num_rows();
    const int64_t heads = problem_.config.num_q_heads;
    const int64_t count = problem_.requests[victim].q_len * heads * row;
    std::copy_n(from.begin() + first * heads * row, count, to.begin() + first * heads * row);
  };
  copy_rows(output.out, main_.out);
  copy_rows(output.lse, main_.lse);
  copy_rows(output.block_scales, main_.block_scales);
  return same_bits("a NaN in another request", whole_, output);
}

int64_t CaseRunner::num_rows() const {
  int64_t tokens = 0;
  for (const RequestModel& request : problem_.requests) tokens += request.q_len;
  return tokens * problem_.config.num_q_heads;
}

std::string CaseRunner::same_bits(const char* what, const Slice& slice, const RunOutput& output) const {
  if (!output.stray_write.empty()) return std::string(what) + ": " + output.stray_write;
  const auto heads = static_cast<size_t>(problem_.config.num_q_heads);
  const size_t row_bytes = main_.out.size() / std::max<size_t>(1, static_cast<size_t>(num_rows()));
  const size_t row_scales = main_.block_scales.size() / std::max<size_t>(1, static_cast<size_t>(num_rows()));
  std::vector<size_t> first_row{0};
  for (const RequestModel& request : problem_.requests) {
    first_row.push_back(first_row.back() + static_cast<size_t>(request.q_len) * heads);
  }
  size_t row = 0;
  for (const SlicePart& part : slice.parts) {
    for (size_t i = 0; i < static_cast<size_t>(part.q_end - part.q_begin) * heads; ++i, ++row) {
      const size_t main_row = first_row[part.request] + static_cast<size_t>(part.q_begin) * heads + i;
      const bool same_out =
          std::memcmp(&output.out[row * row_bytes], &main_.out[main_row * row_bytes], row_bytes) == 0 &&
          std::equal(output.block_scales.begin() + static_cast<int64_t>(row * row_scales),
                     output.block_scales.begin() + static_cast<int64_t>((row + 1) * row_scales),
                     main_.block_scales.begin() + static_cast<int64_t>(main_row * row_scales));
      const bool same_lse = output.lse.empty() ||
                            std::bit_cast<uint32_t>(output.lse[row]) == std::bit_cast<uint32_t>(main_.lse[main_row]);
      if (!same_out || !same_lse) {
        return core::message(what, " changes the bits of ", same_out ? "lse" : "out", " at ",
                             place(problem_, main_row, -1));
      }
    }
  }
  return {};
}

CaseReport run_case(const ConformanceCase& c) {
  const std::string reason = invalid_reason(c);
  core::require(reason.empty(), reason);
  CaseReport report;
  try {
    report.failure = CaseRunner(c).run(report);
  } catch (const Error& error) {
    report.failure = std::string("threw: ") + error.what();
  }
  report.passed = report.failure.empty();
  return report;
}

}  // namespace folio::inline v0::verify

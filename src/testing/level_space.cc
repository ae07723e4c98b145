#include "testing/level_space.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "folio/attention.hpp"
#include "testing/executors.hpp"
#include "testing/factors.hpp"

namespace folio::inline v0::verify {
namespace {

/// Factors that a kernel may refuse: those of AttentionConfig.
constexpr Factor kKernelFactors[] = {kDtypes, kHeadDims, kGroup,         kPageSize, kFormat, kMask,
                                     kWindow, kSoftCap,  kAlibi,         kSinks,    kRope,   kDeterminism,
                                     kSpans,  kChunks,   kRequestCausal, kKvStart};

constexpr int32_t column_of(Factor factor) {
  return static_cast<int32_t>(factor) + 1;
}

}  // namespace

LevelSpace::LevelSpace(std::span<const std::string> kernels) : kernels_(kernels.begin(), kernels.end()) {
  core::require(!kernels.empty(), "no kernel given; runnable_kernels() has those of this machine");
  for (const std::string& kernel : kernels_) contexts_.try_emplace(is_gpu_kernel(kernel), context_of_kernel(kernel));
  first_id_ = {0, static_cast<int32_t>(kernels.size())};
  for (const FactorInfo& factor : factors()) {
    first_id_.push_back(first_id_.back() + static_cast<int32_t>(factor.levels.size()));
  }
  core::require(first_id_.back() <= kMaxIds, "too many levels: ", first_id_.back());
  const auto num_ids = static_cast<size_t>(first_id_.back());
  compatible_.assign(num_ids, IdSet().set());
  for (int32_t column = 0; column < num_columns(); ++column) {  // one level a column
    for (int32_t a = first_id_[column]; a < first_id_[column + 1]; ++a) {
      for (int32_t b = first_id_[column]; b < first_id_[column + 1]; ++b) {
        if (a != b) compatible_[static_cast<size_t>(a)].reset(static_cast<size_t>(b));
      }
    }
  }
  for (const Conflict& conflict : conflicts()) {
    for (int32_t i = 0; i < num_levels(column_of(conflict.a)); ++i) {
      for (int32_t j = 0; j < num_levels(column_of(conflict.b)); ++j) {
        if ((conflict.a_levels >> i & 1u) == 0 || (conflict.b_levels >> j & 1u) == 0) continue;
        const auto a = static_cast<size_t>(first_id_[column_of(conflict.a)] + i);
        const auto b = static_cast<size_t>(first_id_[column_of(conflict.b)] + j);
        compatible_[a].reset(b);
        compatible_[b].reset(a);
      }
    }
  }
  kernel_compatible_.assign(kernels_.size(), std::vector<IdSet>(num_ids, IdSet().set()));
  for (int32_t k = 0; k < static_cast<int32_t>(kernels_.size()); ++k) ask_kernel(k);
}

LevelSpace::Row LevelSpace::plainest(int32_t kernel) const {
  Row row(static_cast<size_t>(num_columns()), 0);
  row[0] = kernel;
  if (takes(row)) return row;
  for (const Factor fa : kKernelFactors) {
    for (const Factor fb : kKernelFactors) {
      for (int32_t i = 0; i < num_levels(column_of(fa)); ++i) {
        for (int32_t j = 0; j < num_levels(column_of(fb)); ++j) {
          Row other = row;
          other[static_cast<size_t>(column_of(fa))] = i;
          other[static_cast<size_t>(column_of(fb))] = j;
          if (takes(other)) return other;
        }
      }
    }
  }
  core::fail(ErrorCode::kInvalidArgument, "kernel \"", kernels_[static_cast<size_t>(kernel)],
             "\" takes no case here: two factors of a plain one changed are not enough");
}

bool LevelSpace::takes(const Row& row) const {
  const ConformanceCase asked = to_case(row, 0);
  if (!invalid_reason(asked).empty()) return false;
  for (const KernelAnswer& answer : explain(contexts_.at(is_gpu_kernel(asked.kernel)), kernel_question(asked))) {
    if (answer.name == asked.kernel) return answer.refusal.empty();
  }
  core::fail(ErrorCode::kInvalidArgument, "kernel \"", asked.kernel,
             "\" is not one of this build; explain() has their names");
}

void LevelSpace::ask_kernel(int32_t kernel) {
  const Row base = plainest(kernel);
  std::vector<IdSet>& compatible = kernel_compatible_[static_cast<size_t>(kernel)];
  for (const Factor fa : kKernelFactors) {
    for (const Factor fb : kKernelFactors) {
      if (fb < fa) continue;
      for (int32_t i = 0; i < num_levels(column_of(fa)); ++i) {
        for (int32_t j = 0; j < num_levels(column_of(fb)); ++j) {
          if (fa == fb && i != j) continue;
          const auto a = static_cast<size_t>(first_id_[column_of(fa)] + i);
          const auto b = static_cast<size_t>(first_id_[column_of(fb)] + j);
          if (!compatible_[a][b]) continue;
          Row row = base;
          row[static_cast<size_t>(column_of(fa))] = i;
          row[static_cast<size_t>(column_of(fb))] = j;
          if (takes(row)) continue;
          compatible[a].reset(b);
          compatible[b].reset(a);
        }
      }
    }
  }
}

LevelSpace::IdSet LevelSpace::narrowed(const IdSet& allowed, int32_t kernel, int32_t column, int32_t level) const {
  const auto id = static_cast<size_t>(first_id_[column] + level);
  IdSet out = allowed & compatible_[id];
  if (kernel >= 0) out &= kernel_compatible_[static_cast<size_t>(kernel)][id];
  return out;
}

LevelSpace::IdSet LevelSpace::allowed(const Row& row) const {
  IdSet out = IdSet().set();
  for (int32_t column = 0; column < num_columns(); ++column) {
    const int32_t level = row[static_cast<size_t>(column)];
    if (level >= 0) out = narrowed(out, row[0], column, level);
  }
  if (row[0] < 0) return out;
  const std::vector<IdSet>& takes = kernel_compatible_[static_cast<size_t>(row[0])];
  for (size_t id = 0; id < takes.size(); ++id) {
    if (!takes[id][id]) out.reset(id);  // refused whatever else is chosen
  }
  return out;
}

bool LevelSpace::can_complete(const Row& row) const {
  const IdSet open = allowed(row);
  for (int32_t column = 0; column < num_columns(); ++column) {
    const int32_t level = row[static_cast<size_t>(column)];
    if (level >= 0 && !is_allowed(open, column, level)) return false;
  }
  Row scratch = row;
  return search(scratch, open);
}

bool LevelSpace::search(Row& row, const IdSet& allowed) const {
  const auto next = std::find(row.begin(), row.end(), -1);
  if (next == row.end()) return true;
  const auto column = static_cast<int32_t>(next - row.begin());
  for (int32_t level = 0; level < num_levels(column); ++level) {
    if (!is_allowed(allowed, column, level)) continue;
    *next = level;
    // Choosing the kernel brings in what it refuses among all levels chosen before.
    const IdSet open = column == 0 ? this->allowed(row) : narrowed(allowed, row[0], column, level);
    bool consistent = true;
    for (int32_t other = 0; other < num_columns() && consistent; ++other) {
      const int32_t chosen = row[static_cast<size_t>(other)];
      consistent = chosen < 0 || is_allowed(open, other, chosen);
    }
    if (consistent && search(row, open)) return true;
  }
  *next = -1;
  return false;
}

ConformanceCase LevelSpace::to_case(const Row& row, uint64_t seed) const {
  ConformanceCase out;
  out.kernel = kernels_[static_cast<size_t>(row[0])];
  out.seed = seed;
  for (size_t i = 0; i < kNumFactors; ++i) out.levels[i] = static_cast<uint8_t>(row[i + 1]);
  return out;
}

}  // namespace folio::inline v0::verify

#include "verify/level_space.hpp"

#include <algorithm>
#include <map>

#include "core/error.hpp"
#include "folio/attention.hpp"
#include "verify/executors.hpp"
#include "verify/factors.hpp"

namespace folio::inline v0::verify {
namespace {

/// Factors that a kernel may refuse: those of AttentionConfig.
constexpr Factor kKernelFactors[] = {kDtypes, kHeadDims, kGroup, kPageSize, kFormat,     kMask,
                                     kWindow, kSoftCap,  kAlibi, kSinks,    kDeterminism};

constexpr int32_t column_of(Factor factor) {
  return static_cast<int32_t>(factor) + 1;
}

}  // namespace

LevelSpace::LevelSpace(std::span<const std::string> kernels) : kernels_(kernels.begin(), kernels.end()) {
  core::require(!kernels.empty(), "no kernel given; runnable_kernels() has those of this machine");
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
  ask_kernels();
}

void LevelSpace::ask_kernels() {
  std::map<std::string, size_t> number;
  std::vector<Context> contexts;
  for (size_t k = 0; k < kernels_.size(); ++k) {
    number[kernels_[k]] = k;
    Context context = context_of_kernel(kernels_[k]);
    const auto same_device = [&](const Context& other) { return other.device() == context.device(); };
    if (std::none_of(contexts.begin(), contexts.end(), same_device)) contexts.push_back(std::move(context));
  }
  const auto ask = [&](const Row& row, size_t a, size_t b) {
    size_t known = 0;
    for (const Context& context : contexts) {
      for (const KernelAnswer& answer : explain(context, kernel_question(to_case(row, 0)))) {
        const auto found = number.find(answer.name);
        if (found == number.end()) continue;
        ++known;
        if (answer.refusal.empty()) continue;
        kernel_compatible_[found->second][a].reset(b);
        kernel_compatible_[found->second][b].reset(a);
      }
    }
    core::require(known == number.size(), "a kernel given is not one of this build; explain() has their names");
  };
  for (const Factor fa : kKernelFactors) {
    for (const Factor fb : kKernelFactors) {
      if (fb < fa) continue;
      for (int32_t i = 0; i < num_levels(column_of(fa)); ++i) {
        for (int32_t j = 0; j < num_levels(column_of(fb)); ++j) {
          if (fa == fb && i != j) continue;
          const auto a = static_cast<size_t>(first_id_[column_of(fa)] + i);
          const auto b = static_cast<size_t>(first_id_[column_of(fb)] + j);
          if (!compatible_[a][b]) continue;
          Row row(static_cast<size_t>(num_columns()), 0);
          row[static_cast<size_t>(column_of(fa))] = i;
          row[static_cast<size_t>(column_of(fb))] = j;
          ask(row, a, b);
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

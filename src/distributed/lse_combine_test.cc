// The combines: golden cases over ranks, masks, packing, precision, and the rules of empty and NaN partials.
#include "folio/distributed/lse_combine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/aligned_buffer.hpp"
#include "core/golden_test.hpp"
#include "folio/distributed/thread_group.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::distributed {
namespace {

using folio::testing::golden;
using folio::testing::golden_case_name;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kEps = 0x1p-23;

/// Numbers in the data, or the names of what JSON has no numbers for.
float number(const nlohmann::json& value) {
  return value.is_string() ? std::stof(value.get<std::string>()) : value.get<float>();
}

const Context& one_thread() {
  static const Context shared = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  return shared;
}

enum class Form { kReduceScatter, kAllReduce, kAllToAll };
constexpr Form kForms[] = {Form::kReduceScatter, Form::kAllReduce, Form::kAllToAll};

/// What one rank gets.
struct Result {
  std::vector<float> out, lse;
};

/// One rank's partial: [tokens, heads, dim].
struct Partial {
  int64_t tokens, heads, dim;
  DType dtype = DType::kFloat32;
  std::vector<float> out, lse;
  LseBase base = LseBase::kE;
};

Result combine(Form form, ProcessGroup& group, const Partial& partial, const EmptyRows& empty = {},
               LseBase lse_base = LseBase::kE) {
  std::vector<std::byte> in(partial.out.size() * static_cast<size_t>(size_of(partial.dtype)));
  for (size_t i = 0; i < partial.out.size(); ++i) {
    store_from_float(in.data(), partial.dtype, static_cast<int64_t>(i), partial.out[i]);
  }
  const int64_t heads = form == Form::kAllReduce ? partial.heads : partial.heads / group.size();
  std::vector<std::byte> out(static_cast<size_t>(partial.tokens * heads * partial.dim * size_of(partial.dtype)));
  Result result;
  result.lse.assign(static_cast<size_t>(partial.tokens * heads), -5.0f);
  const AttentionStateView state{
      ConstTensorView(in.data(), partial.dtype, {partial.tokens, partial.heads, partial.dim}), partial.lse.data(),
      partial.heads, 1, partial.base};
  const TensorView out_view(out.data(), partial.dtype, {partial.tokens, heads, partial.dim});
  core::AlignedBuffer workspace(
      combine_workspace_size(group.size(), partial.tokens, static_cast<int32_t>(partial.heads),
                             static_cast<int32_t>(partial.dim)),
      core::AlignedBuffer::kWorkspaceAlignment);
  std::fill_n(workspace.as<float>(), workspace.bytes() / sizeof(float), NAN);
  const auto call = form == Form::kReduceScatter ? cp_lse_ag_out_rs
                    : form == Form::kAllReduce   ? cp_lse_ag_out_ar
                                                 : dcp_a2a_lse_reduce;
  call(one_thread(), group, state, out_view, {result.lse.data(), heads, 1, lse_base},
       {workspace.data(), workspace.bytes()}, empty, {});
  for (int64_t i = 0; i < partial.tokens * heads * partial.dim; ++i) {
    result.out.push_back(load_as_float(out.data(), partial.dtype, i));
  }
  return result;
}

class LseCombine : public ::testing::TestWithParam<GoldenCase> {};

// The row of the data is every rank's head: all of them must come out.
TEST_P(LseCombine, GoldenCases) {
  const GoldenCase& c = GetParam();
  const nlohmann::json &outs = c.data.at("outs"), &lses = c.data.at("lses"), &expected = c.data.at("out");
  const auto world = static_cast<int32_t>(lses.size());
  const LseBase base = c.at<std::string>("base") == "2" ? LseBase::k2 : LseBase::kE;
  const float lse = number(c.data.at("lse"));
  for (const Form form : kForms) {
    run_ranks(world, [&](ProcessGroup& group) {
      const auto rank = static_cast<size_t>(group.rank());
      Partial partial{1, world, static_cast<int64_t>(expected.size()), DType::kFloat32, {}, {}, base};
      for (int32_t h = 0; h < world; ++h) {
        for (const nlohmann::json& value : outs[rank]) partial.out.push_back(number(value));
        partial.lse.push_back(number(lses[rank]));
      }
      const Result result = combine(form, group, partial, {}, base);
      for (size_t i = 0; i < result.out.size(); ++i) {
        const float value = number(expected[i % expected.size()]);
        EXPECT_NEAR(result.out[i], value, 4 * kEps * std::fabs(value) + (value == std::floor(value) ? 0 : 1e-6));
      }
      for (const float actual : result.lse) {
        if (std::isinf(lse)) {
          EXPECT_EQ(actual, lse);
        } else {
          EXPECT_NEAR(actual, lse, 4 * kEps * std::fmax(1.0f, std::fabs(lse)) + 5e-7);  // the data has 6 decimals
        }
      }
    });
  }
}
INSTANTIATE_TEST_SUITE_P(Golden, LseCombine, ::testing::ValuesIn(golden_cases("distributed/lse_combine")),
                         golden_case_name);

class EmptyRowMask : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(EmptyRowMask, EmptiesThoseRowsOnly) {
  const GoldenCase& c = GetParam();
  const std::vector<int32_t> lens = c.ints("local_seq_lens"), starts = c.ints("query_start_loc");
  const auto tokens = c.at<int32_t>("num_tokens"), heads = c.at<int32_t>("num_heads");
  std::vector<float> lse(static_cast<size_t>(tokens * heads), 0.5f);
  mask_empty_rows({lens, starts}, tokens, heads, {lse.data(), heads, 1});
  std::vector<float> by_context(lse.size(), 0.5f);
  mask_empty_rows(Context::cpu(), {lens, starts}, tokens, heads, {by_context.data(), heads, 1});
  EXPECT_EQ(by_context, lse);
  const auto empty = c.at<std::vector<std::vector<int32_t>>>("empty_rows");
  for (int32_t row = 0; row < tokens; ++row) {
    bool masked = false;
    for (const auto& range : empty) masked = masked || (row >= range[0] && row < range[1]);
    for (int32_t h = 0; h < heads; ++h) {
      EXPECT_EQ(lse[static_cast<size_t>(row * heads + h)], masked ? -kInf : 0.5f) << "row " << row;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Golden, EmptyRowMask, ::testing::ValuesIn(golden_cases("distributed/lse_combine", "masks")),
                         golden_case_name);

TEST(LsePacking, Lanes) {
  const nlohmann::json lanes = golden("distributed/lse_combine").at("lse_lanes");
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    EXPECT_EQ(lse_lanes(dtype), lanes.at(std::string(to_string(dtype))).get<int32_t>());
  }
  EXPECT_THROW(lse_lanes(DType::kFloat8E4M3), Error);
}

class CombineChoice : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(CombineChoice, ByName) {
  const GoldenCase& c = GetParam();
  const auto name = c.at<std::string>("name");
  const auto world = c.at<int32_t>("world");
  if (!c.data.contains("error")) {
    EXPECT_EQ(to_string(dcp_combine_from_name(name, world)), c.at<std::string>("is"));
    return;
  }
  try {
    dcp_combine_from_name(name, world);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(c.at<std::string>("error")));
  }
}
INSTANTIATE_TEST_SUITE_P(Golden, CombineChoice,
                         ::testing::ValuesIn(golden_cases("distributed/lse_combine", "backends")),
                         [](const auto& test) { return "case_" + std::to_string(test.index); });

TEST(CombineChoice, ReplicatedQueries) {
  for (const GoldenCase& c : golden_cases("distributed/lse_combine", "replicated_queries")) {
    std::optional<bool> wish;
    if (c.data.contains("wish")) wish = c.at<bool>("wish");
    const auto world = c.at<int32_t>("world");
    const DcpCombine combine =
        c.at<std::string>("combine") == "a2a" ? DcpCombine::kAllToAll : DcpCombine::kAllGatherReduceScatter;
    EXPECT_EQ(use_replicated_queries(wish, combine, world, c.at<int32_t>("prefill_world")), c.at<bool>("is")) << c;
  }
}

/// Every rank's random partial of a batch.
std::vector<Partial> random_partials(int32_t world, int64_t tokens, int64_t heads, int64_t dim, DType dtype,
                                     float lse_offset, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Partial> partials;
  for (int32_t r = 0; r < world; ++r) {
    Partial partial{tokens, heads, dim, dtype, {}, {}, LseBase::kE};
    for (int64_t i = 0; i < tokens * heads * dim; ++i) {
      std::byte memory[4];
      store_from_float(memory, dtype, 0, normal(random));
      partial.out.push_back(load_as_float(memory, dtype, 0));
    }
    for (int64_t i = 0; i < tokens * heads; ++i) partial.lse.push_back(lse_offset + 2 * normal(random));
    partials.push_back(partial);
  }
  return partials;
}

// In float64 from the definition. What a combine may lose: weights of W float32 factors, their sum and the products, of
// a few roundings each, relative to the largest value; then the result's rounding.
TEST(LseCombineNumerics, AddsInFloat32WhateverTheDtype) {
  const nlohmann::json sizes = golden("distributed/lse_combine").at("random");
  const auto world = sizes.at("world").get<int32_t>();
  const auto tokens = sizes.at("tokens").get<int64_t>(), dim = sizes.at("head_dim").get<int64_t>();
  const int64_t local = sizes.at("heads_per_rank").get<int64_t>(), heads = local * world;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const double unit = dtype == DType::kFloat32 ? 0x1p-24 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
    for (const float offset : {0.0f, 3000.0f, -3000.0f}) {
      const std::vector<Partial> partials = random_partials(world, tokens, heads, dim, dtype, offset, 5);
      for (const Form form : kForms) {
        run_ranks(world, [&](ProcessGroup& group) {
          const Result result = combine(form, group, partials[static_cast<size_t>(group.rank())]);
          const int64_t own = form == Form::kAllReduce ? heads : local;
          const int64_t first = form == Form::kAllReduce ? 0 : group.rank() * local;
          for (int64_t t = 0; t < tokens; ++t) {
            for (int64_t h = 0; h < own; ++h) {
              const auto row = static_cast<size_t>(t * heads + first + h);
              double top = -INFINITY, sum = 0;
              for (const Partial& p : partials) top = std::max<double>(top, p.lse[row]);
              for (const Partial& p : partials) sum += std::exp(p.lse[row] - top);
              EXPECT_NEAR(result.lse[static_cast<size_t>(t * own + h)], top + std::log(sum),
                          (world + 4) * 0x1p-24 * std::max(1.0, std::fabs(top)));
              for (int64_t d = 0; d < dim; ++d) {
                double value = 0, magnitude = 0;
                for (const Partial& p : partials) {
                  const double term =
                      std::exp(p.lse[row] - top) / sum * p.out[row * static_cast<size_t>(dim) + static_cast<size_t>(d)];
                  value += term;
                  magnitude += std::fabs(term);
                }
                EXPECT_NEAR(result.out[static_cast<size_t>((t * own + h) * dim + d)], value,
                            unit * std::fabs(value) + 0x1p-14 * unit + (world + 6) * 0x1p-24 * magnitude);
              }
            }
          }
        });
      }
    }
  }
}

TEST(LseCombineNumerics, OneRanksRowsComeOutUnchanged) {
  const std::vector<Partial> partials = random_partials(1, 3, 4, 8, DType::kBFloat16, 0, 3);
  for (const Form form : kForms) {
    auto groups = make_thread_groups(1);
    const Result result = combine(form, *groups[0], partials[0]);
    EXPECT_EQ(result.out, partials[0].out);
    EXPECT_EQ(result.lse, partials[0].lse);
  }
}

TEST(LseCombineNumerics, ARowsBitsDoNotDependOnTheOthers) {
  const std::vector<Partial> partials = random_partials(3, 5, 3, 8, DType::kFloat32, 0, 7);
  for (const Form form : {Form::kReduceScatter, Form::kAllToAll}) {
    run_ranks(3, [&](ProcessGroup& group) {
      const Partial& all = partials[static_cast<size_t>(group.rank())];
      const Result whole = combine(form, group, all);
      Partial last{1, 3, 8, DType::kFloat32, {}, {}, LseBase::kE};
      last.out.assign(all.out.end() - 24, all.out.end());
      last.lse.assign(all.lse.end() - 3, all.lse.end());
      const Result alone = combine(form, group, last);
      EXPECT_EQ(std::vector<float>(whole.out.end() - 8, whole.out.end()), alone.out);
      EXPECT_EQ(whole.lse.back(), alone.lse.back());
    });
  }
}

TEST(LseCombineNumerics, OddRowsOfSixteenBits) {
  const std::vector<Partial> partials = random_partials(2, 3, 2, 5, DType::kFloat16, 0, 9);
  std::vector<Result> results[2];
  for (size_t i = 0; i < 2; ++i) {
    results[i].resize(2);
    run_ranks(2, [&](ProcessGroup& group) {
      const auto rank = static_cast<size_t>(group.rank());
      results[i][rank] = combine(i == 0 ? Form::kReduceScatter : Form::kAllToAll, group, partials[rank]);
    });
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    for (size_t d = 0; d < results[0][rank].out.size(); ++d) {
      EXPECT_NEAR(results[0][rank].out[d], results[1][rank].out[d],
                  0x1p-10 * std::fabs(results[0][rank].out[d]) + 1e-6);
    }
  }
}

// Two requests of one and four rows, the first without keys on rank 0, and two rows of padding: whatever stands there.
TEST(LseCombine, MasksRowsBeforeTheyAreSent) {
  const nlohmann::json mask = golden("distributed/lse_combine").at("masks")[0];
  const auto starts = mask.at("query_start_loc").get<std::vector<int32_t>>();
  const auto tokens = mask.at("num_tokens").get<int64_t>();
  for (const Form form : {Form::kReduceScatter, Form::kAllToAll}) {
    run_ranks(2, [&](ProcessGroup& group) {
      std::vector<int32_t> lens = mask.at("local_seq_lens").get<std::vector<int32_t>>();
      if (group.rank() == 1) lens[0] = 5;
      Partial partial{tokens,
                      2,
                      2,
                      DType::kFloat32,
                      std::vector<float>(static_cast<size_t>(tokens * 4), 1.0f),
                      std::vector<float>(static_cast<size_t>(tokens * 2), 0.0f),
                      LseBase::kE};
      if (group.rank() == 0) std::fill_n(partial.out.begin(), 4, 1e30f);
      const Result result = combine(form, group, partial, {lens, starts});
      for (int64_t t = 0; t < tokens; ++t) {
        const float lse = t >= 5 ? -kInf : t == 0 ? 0.0f : std::log(2.0f);
        EXPECT_FLOAT_EQ(result.lse[static_cast<size_t>(t)], lse) << "row " << t;
        EXPECT_EQ(result.out[static_cast<size_t>(2 * t)], t >= 5 ? 0.0f : 1.0f) << "row " << t;
      }
    });
  }
}

// The bug of the originals: LSEs of base 2 combined as if they were natural.
TEST(LseCombine, TheBaseIsPartOfThePartial) {
  const GoldenCase two = golden_cases("distributed/lse_combine")[3];
  ASSERT_EQ(two.at<std::string>("base"), "2");
  for (const Form form : kForms) {
    run_ranks(2, [&](ProcessGroup& group) {
      const auto rank = static_cast<size_t>(group.rank());
      const auto outs = two.at<std::vector<std::vector<float>>>("outs");
      const auto lses = two.at<std::vector<float>>("lses");
      Partial partial{1, 2, 1, DType::kFloat32, {outs[rank][0], outs[rank][0]}, {lses[rank], lses[rank]}, LseBase::k2};
      const Result natural = combine(form, group, partial, {}, LseBase::kE);
      EXPECT_NEAR(natural.lse[0], number(two.data.at("lse")) * std::log(2.0), 1e-6);
      EXPECT_NEAR(natural.out[0], two.at<std::vector<float>>("out")[0], 1e-6);
    });
  }
}

TEST(LseCombine, RefusesBeforeAnythingIsSent) {
  auto groups = make_thread_groups(4, {std::chrono::seconds(40)});  // nobody else comes: waiting would hang
  const Partial six{2, 6, 8, DType::kFloat32, std::vector<float>(96), std::vector<float>(12), LseBase::kE};
  for (const Form form : {Form::kReduceScatter, Form::kAllToAll}) {
    try {
      combine(form, *groups[0], six);
      ADD_FAILURE();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), HasSubstr("H=6 must be divisible by DCP world size 4."));
    }
  }
  const Partial four{2, 4, 8, DType::kFloat32, std::vector<float>(64), std::vector<float>(8), LseBase::kE};
  const std::vector<int32_t> lens{1}, starts{0, 2}, long_starts{0, 1, 2}, beyond{0, 3};
  EXPECT_THROW(combine(Form::kAllToAll, *groups[0], four, {lens, {}}), Error);
  EXPECT_THROW(combine(Form::kAllToAll, *groups[0], four, {lens, long_starts}), Error);
  EXPECT_THROW(combine(Form::kAllToAll, *groups[0], four, {lens, beyond}), Error);
  const AttentionStateView state{ConstTensorView(four.out.data(), DType::kFloat32, {2, 4, 8}), four.lse.data(), 4, 1};
  float out[16];
  try {
    cp_lse_ag_out_rs(one_thread(), *groups[0], state, TensorView(out, DType::kFloat32, {2, 1, 8}), {}, {});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kWorkspaceTooSmall);
  }
  EXPECT_THROW(cp_lse_ag_out_rs(one_thread(), *groups[0], state, TensorView(out, DType::kFloat32, {2, 2, 4}), {}, {}),
               Error);
}

}  // namespace
}  // namespace folio::distributed

// Combining partial results across ranks, and the operations of their group, in a GPU's memory and in the host's.
#include <array>
#include <cstring>
#include <limits>

#include "folio/distributed/lse_combine.hpp"
#include "folio/distributed/thread_group.hpp"
#include "twin_array.hpp"

namespace folio::cuda_test {
namespace {

using namespace folio::distributed;

using Ints = std::vector<int32_t>;

constexpr int32_t kWorld = 3;
constexpr int64_t kTokens = 11;
constexpr int64_t kManyTokens = 1501;  // whose rows a warp takes several of
constexpr int64_t kHeads = 6;

enum class Form { kReduceScatter, kAllReduce, kAllToAll };

struct RankCase {
  Form form;
  DType dtype;
  int64_t dim;
  LseBase base;
  int64_t tokens = kTokens;
};

ThreadGroupOptions options_of(bool on_gpu) {
  ThreadGroupOptions options;
  if (on_gpu) options.context = Context::cuda(0);
  return options;
}

class Ranks : public CudaTest, public testing::WithParamInterface<RankCase> {};

/// One rank's inputs and results, on both devices.
struct Rank {
  Rank(const RankCase& c, std::mt19937& random)
      : partial(random_elements(c.dtype, c.tokens * kHeads * c.dim, random, 3.0f)),
        out(random_elements(c.dtype, c.tokens * kHeads * c.dim, random)),
        lse(lses(random, c.tokens)),
        lse_out(std::vector<float>(static_cast<size_t>(c.tokens * kHeads), 7.0f)),
        workspace(std::vector<std::byte>(
            combine_workspace_size(kWorld, c.tokens, kHeads, static_cast<int32_t>(c.dim)) + 256, std::byte{0xff})),
        local_lens(std::vector<int32_t>{4, random() % 2 == 0 ? 0 : 9, 1}),
        query_start(std::vector<int32_t>{0, 2, 6, static_cast<int32_t>(c.tokens) - 2}) {}
  static std::vector<float> lses(std::mt19937& random, int64_t tokens) {
    std::vector<float> values(static_cast<size_t>(tokens * kHeads));
    std::normal_distribution<float> normal(0.0f, 5.0f);
    for (float& value : values) {
      value = normal(random);
      if (random() % 7 == 0) value = -std::numeric_limits<float>::infinity();
      if (random() % 9 == 0) value = std::numeric_limits<float>::quiet_NaN();
    }
    return values;
  }
  Bytes partial, out;
  Twin<float> lse, lse_out;
  Bytes workspace;
  Twin<int32_t> local_lens, query_start;
};

TEST_P(Ranks, CombineAsOnTheCpu) {
  const RankCase& c = GetParam();
  std::mt19937 random(91);
  std::vector<Rank> ranks;
  for (int32_t r = 0; r < kWorld; ++r) ranks.emplace_back(c, random);
  const int64_t heads = c.form == Form::kAllReduce ? kHeads : kHeads / kWorld;
  const auto call = c.form == Form::kReduceScatter ? cp_lse_ag_out_rs
                    : c.form == Form::kAllReduce   ? cp_lse_ag_out_ar
                                                   : dcp_a2a_lse_reduce;
  for (const bool on_gpu : {false, true}) {
    run_ranks(
        kWorld,
        [&](ProcessGroup& group) {
          Rank& rank = ranks[static_cast<size_t>(group.rank())];
          const Context context = context_of(on_gpu);
          const TestStream stream;
          auto* const memory = rank.workspace.at(on_gpu);
          auto* const aligned = memory + (256 - reinterpret_cast<uintptr_t>(memory) % 256) % 256;
          call(context, group,
               {ConstTensorView(rank.partial.at(on_gpu), c.dtype, {c.tokens, kHeads, c.dim}), rank.lse.at(on_gpu),
                kHeads, 1, c.base},
               TensorView(rank.out.at(on_gpu), c.dtype, {c.tokens, heads, c.dim}),
               {rank.lse_out.at(on_gpu), heads, 1, LseBase::k2}, {aligned, rank.workspace.host.size() - 256},
               {rank.local_lens.span(on_gpu), rank.query_start.span(on_gpu)}, on_gpu ? stream.get() : Stream{});
          stream.wait();
        },
        options_of(on_gpu));
  }
  int64_t unequal = 0;
  for (const Rank& rank : ranks) {
    const std::vector<std::byte> gpu = rank.out.gpu();
    for (int64_t i = 0; i < c.tokens * heads * c.dim; ++i) {
      const float mine = load_as_float(gpu.data(), c.dtype, i);
      const float expected = load_as_float(rank.out.host.data(), c.dtype, i);
      if (mine == expected) continue;
      ++unequal;
      EXPECT_NEAR(mine, expected, c.dtype == DType::kFloat32 ? 1e-5 : 0.1);
    }
    const std::vector<float> lses = rank.lse_out.gpu();
    for (size_t i = 0; i < lses.size(); ++i) {
      if (lses[i] == rank.lse_out.host[i]) continue;
      EXPECT_NEAR(lses[i], rank.lse_out.host[i], 1e-5);
      ++unequal;
    }
  }
  EXPECT_LE(unequal, c.tokens * heads * c.dim * kWorld / 50);
}

INSTANTIATE_TEST_SUITE_P(Forms, Ranks,
                         testing::Values(RankCase{Form::kReduceScatter, DType::kFloat32, 40, LseBase::kE},
                                         RankCase{Form::kReduceScatter, DType::kBFloat16, 64, LseBase::k2},
                                         RankCase{Form::kAllReduce, DType::kFloat16, 7, LseBase::kE},
                                         RankCase{Form::kAllToAll, DType::kFloat32, 33, LseBase::k2},
                                         RankCase{Form::kAllToAll, DType::kBFloat16, 7, LseBase::kE},
                                         RankCase{Form::kAllToAll, DType::kFloat16, 128, LseBase::kE},
                                         RankCase{Form::kReduceScatter, DType::kBFloat16, 128, LseBase::kE,
                                                  kManyTokens},
                                         RankCase{Form::kAllReduce, DType::kFloat32, 36, LseBase::k2, kManyTokens},
                                         RankCase{Form::kAllToAll, DType::kBFloat16, 64, LseBase::kE, kManyTokens}),
                         [](const auto& given) {
                           return "form" + std::to_string(static_cast<int>(given.param.form)) + "_" +
                                  std::string(to_string(given.param.dtype)) + "_" + std::to_string(given.param.dim) +
                                  "_" + std::to_string(given.param.tokens);
                         });

TEST_F(CudaTest, EmptyRowsAreMaskedInPlace) {
  std::mt19937 random(92);
  Twin<float> lse(Rank::lses(random, kTokens));
  const Ints lens{4, 0, 1, 0}, starts{0, 2, 2, 6, 8};
  Twin<int32_t> local(lens), query_start(starts);
  for (const bool on_gpu : {false, true}) {
    mask_empty_rows(context_of(on_gpu), {local.span(on_gpu), query_start.span(on_gpu)}, kTokens, kHeads,
                    {lse.at(on_gpu), kHeads, 1});
  }
  wait_for_gpu();
  const std::vector<float> gpu = lse.gpu();
  EXPECT_EQ(std::memcmp(gpu.data(), lse.host.data(), gpu.size() * sizeof(float)), 0) << "NaNs and infinities included";
}

/// Exchanges and sums of groups over a GPU's memory give the bits of groups over the host's.
TEST_F(CudaTest, GroupsOverDeviceMemory) {
  std::mt19937 random(93);
  constexpr size_t kCount = 1000;
  struct Buffers {
    Twin<float> send, gathered, exchanged, reduced, scattered;
  };
  std::vector<Buffers> ranks;
  const auto noise = [&](size_t count) {
    std::vector<float> values(count);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
    return Twin<float>(values);
  };
  for (int32_t r = 0; r < kWorld; ++r) {
    ranks.push_back(
        {noise(kWorld * kCount), noise(kWorld * kCount), noise(kWorld * kCount), noise(kCount + 1), noise(kCount)});
  }
  for (const bool on_gpu : {false, true}) {
    run_ranks(
        kWorld,
        [&](ProcessGroup& group) {
          Buffers& mine = ranks[static_cast<size_t>(group.rank())];
          const TestStream own;
          const Stream stream = on_gpu ? own.get() : Stream{};
          group.all_gather(mine.send.at(on_gpu), mine.gathered.at(on_gpu), kCount * sizeof(float), stream);
          group.all_to_all(mine.send.at(on_gpu), mine.exchanged.at(on_gpu), kCount * sizeof(float), stream);
          group.all_reduce_sum(mine.reduced.at(on_gpu), kCount + 1, stream);
          group.reduce_scatter_sum(mine.send.at(on_gpu), mine.scattered.at(on_gpu), kCount, stream);
          group.barrier(stream);
          const int32_t own_rank = group.rank();
          std::array<int32_t, kWorld> all{};
          group.all_gather_host(&own_rank, all.data(), sizeof(own_rank));
          EXPECT_EQ(all, (std::array{0, 1, 2})) << "of host memory, on either device";
        },
        options_of(on_gpu));
  }
  for (const Buffers& mine : ranks) {
    EXPECT_TRUE(mine.gathered.equal());
    EXPECT_TRUE(mine.exchanged.equal());
    EXPECT_TRUE(mine.reduced.equal());
    EXPECT_TRUE(mine.scattered.equal());
  }
}

// More parts than one launch takes: the sums go on in their order.
TEST_F(CudaTest, SumsOfManyRanksAreTheHosts) {
  constexpr size_t kCount = 1003, kParts = 200;
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0f, 100.0f);
  std::vector<float> all(kParts * kCount);
  for (float& value : all) value = normal(random);
  const DeviceArray<float> parts(all), sums(kCount);
  const Context gpu = Context::cuda(0), cpu = Context::cpu({.executor = {}, .num_threads = 1, .force_kernel = {}});
  for (const size_t count : {size_t{1}, size_t{64}, size_t{65}, size_t{127}, size_t{128}, kParts}) {
    std::vector<const float*> on_gpu, on_host;
    for (size_t i = 0; i < count; ++i) {
      on_gpu.push_back(parts.data() + i * kCount);
      on_host.push_back(all.data() + i * kCount);
    }
    std::vector<float> expected(kCount);
    sum_over_ranks(cpu, on_host, kCount, expected.data());
    sum_over_ranks(gpu, on_gpu, kCount, sums.data());
    EXPECT_EQ(sums.get(), expected) << count;
  }
}

}  // namespace
}  // namespace folio::cuda_test

// What must not change a request's bits: the other requests of its batch, padding, graphs; at the next level, how its
// tokens were divided over steps. The cases are data: tests/golden/backends/invariance.json.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "backend_step.hpp"
#include "core/golden_test.hpp"
#include "core/instrumented_test_util.hpp"
#include "testing/random.hpp"

namespace folio::backends::testing {
namespace {

using distributed::testing::RequestLengths;
using folio::testing::golden;
using folio::testing::golden_cases;
using folio::testing::GoldenCase;
using nlohmann::json;

constexpr const char* kTable = "backends/invariance";
constexpr int32_t kFirstOtherId = 100;

/// One way to run the batches of a case.
struct Manner {
  BackendKind kind = BackendKind::kFlashInfer;
  Determinism level = Determinism::kBatchInvariant;
  DType model = DType::kFloat32;  ///< float32 results show what a 16-bit one's rounding hides
  std::string cache = "auto";
  bool padded = false;  ///< as a graph is replayed
  int32_t world = 1;
};

std::string describe(const Manner& manner) {
  return std::string(manner.kind == BackendKind::kFlashInfer ? "FlashInfer" : "FlashAttention") +
         (manner.level == Determinism::kScheduleInvariant ? ", schedule-invariant, " : ", batch-invariant, ") +
         std::string(to_string(manner.model)) + " over " + manner.cache + (manner.padded ? ", padded" : "") +
         ", world " + std::to_string(manner.world);
}

DcpSetup setup_of(const Manner& manner) {
  const json geometry = golden(kTable).at("geometry");
  DcpSetup setup;
  setup.world = manner.world;
  setup.interleave = manner.world == 1 ? 1 : 4;
  setup.heads = geometry.at("heads").at(0);
  setup.kv_heads = geometry.at("heads").at(1);
  setup.dim_qk = geometry.at("head_size");
  setup.page_size = geometry.at("page_size");
  setup.model = setup.cache = manner.model;
  if (manner.cache != "auto") {
    setup.cache = kv_cache_dtype_from_name(manner.cache, manner.model);
    setup.k_scale = 0.5f;
    setup.v_scale = 2.0f;
  }
  setup.sinks = true;
  setup.sampled_rows = 12;
  setup.padding_rows = 0;
  setup.determinism = manner.level;
  return setup;
}

/// Every row of the output by the request and position that it is of, of all ranks.
using Row = std::tuple<int32_t, int32_t, int32_t>;  ///< rank, id, position
using Rows = std::map<Row, std::vector<std::byte>>;

Rows run_batch(DcpSetup setup, const Manner& manner, std::string* wrong = nullptr) {
  setup = for_backend(setup, manner.kind);
  DcpCase whole(setup);
  Change change;
  if (manner.padded) {
    change = [](EngineConfig& engine, CommonAttentionMetadata&) {
      const json bounds = golden(kTable).at("graph_bounds");
      engine.compilation = {DecodeGraphMode::kFull, bounds.at("max_capture_size")};
      engine.scheduler = {bounds.at("max_num_seqs"), bounds.at("max_num_batched_tokens")};
      engine.model.max_model_len = bounds.at("max_model_len");
    };
  }
  distributed::run_ranks(setup.world, [&](distributed::ProcessGroup& group) {
    const int32_t threads = group.size() == 1 ? 3 : 1;
    run_backend(whole, manner.kind, group, Context::cpu({.executor = {}, .num_threads = threads, .force_kernel = {}}),
                change);
  });
  if (wrong != nullptr) *wrong = whole.wrong_outputs();
  Rows rows;
  const auto bytes = static_cast<std::ptrdiff_t>(setup.heads * setup.dim_v * size_of(setup.model));
  for (int32_t rank = 0; rank < setup.world; ++rank) {
    const std::vector<std::byte>& out = whole.ranks[static_cast<size_t>(rank)].out;
    for (size_t i = 0; i < setup.requests.size(); ++i) {
      const RequestLengths& request = setup.requests[i];
      for (int32_t j = 0; j < request.q_len; ++j) {
        const auto at = out.begin() + (whole.cu_q[i] + j) * bytes;
        rows[{rank, request.id, request.seq_len - request.q_len + j}] = {at, at + bytes};
      }
    }
  }
  return rows;
}

/// Where both have a row, they have the same. Returns one that differs, empty if none does.
std::string difference(const Rows& expected, const Rows& actual, int32_t& compared) {
  for (const auto& [row, bytes] : actual) {
    const auto same = expected.find(row);
    if (same == expected.end()) continue;
    ++compared;
    if (same->second != bytes) {
      return "rank " + std::to_string(std::get<0>(row)) + ", request " + std::to_string(std::get<1>(row)) +
             ", position " + std::to_string(std::get<2>(row));
    }
  }
  return {};
}

std::vector<RequestLengths> fixed_requests(const GoldenCase& golden_case) {
  std::vector<RequestLengths> requests;
  for (const json& lens : golden_case.data.at("fixed")) {
    requests.push_back({lens.at(0), lens.at(1), static_cast<int32_t>(requests.size())});
  }
  return requests;
}

void shuffle(std::vector<RequestLengths>& requests, verify::Random& random) {
  for (size_t i = requests.size(); i > 1; --i) {
    std::swap(requests[i - 1], requests[static_cast<size_t>(random.below(static_cast<int32_t>(i)))]);
  }
}

/// The fixed requests anywhere among others; for FlashInfer decodes in front, as its engine orders them.
DcpSetup random_batch(const GoldenCase& golden_case, const Manner& manner, verify::Random& random) {
  DcpSetup setup = setup_of(manner);
  setup.requests = fixed_requests(golden_case);
  const bool encoder = golden_case.value("encoder", false);
  for (int32_t others = random.below(6); others > 0; --others) {
    const int32_t q_len = random.one_in(2) ? 1 : random.between(1, golden_case.at<int32_t>("longest_other_query"));
    const int32_t before = encoder ? 0 : random.one_in(8) ? random.between(2000, 2600) : random.below(400);
    setup.requests.push_back({before + q_len, q_len, kFirstOtherId + others});
  }
  shuffle(setup.requests, random);
  if (manner.kind == BackendKind::kFlashInfer) {
    std::stable_partition(setup.requests.begin(), setup.requests.end(),
                          [](const RequestLengths& r) { return r.q_len == 1; });
  }
  if (manner.padded) {
    for (int32_t empty = random.below(3); empty > 0; --empty) setup.requests.push_back({0, 0, kFirstOtherId});
    setup.padding_rows = random.below(5);
    setup.padding_slots = setup.padding_rows / 2;
  }
  if (encoder) setup.encoder = true, setup.mask = MaskKind::kNone;
  return setup;
}

Manner manner_of(const json& entry) {
  Manner manner;
  if (entry.at("level") == "schedule") manner.level = Determinism::kScheduleInvariant;
  if (entry.at("model") == "bfloat16") manner.model = DType::kBFloat16;
  manner.cache = entry.at("cache");
  return manner;
}

std::vector<Manner> manners_of(const GoldenCase& golden_case) {
  std::vector<Manner> manners;
  const bool encoder = golden_case.value("encoder", false);
  const json entries = golden(kTable).at("manners");
  for (const json& backend : golden_case.data.at("backends")) {
    for (const json& entry : entries) {
      for (const bool padded : {false, true}) {
        Manner manner = manner_of(entry);
        if (encoder && manner.cache != "auto") continue;  // refused
        manner.kind = backend == "flashinfer" ? BackendKind::kFlashInfer : BackendKind::kFlashAttention;
        manner.padded = padded;
        manners.push_back(manner);
      }
    }
  }
  return manners;
}

/// The rows of the fixed requests when they are the whole batch, unpadded, and planned for no graph.
Rows rows_alone(const GoldenCase& golden_case, Manner manner) {
  manner.padded = false;
  DcpSetup setup = setup_of(manner);
  setup.requests = fixed_requests(golden_case);
  if (golden_case.value("encoder", false)) setup.encoder = true, setup.mask = MaskKind::kNone;
  std::string wrong;
  Rows rows = run_batch(setup, manner, &wrong);
  EXPECT_EQ(wrong, "");
  return rows;
}

/// How many of `batches` random ones give the fixed requests other bits than they have alone.
int32_t num_different(const GoldenCase& golden_case, const Manner& manner, int32_t batches, std::string& first) {
  const Rows alone = rows_alone(golden_case, manner);
  verify::Random random(11);
  int32_t different = 0;
  for (int32_t batch = 0; batch < batches; ++batch) {
    std::string wrong;
    int32_t compared = 0;
    const DcpSetup setup = random_batch(golden_case, manner, random);
    const Rows among = run_batch(setup, manner, batch % 25 == 0 ? &wrong : nullptr);
    EXPECT_EQ(wrong, "");
    const std::string where = difference(alone, among, compared);
    if (!where.empty() && different++ == 0) first = "batch " + std::to_string(batch) + ", " + where;
    EXPECT_TRUE(!where.empty() || compared == static_cast<int32_t>(alone.size()));
  }
  return different;
}

class BackendInvariance : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(BackendInvariance, HoldsInAHundredRandomBatches) {
  const int32_t batches = folio::testing::kInstrumented ? 5 : golden(kTable).at("random_batches").get<int32_t>();
  ASSERT_FALSE(manners_of(GetParam()).empty());
  for (const Manner& manner : manners_of(GetParam())) {
    std::string first;
    EXPECT_EQ(num_different(GetParam(), manner, batches, first), 0) << describe(manner) << ": " << first;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, BackendInvariance, ::testing::ValuesIn(golden_cases(kTable)),
                         folio::testing::golden_case_name);

// A KV cache that ranks divide changes nothing about it.
TEST(BackendInvarianceOfRanks, HoldsUnderDecodeContextParallelism) {
  for (const GoldenCase& golden_case : golden_cases(kTable)) {
    for (Manner manner : manners_of(golden_case)) {
      if (manner.padded || golden_case.value("encoder", false)) continue;  // graphs are refused, encoders have no cache
      manner.world = 2;
      std::string first;
      EXPECT_EQ(num_different(golden_case, manner, folio::testing::kInstrumented ? 1 : 10, first), 0)
          << golden_case.name << ", " << describe(manner) << ": " << first;
    }
  }
}

// What the batches are worth: without the level they do change bits, if not in every backend.
TEST(BackendInvarianceBatches, ChangeBitsOfLongRequestsOtherwise) {
  for (const GoldenCase& golden_case : golden_cases(kTable)) {
    if (golden_case.value("encoder", false)) continue;
    int32_t different = 0;
    for (const BackendKind kind : kBackends) {
      Manner manner;
      manner.kind = kind;
      manner.level = Determinism::kRunToRun;
      std::string first;
      different += num_different(golden_case, manner, 100, first);
    }
    EXPECT_GT(different, 0) << golden_case.name;
  }
}

class BackendScheduleInvariance : public ::testing::TestWithParam<GoldenCase> {};

/// Steps of one schedule: each unfinished request has a chunk in it, or waits.
std::vector<std::vector<RequestLengths>> random_schedule(const GoldenCase& golden_case, verify::Random& random) {
  std::vector<RequestLengths> computed;  // seq_len: computed so far; q_len: the whole request's length
  for (const json& request : golden_case.data.at("requests")) {
    computed.push_back({request.at("first"), request.at("len"), static_cast<int32_t>(computed.size())});
  }
  std::vector<std::vector<RequestLengths>> steps;
  while (std::ranges::any_of(computed, [](const auto& r) { return r.seq_len < r.q_len; })) {
    std::vector<RequestLengths> step;
    for (RequestLengths& request : computed) {
      const int32_t left = request.q_len - request.seq_len;
      if (left == 0 || random.one_in(4)) continue;
      const int32_t chunk = random.one_in(2) ? 1 : std::min(left, random.between(2, 24));
      request.seq_len += chunk;
      step.push_back({request.seq_len, chunk, request.id});
    }
    shuffle(step, random);
    std::stable_partition(step.begin(), step.end(), [](const RequestLengths& r) { return r.q_len == 1; });
    if (!step.empty()) steps.push_back(step);
  }
  return steps;
}

// Every token gets the bits that it has when its request is computed in one chunk, whether it comes as a decode or
// inside another chunk, in whatever company.
TEST_P(BackendScheduleInvariance, HoldsForDecodesAndChunks) {
  std::vector<RequestLengths> at_once;
  for (const json& request : GetParam().data.at("requests")) {
    const int32_t len = request.at("len");
    at_once.push_back({len, len - request.at("first").get<int32_t>(), static_cast<int32_t>(at_once.size())});
  }
  const json entries = golden(kTable).at("manners");
  for (const BackendKind kind : kBackends) {
    for (const json& entry : entries) {
      Manner manner = manner_of(entry);
      if (manner.level != Determinism::kScheduleInvariant) continue;
      manner.kind = kind;
      SCOPED_TRACE(describe(manner));
      DcpSetup setup = setup_of(manner);
      setup.requests = at_once;
      std::string wrong;
      const Rows expected = run_batch(setup, manner, &wrong);
      ASSERT_EQ(wrong, "");
      verify::Random random(3);
      int32_t decodes = 0, in_chunks = 0;
      for (int32_t i = golden(kTable).at("random_schedules"); i > 0; --i) {
        int32_t compared = 0;
        for (const std::vector<RequestLengths>& step : random_schedule(GetParam(), random)) {
          setup.requests = step;
          ASSERT_EQ(difference(expected, run_batch(setup, manner), compared), "");
          for (const RequestLengths& request : step) (request.q_len == 1 ? decodes : in_chunks) += request.q_len;
        }
        EXPECT_EQ(compared, static_cast<int32_t>(expected.size())) << "every token was computed";
      }
      EXPECT_GT(decodes, 100);
      EXPECT_GT(in_chunks, 100);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, BackendScheduleInvariance, ::testing::ValuesIn(golden_cases(kTable, "schedules")),
                         folio::testing::golden_case_name);

}  // namespace
}  // namespace folio::backends::testing

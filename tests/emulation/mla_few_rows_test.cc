// "cuda-sm90-mla" has kernels of their own for work tiles of up to 16 packed rows, one of them for fp8 keys.
// The few random cases that an emulation has time for miss most of their code.
#include <gtest/gtest.h>

#include <string>

#include "folio/verify.hpp"

namespace folio::verify {
namespace {

struct Kind {
  const char* name;
  const char* levels;
};

constexpr Kind kInputs[] = {{"bfloat16", ""},
                            {"float16", " dtypes=f16/f16/f16"},
                            {"e4m3", " dtypes=bf16/e4m3/bf16"},
                            {"e5m2_of_float16", " dtypes=f16/e5m2/f16"},
                            {"e4m3_queries", " dtypes=e4m3/e4m3/bf16"},
                            {"e4m3_queries_of_float16", " dtypes=e4m3/f16/f16"}};

/// Of a batch of decodes: what has a path of its own in the producer, between the GEMMs or in the epilogue. Keys longer
/// than the KV pipeline has stages for.
constexpr const char* kDecodes[] = {"",
                                    " page=1",
                                    " page=64 lengths=long",
                                    " cap=on alibi=on sinks=on lse=2",
                                    " mask=custom-all page=8",
                                    " segments=prefix+new window=left",
                                    " segments=shard2 workers=5 lengths=long scales=request+head",
                                    " segments=shard1 determinism=none workers=13 lengths=long",
                                    " format=padded page=32 table=dense scales=head",
                                    " dims=512/512 format=interleaved",
                                    " dims=512/512 format=alias lengths=long group=7"};

void check_case(const std::string& text) {
  const CaseReport report = run_case(parse_case(text));
  EXPECT_TRUE(report.passed) << report.failure << "\n  case: " << text;
}

class MlaFewRows : public ::testing::TestWithParam<Kind> {};

TEST_P(MlaFewRows, OfDecodes) {
  for (const char* levels : kDecodes) {
    check_case(std::string("kernel=cuda-sm90-mla seed=4 queries=decode group=16 dims=576/512 lengths=medium") +
               GetParam().levels + levels);
  }
}

/// Several tokens a request: as many packed rows as fit, or more.
TEST_P(MlaFewRows, OfVerification) {
  for (const char* levels : {" group=4", " group=7 page=64 lengths=long", " group=8 cap=on page=8",
                             " group=4 mask=custom-tail page=1", " group=7 dims=512/512 segments=prefix+new"}) {
    check_case(std::string("kernel=cuda-sm90-mla seed=6 queries=verify dims=576/512 lengths=medium") +
               GetParam().levels + levels);
  }
}

/// Rows of fp8_ds_mla: by TMA or by threads, few packed rows or many, beside ragged keys, at ranges' ends. Seeds differ
/// in how scales go beyond float16's range.
class MlaDsMla : public ::testing::TestWithParam<int> {};

TEST_P(MlaDsMla, DecodesAndPrompts) {
  for (const char* levels :
       {" group=16 queries=decode", " group=16 queries=decode page=1 lengths=long",
        " group=16 queries=decode page=64 lengths=long scales=head",
        " group=16 queries=decode cap=on alibi=on sinks=on lse=2",
        " group=16 queries=decode segments=prefix+new window=left",
        " group=16 queries=decode segments=shard1 determinism=none workers=13 lengths=long",
        " group=8 queries=decode dtypes=e4m3/e4m3/bf16 mask=custom-all page=8", " group=16 queries=mixed lengths=long",
        " group=16 queries=verify lengths=long page=64 cap=on", " group=16 queries=mixed page=1",
        " group=8 queries=prefill page=64 lengths=long",
        " group=16 queries=mixed page=8 mask=custom-tail determinism=schedule",
        " group=16 queries=mixed segments=cascade1 table=dense",
        " group=7 queries=verify page=32 dtypes=e4m3/e4m3/e4m3 segments=shard2 scales=request"}) {
    check_case("kernel=cuda-sm90-mla format=ds-mla lengths=medium seed=" + std::to_string(GetParam()) + levels);
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, MlaDsMla, ::testing::Range(8, 11));

INSTANTIATE_TEST_SUITE_P(Types, MlaFewRows, ::testing::ValuesIn(kInputs),
                         [](const auto& kind) { return std::string(kind.param.name); });

}  // namespace
}  // namespace folio::verify

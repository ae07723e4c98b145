#include "kernels/cpu/amx/kernel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "core/instrumented_test_util.hpp"
#include "folio/types/float_convert.hpp"
#include "kernels/cpu/amx/emulated_kernel_test_util.hpp"
#include "kernels/cpu/common/kernel_fixture_test_util.hpp"
#include "kernels/cpu/common/random_case_test_util.hpp"
#include "kernels/cpu/common/softmax_cases_test_util.hpp"
#include "scheduler/batch.hpp"

/// The AMX kernel on tiles in hardware, where the machine has them, and in software.
namespace folio::inline v0::kernels {
namespace {

using scheduler::testing::OwnedBatch;
using scheduler::testing::paged_batch;
using testing::all_features;
using testing::AttentionCase;
using testing::CaseOptions;
using testing::kInfinity;
using testing::kNan;
using testing::lengthen_row;
using testing::mask_without;
using testing::overwrite;
using testing::overwrite_kv;
using testing::random_case;
using testing::RandomCase;
using testing::run_step;
using Result = AttentionCase::Result;

class AmxKernels : public CpuKernels {};

INSTANTIATE_TEST_SUITE_P(Tiles, AmxKernels,
                         ::testing::Values(&amx::attention_kernel(), &amx::emulated_kernel(),
                                           &amx::emulated_kernel_with_few_rows()),
                         kernel_test_name);

/// bfloat16 over packed pages of 32, float32 out, causal, 4 query heads over 2 KV heads.
AttentionConfig amx_config(int32_t head_dim = 64) {
  AttentionConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = head_dim;
  config.q = config.kv = config.ragged_kv = DType::kBFloat16;
  config.out = DType::kFloat32;
  config.kv_format = KvFormat::kCpuPacked;
  config.page_size = 32;
  return config;
}

void use_float16(AttentionConfig& config) {
  config.q = config.kv = config.ragged_kv = DType::kFloat16;
}

TEST_P(AmxKernels, Output_RandomCases_MatchesReference) {
  std::mt19937 random(20260202);
  for (int i = 0; i < folio::testing::random_cases(300); ++i) {
    RandomCase one = random_case(random);
    const AttentionConfig taken = amx_config();
    constexpr DType kTypes[] = {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8,
                                DType::kFloat16};
    one.config.kv = kTypes[i % 5];
    one.config.q = one.config.ragged_kv = i % 5 == 4 ? DType::kFloat16 : DType::kBFloat16;
    const bool strided = i / 5 % 5 < 2;
    one.config.kv_format = strided ? KvFormat::kStrided : taken.kv_format;
    one.config.page_size = i % 7 == 0 ? 32 : strided ? 1 + i % 49 : 16 + 2 * (i % 25);
    one.options.v_aliases_k = false;
    AttentionCase subject(one.config, one.batch, one.options, static_cast<uint32_t>(i));
    ASSERT_EQ(GetParam()->refusal(one.config), "");
    ASSERT_EQ(subject.compare(subject.run(*GetParam(), one.num_workers, one.tile_rows)), "")
        << "case " << i << ": kv " << to_string(one.config.kv) << " out " << to_string(one.config.out) << " dims "
        << one.config.head_dim_qk << "/" << one.config.head_dim_v << " page " << one.config.page_size << " mask "
        << static_cast<int>(one.config.mask) << " determinism " << static_cast<int>(one.config.determinism);
  }
}

TEST_P(AmxKernels, TakeEveryHeadDimension) {
  for (int32_t dim = 8; dim <= 256; dim += folio::testing::kInstrumented ? 40 : 8) {
    AttentionConfig config = amx_config(dim);
    config.head_dim_v = 264 - dim;
    if (dim % 24 == 0) use_float16(config);
    const auto batch =
        folio::testing::kInstrumented ? paged_batch({1, 9}, {70, 129}) : paged_batch({1, 3, 20}, {70, 65, 129});
    AttentionCase subject(config, batch, {}, static_cast<uint32_t>(dim));
    ASSERT_EQ(subject.compare(subject.run(*GetParam(), 1)), "") << dim;
  }
}

TEST_P(AmxKernels, TakeEveryGroupSize) {
  for (const int32_t group : {1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 33, 71, 200}) {
    if (folio::testing::kInstrumented && group > 33) break;
    AttentionConfig config = amx_config();
    config.num_kv_heads = 1;
    config.num_q_heads = group;
    for (const bool float16 : {false, true}) {
      if (float16) use_float16(config);
      AttentionCase subject(config, paged_batch({1, 2}, {100, 330}), {}, static_cast<uint32_t>(group));
      ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "") << group << " rows of " << to_string(config.q);
    }
  }
}

/// MLA: one KV head, V inside K or packed beside it, as many rows a token as there are query heads.
TEST_P(AmxKernels, Mla_DecodeAndPrompt_MatchReference) {
  for (const KvFormat format : {KvFormat::kStrided, KvFormat::kCpuPacked}) {
    for (const int32_t heads : {16, 128}) {
      if (folio::testing::kInstrumented && heads > 16) continue;
      AttentionConfig config = amx_config(576);
      config.head_dim_v = 512;
      config.num_kv_heads = 1;
      config.num_q_heads = heads;
      config.kv_format = format;
      config.page_size = heads == 16 ? 16 : 64;
      CaseOptions options;
      options.v_aliases_k = format == KvFormat::kStrided;
      const int32_t prompt = folio::testing::kInstrumented ? 3 : 96 / heads + 2;
      AttentionCase subject(config, paged_batch({1, prompt, 1}, {330, 150, 64}), options, 4);
      ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "") << heads << " heads";
    }
  }
}

TEST_P(AmxKernels, Mla_RowBits_OtherWorkTiles_StayEqual) {
  AttentionConfig config = amx_config(576);
  config.head_dim_v = 512;
  config.num_kv_heads = 1;
  config.num_q_heads = 16;
  config.kv_format = KvFormat::kStrided;
  config.determinism = Determinism::kScheduleInvariant;
  CaseOptions options;
  options.v_aliases_k = true;
  AttentionCase subject(config, paged_batch({4}, {folio::testing::kInstrumented ? 150 : 400}), options, 6);
  const Result whole = subject.run(*GetParam(), 1);
  for (const int32_t rows : {16, 32, 33}) {
    EXPECT_EQ(whole.bytes, subject.run(*GetParam(), 1, rows).bytes) << rows << " rows";
  }
}

/// Prompts are exponentiated before their maxima are known: where logits rise from tile to tile, by little or beyond
/// what float32 holds, a row has the bits that it has in a work tile of few rows, whose maxima are found first. Without
/// splits work tiles have several batches of KV tiles.
TEST_P(AmxKernels, RowBits_LogitsRiseFromTileToTile_StayEqual) {
  for (const float magnitude : {1.0f, 3.0f, 10.0f, 100.0f}) {
    for (const bool split : {false, true}) {
      const bool scales = split == (magnitude > 5.0f);
      AttentionConfig config = amx_config();
      config.determinism = split ? Determinism::kScheduleInvariant : Determinism::kRunToRun;
      CaseOptions options;
      options.magnitude = magnitude;
      options.scales_per_request = scales;
      AttentionCase subject(config, paged_batch({50}, {folio::testing::kInstrumented ? 300 : 900}), options, 9);
      const Result whole = subject.run(*GetParam(), 1);
      EXPECT_EQ(subject.compare(whole), "") << magnitude;
      for (const int32_t rows : {32, 48}) {  // 48: one pair of row blocks over several batches, and a row block alone
        const Result tiled = subject.run(*GetParam(), 1, rows);
        EXPECT_EQ(whole.bytes, tiled.bytes) << magnitude << ", " << rows << " rows";
        EXPECT_EQ(whole.lse, tiled.lse) << magnitude << ", " << rows << " rows";
      }
    }
  }
}

TEST_P(AmxKernels, Fp8Kv_EveryDequantizationPath_IsExact) {
  constexpr int32_t kDims[][2] = {{64, 64}, {128, 128}, {192, 64}, {64, 256}, {128, 64}, {96, 64}, {64, 80}};
  uint32_t seed = 0;
  for (const auto& dims : kDims) {
    for (const int32_t page_size : {16, 32, 34}) {
      if (folio::testing::kInstrumented && page_size == 32) continue;
      if (folio::testing::kInstrumented && page_size == (dims[1] > 64 ? 16 : 34)) continue;
      AttentionConfig config = amx_config(dims[0]);
      config.head_dim_v = dims[1];
      config.kv = seed++ % 2 == 0 ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
      config.page_size = page_size;
      config.window_left = seed % 3 == 0 ? 150 : -1;
      const int32_t longest = folio::testing::kInstrumented ? 200 : 700;
      AttentionCase subject(config, paged_batch({1, 2, 8, 1}, {longest, 64, longest / 2 - 17, 129}), {}, seed);
      ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "")
          << to_string(config.kv) << " " << dims[0] << "/" << dims[1] << " page " << page_size;
    }
  }
}

TEST_P(AmxKernels, Softmax_LargeAndNegativeLogits_IsFinite) {
  for (const float sign : {1.0f, -1.0f}) {
    for (const float magnitude : {30.0f, 10.0f}) {  // logits of thousands
      if (folio::testing::kInstrumented && magnitude < 30.0f) break;
      CaseOptions options;
      options.magnitude = magnitude;
      AttentionCase subject(amx_config(), paged_batch({1, 5, 40}, {150, 70, 529}), options, 3);
      subject.mutable_args().sm_scale *= sign;
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 3)), "") << sign << " " << magnitude;
    }
  }
}

TEST_P(AmxKernels, Softmax_LogitsOfBillions_FollowTheLargest) {
  for (const float sign : {1.0f, -1.0f}) {
    for (const float magnitude : {3e4f, 1e5f}) {  // logits of 1e9 and of 1e10
      CaseOptions options;
      options.magnitude = magnitude;
      AttentionCase subject(amx_config(), paged_batch({1, 5, 40}, {150, 70, 229}), options, 3);
      subject.mutable_args().sm_scale *= sign;
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 3)), "") << sign << " " << magnitude;
    }
  }
}

TEST_P(AmxKernels, LongestRow_WindowAtItsEnd_HasBitsOfShortRow) {
  for (const DType type : {DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const int32_t q_len : {1, 40}) {
      AttentionConfig config = amx_config();
      config.kv = type;
      config.page_size = 8192;
      config.window_left = 200;
      const int32_t length = scheduler::kMaxKvLen % config.page_size;
      AttentionCase subject(config, paged_batch({q_len}, {length}), {}, 1);
      const Result expected = subject.run(*GetParam(), 1);
      ASSERT_EQ(subject.compare(expected), "");
      std::vector<SegmentArgs> args;
      lengthen_row(subject, scheduler::kMaxKvLen, args);
      EXPECT_EQ(subject.run(*GetParam(), 1).bytes, expected.bytes) << to_string(type) << " " << q_len;
    }
  }
}

TEST_P(AmxKernels, SayWhatTheyRefuseAndWhatTheyTake) {
  const auto expect = [&](auto change, const char* given, const char* offered) {
    AttentionConfig config = amx_config();
    change(config);
    const std::string text = GetParam()->refusal(config);
    EXPECT_NE(text.find(given), std::string::npos) << text;
    EXPECT_NE(text.find(offered), std::string::npos) << text;
  };
  EXPECT_EQ(GetParam()->refusal(amx_config()), "");
  expect([](AttentionConfig& c) { c.q = DType::kFloat32; }, "q is float32", "bfloat16 and float16");
  expect([](AttentionConfig& c) { c.kv = DType::kFloat16; }, "kv is float16", "fp8_e4m3");
  expect([](AttentionConfig& c) { c.q = DType::kFloat16; }, "kv is bfloat16; beside q of float16", "takes float16");
  expect([](AttentionConfig& c) { c.ragged_kv = DType::kFloat32; }, "ragged_kv is float32", "bfloat16");
  expect([](AttentionConfig& c) { c.kv = DType::kFloat32; }, "kv is float32", "fp8_e5m2 and int8");
  expect([](AttentionConfig& c) { c.ragged_kv = DType::kInt8; }, "ragged_kv is int8",
         "bfloat16, fp8_e4m3 and fp8_e5m2");
  expect([](AttentionConfig& c) { c.q = DType::kInt8; }, "q is int8", "bfloat16 and float16");
  expect(
      [](AttentionConfig& c) {
        use_float16(c);
        c.kv = DType::kInt8;
      },
      "kv is int8; beside q of float16", "takes float16");
  {
    AttentionConfig config = amx_config();
    config.kv = DType::kInt8;
    EXPECT_EQ(GetParam()->refusal(config), "");
  }
  expect([](AttentionConfig& c) { c.head_dim_qk = 584; }, "head_dim_qk is 584", "up to 576");
  expect([](AttentionConfig& c) { c.head_dim_v = 100; }, "head_dim_v is 100", "multiples of 8");
  expect([](AttentionConfig& c) { c.page_size = 14; }, "page_size 14", "16 or more");
  expect([](AttentionConfig& c) { c.features = Feature::kRopeLlama; }, "kRopeLlama", "before the call");
}

TEST_P(AmxKernels, CombinedPartials_FixedSplits_HaveBitsOfOneWorker) {
  AttentionConfig config = amx_config();
  config.determinism = Determinism::kBatchInvariant;
  AttentionCase subject(config, paged_batch({1, 7, 1}, {1500, 700, 64}), all_features(), 1);
  const Result one = subject.run(*GetParam(), 1);
  for (const int32_t workers : {4, 7, 16}) {
    const Result many = subject.run(*GetParam(), workers);
    EXPECT_GT(many.plan.num_combine_tiles, 0);
    EXPECT_EQ(one.bytes, many.bytes) << workers << " workers";
    EXPECT_EQ(one.lse, many.lse) << workers << " workers";
  }
}

TEST_P(AmxKernels, RowBits_NeighbourRowsChange_StayEqual) {
  for (const DType type : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat16}) {
    for (const bool features : {false, true}) {
      for (const int32_t page_size : {32, 18}) {
        if (folio::testing::kInstrumented && (page_size == 32 || features != (type == DType::kBFloat16))) continue;
        AttentionConfig config = amx_config();
        if (type == DType::kFloat16) use_float16(config);
        config.kv = type;
        config.page_size = page_size;
        config.determinism = Determinism::kScheduleInvariant;
        const std::vector<int32_t> kv_len{130, folio::testing::kInstrumented ? 201 : 601};
        AttentionCase subject(config, paged_batch({1, 90}, kv_len), features ? all_features() : CaseOptions{}, 2);
        const Result whole = subject.run(*GetParam(), 1);
        for (const int32_t rows : {1, 17, 33, 3, 8, 13, 16, 31, 32, 100}) {
          if (folio::testing::kInstrumented && rows == 3) break;
          const Result tiled = subject.run(*GetParam(), 1, rows);
          EXPECT_EQ(whole.bytes, tiled.bytes) << rows << " rows";
          EXPECT_EQ(whole.lse, tiled.lse) << rows << " rows";
        }
      }
    }
  }
}

/// Strided caches, few rows: KV heads are walked together. Work tiles of 8 rows have memory for one head at a time.
TEST_P(AmxKernels, HeadBits_StridedWalkedTogetherOrAlone_StayEqual) {
  uint32_t seed = 0;
  for (const DType kv : {DType::kBFloat16, DType::kFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    for (const int32_t page_size : {1, 5, 16, 64}) {
      if (folio::testing::kInstrumented && page_size % 4 != 0) continue;
      AttentionConfig config = amx_config(++seed % 2 == 0 ? 64 : 72);
      if (kv == DType::kFloat16) use_float16(config);
      config.kv = kv;
      config.determinism = Determinism::kBatchInvariant;  // all rows in tiles
      config.kv_format = KvFormat::kStrided;
      config.num_kv_heads = 5;
      config.num_q_heads = 5 * static_cast<int32_t>(1 + seed % 9);
      config.page_size = page_size;
      config.window_left = seed % 3 == 0 ? 150 : -1;
      CaseOptions options = all_features();
      options.hnd = seed % 4 == 0;
      options.scales_per_head = seed % 3 != 0;
      const int32_t longest = folio::testing::kInstrumented ? 200 : 500;
      AttentionCase subject(config, paged_batch({1, 3, 1}, {longest, 64, 61}), options, seed);
      const Result together = subject.run(*GetParam(), 1);
      const Result alone = subject.run(*GetParam(), 1, 8);
      ASSERT_EQ(together.bytes, alone.bytes) << to_string(kv) << ", page " << page_size;
      ASSERT_EQ(together.lse, alone.lse);
      ASSERT_EQ(subject.compare(together), "") << to_string(kv) << ", page " << page_size;
    }
  }
}

/// The first and the last of 16 tokens lie as far apart as if all were in order.
TEST_P(AmxKernels, TokensOutOfOrderBetweenOthersInOrder_AreFound) {
  for (const int32_t page_size : {1, 4}) {
    for (const DType kv : {DType::kBFloat16, DType::kFloat8E4M3}) {
      AttentionConfig config = amx_config(64);
      config.kv = kv;
      config.determinism = Determinism::kBatchInvariant;  // all rows in tiles
      config.kv_format = KvFormat::kStrided;
      config.page_size = page_size;
      CaseOptions options;
      options.pages_nearly_in_order = true;
      AttentionCase subject(config, paged_batch({1, 40}, {300, 170}), options, 3);
      ASSERT_EQ(subject.compare(subject.run(*GetParam(), 1)), "") << to_string(kv) << ", page " << page_size;
    }
  }
}

TEST_P(AmxKernels, PromptBits_SplitIntoChunks_StayEqual) {
  AttentionConfig config = amx_config();
  config.determinism = Determinism::kScheduleInvariant;
  for (const int32_t window : {-1, 75}) {
    config.window_left = window;
    config.kv_format = window < 0 ? KvFormat::kCpuPacked : KvFormat::kStrided;
    const int32_t length = 300;
    AttentionCase subject(config, paged_batch({length}, {length}), {}, 3);
    const Result whole = run_step(subject, *GetParam(), 0, length, 1);
    const auto width = static_cast<size_t>(config.num_q_heads * config.head_dim_v);
    for (const int32_t chunk : {1, 3, 17, 64, 100}) {
      if (folio::testing::kInstrumented && (chunk == 3 || chunk == 64)) continue;
      const int32_t decode_steps = folio::testing::kInstrumented ? 41 : 7;  // a sample of them: every so many tokens
      for (int32_t begin = 0; begin < length; begin += chunk == 1 ? decode_steps : chunk) {
        const int32_t end = std::min(begin + chunk, length);
        const Result part = run_step(subject, *GetParam(), begin, end, 3);
        for (size_t i = 0; i < static_cast<size_t>(end - begin) * width; ++i) {
          ASSERT_EQ(part.out[i], whole.out[static_cast<size_t>(begin) * width + i]) << "chunk of " << chunk;
        }
      }
    }
  }
}

TEST_P(AmxKernels, Kv_NonFiniteBeyondDiagonal_EarlierRowsUnchanged) {
  for (const int32_t head_dim : {64, 72}) {
    for (const int32_t q_len : {2, 4, 40}) {
      for (const float poison : {kNan, kInfinity, -kInfinity}) {
        for (const bool values : {false, true}) {
          AttentionConfig config = amx_config(head_dim);
          if (q_len % 4 == 0 && head_dim == 64) use_float16(config);
          config.kv_format = q_len == 4 ? KvFormat::kStrided : KvFormat::kCpuPacked;
          AttentionCase subject(config, paged_batch({q_len}, {320}), {}, 1);
          const Result clean = subject.run(*GetParam(), 1);
          const int32_t token = 320 - q_len / 2 - 1;
          overwrite(subject, 0, token, values, poison);
          const Result result = subject.run(*GetParam(), 1);
          const int64_t width = int64_t{config.num_q_heads} * head_dim;
          const int64_t seeing = (token - (320 - q_len)) * width;
          for (int64_t i = 0; i < static_cast<int64_t>(result.out.size()); ++i) {
            const float got = result.out[static_cast<size_t>(i)];
            if (i < seeing) {
              ASSERT_EQ(got, clean.out[static_cast<size_t>(i)]) << "token " << i / width;
            } else if (values || std::isnan(poison)) {
              ASSERT_FALSE(std::isfinite(got)) << "token " << i / width;
            }
          }
        }
      }
    }
  }
}

TEST_P(AmxKernels, Cache_NanBeforeWindow_OutputUnchanged) {
  for (const int32_t q_len : {1, 12, 40}) {
    for (const int32_t window : {20, 21}) {  // it begins within a pair of tokens, and between two
      AttentionConfig config = amx_config();
      config.window_left = window;
      AttentionCase subject(config, paged_batch({q_len}, {350}), {}, 8);
      for (int32_t token = 0; token < 350 - q_len - window; ++token) {
        overwrite_kv(subject, token, kNan);
      }
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
      // Pages before the window are not even looked up.
      std::fill_n(subject.memory()[0].indices.begin(), (350 - q_len - window) / 32,
                  std::numeric_limits<int32_t>::max());
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
    }
  }
}

TEST_P(AmxKernels, Cache_NanUnderCustomMask_OutputUnchanged) {
  AttentionConfig config = amx_config();
  config.mask = MaskKind::kCustom;
  const std::vector<int32_t> hidden{30, 31, 89, 130, 189};
  for (const int32_t q_len : {1, 12, 40}) {
    AttentionCase subject(config, paged_batch({q_len}, {190}), {}, 7);
    const std::vector<uint8_t> bits = mask_without(q_len, 190, hidden);
    for (const int32_t token : hidden) overwrite_kv(subject, token, kNan);
    subject.mutable_args().custom_mask = bits.data();
    EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
  }
}

/// GEMM1 of the first pair of row blocks has its second half left when its batch makes room for the third one.
TEST_P(AmxKernels, CustomMask_PairsOfRowBlocksSeeOtherBatches_MatchesReference) {
  AttentionConfig config = amx_config();
  config.mask = MaskKind::kCustom;
  config.kv_format = KvFormat::kStrided;
  constexpr int32_t kTokens = 40, kKeys = 700;  // 16 tokens by 2 query heads are a pair: two, and a row block alone
  AttentionCase subject(config, paged_batch({kTokens}, {kKeys}), {}, 11);
  std::vector<uint8_t> bits(kTokens * kKeys / 8 + 1);
  for (int32_t token = 0; token < kTokens; ++token) {
    for (int32_t key = 0; key < kKeys; ++key) {
      const bool visible = token < 16 ? key < 256 : token >= 32 || key == 300 || key >= 600;
      if (visible) bits[static_cast<size_t>((token * kKeys + key) / 8)] |= uint8_t(1 << ((token * kKeys + key) % 8));
    }
  }
  subject.mutable_args().custom_mask = bits.data();
  EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
}

/// Float16 is multiplied as sums of two terms, one of which may be 0: an infinite key must not become NaN there.
TEST_P(AmxKernels, Float16_InfiniteComponentOfAKey_HidesOrPoisonsAsItsSignSays) {
  for (const int32_t q_len : {4, 40}) {
    AttentionConfig config = amx_config();
    use_float16(config);
    AttentionCase subject(config, paged_batch({q_len}, {150}), {}, 5);
    const KvCacheView& cache = subject.args().segments[0].cache;
    const PageTableView& table = subject.args().segments[0].table;
    for (int32_t head = 0; head < config.num_kv_heads; ++head) {
      const int64_t at =
          table.indices[0] * cache.k_strides.page + 7 * cache.k_strides.token + head * cache.k_strides.head;
      store_from_float(cache.k, cache.dtype, at, -kInfinity);
    }
    const Result result = subject.run(*GetParam(), 1);
    const ConstTensorView& q = subject.args().q;
    for (int32_t row = 0; row < q_len * config.num_q_heads; ++row) {
      const int32_t token = row / config.num_q_heads;
      const float component =
          load_as_float(q.data, q.dtype, token * q.strides[0] + row % config.num_q_heads * q.strides[1]);
      const float out = result.out[static_cast<size_t>(row) * static_cast<size_t>(config.head_dim_v)];
      EXPECT_EQ(std::isfinite(out), component > 0.0f) << "row " << row << ", component " << component;
    }
  }
}

TEST_P(AmxKernels, Output_VisibleNan_IsNan) {
  for (const DType type : {DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kFloat16}) {
    for (const Determinism level : {Determinism::kRunToRun, Determinism::kBatchInvariant}) {
      for (const bool values : {false, true}) {
        for (const int32_t length : {1, 400}) {
          AttentionConfig config = amx_config();
          if (type == DType::kFloat16) use_float16(config);
          config.kv = type;
          config.determinism = level;
          AttentionCase subject(config, paged_batch({1}, {length}), {}, 3);
          overwrite(subject, 0, length / 2, values, kNan);
          const Result result = subject.run(*GetParam(), 3);
          EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](float x) { return std::isnan(x); }));
          EXPECT_EQ(std::isnan(result.lse[0]), !values);
        }
      }
    }
  }
}

/// A decode, a prompt and a verification in one batch: each has the bits that its kernel gives it alone.
TEST(AmxKernel, WorkTilesOfFewRows_AreTheAvx512Kernels) {
  const AttentionKernel& mixed = amx::emulated_kernel_with_few_rows();
  const AttentionKernel& tiles = amx::emulated_kernel();
  const AttentionKernel& avx512 = *avx512::attention_kernels()[0];
  if (!mixed.unavailable(platform::cpu_features()).empty()) GTEST_SKIP() << "no AVX-512 here";
  for (const KvFormat format : {KvFormat::kCpuPacked, KvFormat::kStrided}) {
    AttentionConfig config = amx_config();
    config.kv_format = format;
    config.page_size = 16;
    if (format == KvFormat::kStrided) config.kv = DType::kInt8;
    const int32_t group_size = config.num_q_heads / config.num_kv_heads;
    const int32_t most_few = 3;  // queries of work tiles with few rows
    AttentionCase subject(config, paged_batch({1, 40, most_few, most_few + 1}, {90, 300, 200, 70}), all_features(), 5);
    const Result found = subject.run(mixed, 1);
    const Result of_tiles = subject.run(tiles, 1);
    const Result of_avx512 = subject.run(avx512, 1);
    ASSERT_NE(of_tiles.out, of_avx512.out);
    const auto width = static_cast<size_t>(config.num_q_heads * config.head_dim_v);
    const auto compare = [&](size_t begin, size_t end, const Result& expected) {
      for (size_t i = begin * width; i < end * width; ++i) ASSERT_EQ(found.out[i], expected.out[i]) << i / width;
    };
    compare(0, 1, of_avx512);
    compare(1, 41, of_tiles);
    compare(41, 41 + static_cast<size_t>(most_few), of_avx512);
    compare(41 + static_cast<size_t>(most_few), 42 + 2 * static_cast<size_t>(most_few), of_tiles);
    EXPECT_EQ(amx::min_rows(config), (most_few + 1) * group_size);
  }
}

TEST(AmxKernel, AllRowsAreInTiles_WhereVLiesReadyOrBitsMustNotDepend) {
  const auto min_rows = [](auto change) {
    AttentionConfig config = amx_config();
    config.page_size = 16;
    change(config);
    return amx::min_rows(config);
  };
  EXPECT_EQ(min_rows([](AttentionConfig&) {}), 8);
  EXPECT_EQ(min_rows([](AttentionConfig& c) { c.page_size = 32; }), 0);
  EXPECT_EQ(min_rows([](AttentionConfig& c) { c.page_size = 48; }), 8);
  EXPECT_EQ(min_rows([](AttentionConfig& c) { c.determinism = Determinism::kBatchInvariant; }), 0);
  EXPECT_EQ(min_rows([](AttentionConfig& c) { c.kv = DType::kFloat8E4M3; }), 4);
  for (const int32_t page_size : {16, 32}) {
    EXPECT_EQ(min_rows([&](AttentionConfig& c) {
                c.kv = DType::kInt8;
                c.page_size = page_size;
              }),
              8);
  }
  EXPECT_EQ(min_rows([](AttentionConfig& c) { c.kv_format = KvFormat::kStrided; }), 8);
  EXPECT_EQ(min_rows([](AttentionConfig& c) {
              c.kv_format = KvFormat::kStrided;
              c.head_dim_qk = 576;
              c.head_dim_v = 512;
            }),
            8);
  EXPECT_EQ(min_rows([](AttentionConfig& c) {
              use_float16(c);
              c.page_size = 32;
            }),
            32);
}

TEST(AmxKernel, HeadsTogether_AreThoseOfStridedCachesOrOfAvx512) {
  const auto heads_together = [](KvFormat format, int32_t page_size) {
    AttentionConfig config = amx_config();
    config.kv_format = format;
    config.page_size = page_size;
    return amx::attention_kernel().heads_together(config);
  };
  EXPECT_EQ(heads_together(KvFormat::kStrided, 16), cpu::kMaxHeads);
  EXPECT_EQ(heads_together(KvFormat::kCpuPacked, 16), cpu::kMaxHeads) << "its few rows are avx512's";
  EXPECT_EQ(heads_together(KvFormat::kCpuPacked, 32), 1);
}

TEST(AmxKernel, CostOfFewRows_IsTheAvx512KernelsWhereTheyAreItsWork) {
  const platform::CpuFeatures features;
  const AttentionKernel& avx512 = *avx512::attention_kernels()[0];
  AttentionConfig config = amx_config();
  config.kv_format = KvFormat::kStrided;
  const auto cost = [&](const AttentionKernel& kernel, double rows) { return kernel.cost(features, config, rows); };
  EXPECT_LT(cost(amx::attention_kernel(), 16), cost(avx512, 16));
  for (const double rows : {1, 7}) EXPECT_EQ(cost(amx::attention_kernel(), rows), cost(avx512, rows)) << rows;
  EXPECT_LT(cost(amx::attention_kernel(), 8), cost(avx512, 8));
  config.determinism = Determinism::kBatchInvariant;
  EXPECT_GT(cost(amx::attention_kernel(), 4), cost(avx512, 4));
}

TEST(AmxKernel, IsUnavailableWhereTheOsRefusesTiles) {
  platform::CpuFeatures features;
  features.avx2 = features.fma = features.f16c = features.bmi1 = features.bmi2 = features.lzcnt = features.movbe = true;
  features.avx512f = features.avx512bw = features.avx512cd = features.avx512dq = features.avx512vl =
      features.avx512vbmi = true;
  const AttentionKernel& kernel = amx::attention_kernel();
  EXPECT_NE(kernel.unavailable(features).find("granted"), std::string::npos);
  features.amx_tile = features.amx_bf16 = true;
  EXPECT_EQ(kernel.unavailable(features), "");
  features.avx512vl = false;
  EXPECT_NE(kernel.unavailable(features).find("x86-64-v4"), std::string::npos);
}

}  // namespace
}  // namespace folio::inline v0::kernels

// int8 caches in the AMX kernel: token scales, and numbers upcast to bfloat16.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "core/instrumented_test_util.hpp"
#include "folio/types/float_convert.hpp"
#include "kernels/cpu/amx/emulated_kernel_test_util.hpp"
#include "kernels/cpu/amx/kernel.hpp"
#include "kernels/cpu/common/kernel_fixture_test_util.hpp"
#include "kernels/cpu/common/softmax_cases_test_util.hpp"
#include "testing/reference_attention.hpp"

namespace folio::inline v0::kernels {
namespace {

using scheduler::testing::paged_batch;
using testing::AttentionCase;
using testing::CaseOptions;
using testing::kInfinity;
using testing::kNan;
using testing::mask_without;
using testing::overwrite_token_scale;
using Result = AttentionCase::Result;

class AmxInt8Kernels : public CpuKernels {};

INSTANTIATE_TEST_SUITE_P(Tiles, AmxInt8Kernels,
                         ::testing::Values(&amx::attention_kernel(), &amx::emulated_kernel(),
                                           &amx::emulated_kernel_with_few_rows()),
                         kernel_test_name);

/// bfloat16 queries over packed int8 pages of 32, float32 out, causal, 4 query heads over 2 KV heads.
AttentionConfig int8_config(int32_t head_dim = 64) {
  AttentionConfig config;
  config.num_q_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim_qk = config.head_dim_v = head_dim;
  config.q = config.ragged_kv = DType::kBFloat16;
  config.kv = DType::kInt8;
  config.out = DType::kFloat32;
  config.kv_format = KvFormat::kCpuPacked;
  config.page_size = 32;
  return config;
}

TEST_P(AmxInt8Kernels, EveryPageSizeAndFormat_MatchesReference) {
  for (const KvFormat format : {KvFormat::kStrided, KvFormat::kCpuPacked}) {
    for (const int32_t page_size : {1, 5, 16, 18, 32, 64, 100, 128}) {
      if (format == KvFormat::kCpuPacked && page_size < 16) continue;
      if (folio::testing::kInstrumented && page_size > 32) continue;
      for (const bool hnd : {false, true}) {
        AttentionConfig config = int8_config(page_size % 3 == 0 ? 72 : 64);
        config.kv_format = format;
        config.page_size = page_size;
        CaseOptions options;
        options.hnd = hnd;
        options.scales_per_head = options.scales_per_request = hnd;
        const auto batch = paged_batch({1, 5, 20, 50}, {70, 130, 64, folio::testing::kInstrumented ? 100 : 333});
        AttentionCase subject(config, batch, options, static_cast<uint32_t>(page_size));
        ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "") << "pages of " << page_size;
      }
    }
  }
}

/// All rows of a tile are upcast before, or chunks of 64 components beside the MMAs.
TEST_P(AmxInt8Kernels, EveryDequantizationPath_IsExact) {
  constexpr int32_t kDims[][2] = {{64, 64}, {128, 128}, {192, 64}, {64, 256}, {96, 64}, {64, 80}, {8, 8}};
  uint32_t seed = 0;
  for (const auto& dims : kDims) {
    for (const int32_t page_size : {16, 32, 34}) {
      if (folio::testing::kInstrumented && page_size != 32) continue;
      AttentionConfig config = int8_config(dims[0]);
      config.head_dim_v = dims[1];
      config.page_size = page_size;
      config.window_left = ++seed % 3 == 0 ? 150 : -1;
      const int32_t longest = folio::testing::kInstrumented ? 200 : 700;
      AttentionCase subject(config, paged_batch({1, 2, 8, 1}, {longest, 64, longest / 2 - 17, 129}), {}, seed);
      ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "") << dims[0] << "/" << dims[1] << " page " << page_size;
    }
  }
}

/// V inside K has K's scales.
TEST_P(AmxInt8Kernels, Mla_MatchesReference) {
  for (const KvFormat format : {KvFormat::kStrided, KvFormat::kCpuPacked}) {
    AttentionConfig config = int8_config(576);
    config.head_dim_v = 512;
    config.num_kv_heads = 1;
    config.num_q_heads = 16;
    config.kv_format = format;
    CaseOptions options;
    options.v_aliases_k = format == KvFormat::kStrided;
    AttentionCase subject(config, paged_batch({1, 3, 1}, {330, 150, 64}), options, 4);
    ASSERT_EQ(subject.compare(subject.run(*GetParam(), 2)), "");
  }
}

/// New tokens may come unquantized, as bfloat16.
TEST_P(AmxInt8Kernels, RaggedSegmentBesideTheCache_HasNoScales) {
  auto batch = paged_batch({1, 6, 40}, {130, 64, 200});
  scheduler::testing::OwnedSegment fresh;
  fresh.source = KvSource::kRagged;
  fresh.kv_len = {1, 6, 40};
  batch.segments.push_back(fresh);
  batch.segments[0].mask = SegmentMask::kAllVisible;
  AttentionCase subject(int8_config(), batch, {}, 12);
  EXPECT_EQ(subject.compare(subject.run(*GetParam(), 2)), "");
}

/// A row's bits are the same in a work tile of few rows, which finds maxima first, and beside other rows.
TEST_P(AmxInt8Kernels, RowBits_OtherWorkTiles_StayEqual) {
  for (const float magnitude : {1.0f, 3.0f, 30.0f}) {
    for (const int32_t page_size : {32, 18}) {
      AttentionConfig config = int8_config();
      config.page_size = page_size;
      config.determinism = Determinism::kScheduleInvariant;
      CaseOptions options;
      options.magnitude = magnitude;
      AttentionCase subject(config, paged_batch({1, 90}, {130, folio::testing::kInstrumented ? 201 : 601}), options, 2);
      const Result whole = subject.run(*GetParam(), 1);
      EXPECT_EQ(subject.compare(whole), "") << magnitude;
      for (const int32_t rows : {1, 8, 16, 17, 32, 33, 100}) {
        const Result tiled = subject.run(*GetParam(), 1, rows);
        EXPECT_EQ(whole.bytes, tiled.bytes) << rows << " rows, " << magnitude;
        EXPECT_EQ(whole.lse, tiled.lse) << rows << " rows, " << magnitude;
      }
    }
  }
}

/// A cache may hold -128, which writes never store; and scales of 0, and some far from the others.
TEST_P(AmxInt8Kernels, EndsOfNumbersAndScales_MatchReference) {
  for (const KvFormat format : {KvFormat::kStrided, KvFormat::kCpuPacked}) {
    for (const int32_t q_len : {1, 9, 40}) {
      AttentionConfig config = int8_config();
      config.kv_format = format;
      AttentionCase subject(config, paged_batch({q_len}, {191}), {}, 5);
      int32_t number = -128;
      for (std::vector<unsigned char>* const memory : {&subject.memory()[0].k, &subject.memory()[0].v}) {
        for (size_t i = 0; i < memory->size(); i += 3, number = number == 127 ? -128 : number + 1) {
          (*memory)[i] = static_cast<unsigned char>(number);
        }
      }
      for (const bool values : {false, true}) {
        for (int32_t token = values ? 1 : 0; token < 191; token += 5)
          overwrite_token_scale(subject, 0, token, values, 0);
        for (int32_t token = 2; token < 191; token += 7) overwrite_token_scale(subject, 0, token, values, 0x1p-40f);
      }
      for (int32_t token = 3; token < 191; token += 11) overwrite_token_scale(subject, 0, token, true, 8.0f);
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "") << q_len;
    }
  }
}

/// P is a number below 2^8 times V's scale: bfloat16 has the range of float32.
TEST_P(AmxInt8Kernels, LargeScalesOfValues_StayFinite) {
  AttentionCase subject(int8_config(), paged_batch({1, 40}, {190, 100}), {}, 5);
  for (float& scale : subject.memory()[0].v_token_scales) scale *= 0x1p100f;
  EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
}

TEST_P(AmxInt8Kernels, NanScalesOfMaskedTokens_OutputUnchanged) {
  const std::vector<int32_t> hidden{30, 31, 89, 130, 189};
  for (const int32_t q_len : {1, 12, 40}) {
    for (const float bad : {kNan, kInfinity}) {
      AttentionConfig config = int8_config();
      config.mask = MaskKind::kCustom;
      AttentionCase subject(config, paged_batch({q_len}, {190}), {}, 7);
      const std::vector<uint8_t> bits = mask_without(q_len, 190, hidden);
      for (const int32_t token : hidden) {
        for (const bool values : {false, true}) overwrite_token_scale(subject, 0, token, values, bad);
      }
      subject.mutable_args().custom_mask = bits.data();
      EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "") << q_len;
    }
  }
}

TEST_P(AmxInt8Kernels, NanScalesBeyondTheDiagonal_EarlierRowsUnchanged) {
  for (const int32_t q_len : {2, 40}) {
    for (const bool values : {false, true}) {
      const AttentionConfig config = int8_config();
      AttentionCase subject(config, paged_batch({q_len}, {320}), {}, 1);
      const Result clean = subject.run(*GetParam(), 1);
      const int32_t token = 320 - q_len / 2 - 1;
      overwrite_token_scale(subject, 0, token, values, kNan);
      const Result result = subject.run(*GetParam(), 1);
      const auto seeing = static_cast<size_t>((token - (320 - q_len)) * config.num_q_heads * config.head_dim_v);
      for (size_t i = 0; i < result.out.size(); ++i) {
        if (i < seeing) {
          ASSERT_EQ(result.out[i], clean.out[i]) << i;
        } else {
          ASSERT_TRUE(std::isnan(result.out[i])) << i;
        }
      }
    }
  }
}

/// Pages and scales outside the window are not looked up.
TEST_P(AmxInt8Kernels, TokensBeforeTheWindow_AreNotRead) {
  for (const int32_t q_len : {1, 40}) {
    AttentionConfig config = int8_config();
    config.window_left = 20;
    AttentionCase subject(config, paged_batch({q_len}, {350}), {}, 8);
    for (int32_t token = 0; token < 350 - q_len - 20; ++token) {
      for (const bool values : {false, true}) overwrite_token_scale(subject, 0, token, values, kNan);
    }
    EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
    std::fill_n(subject.memory()[0].indices.begin(), (350 - q_len - 20) / 32, std::numeric_limits<int32_t>::max());
    EXPECT_EQ(subject.compare(subject.run(*GetParam(), 1)), "");
  }
}

TEST_P(AmxInt8Kernels, VisibleNanScale_IsNan) {
  const float nans[] = {kNan, __builtin_bit_cast(float, 0x7fffffff), __builtin_bit_cast(float, 0xffffffffu)};
  for (const int32_t length : {1, 400}) {
    for (const bool values : {false, true}) {
      for (const float nan : nans) {  // rounded to bfloat16, the payload of the last two would carry
        AttentionCase subject(int8_config(), paged_batch({1}, {length}), {}, 3);
        overwrite_token_scale(subject, 0, length / 2, values, nan);
        const Result result = subject.run(*GetParam(), 3);
        EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](float x) { return std::isnan(x); }));
        EXPECT_EQ(std::isnan(result.lse[0]), !values);
      }
    }
  }
}

/// One decode over 512 keys with an int8 cache of normal data, quantized as write_kv_cache does it.
class QuantizedDecode {
 public:
  /// `logits`: their deviation.
  explicit QuantizedDecode(float logits) : subject_(config(), paged_batch({1}, {kKeys}), {}, 17) {
    subject_.mutable_args().sm_scale /= subject_.args().segments[0].k_scale.value;
    std::mt19937 random(23);
    std::normal_distribution<float> normal;
    for (int32_t t = 0; t < kKeys; ++t) {
      for (int32_t h = 0; h < config().num_kv_heads; ++h) {
        for (const bool values : {false, true}) {
          std::vector<float> row(kDim);
          for (float& x : row) x = normal(random) * (values ? 1.0f : logits);
          write(t, h, values, row);
        }
      }
    }
  }

  Result run(const AttentionKernel& kernel) { return subject_.run(kernel, 1); }

  /// Relative root mean square error beside float64 over what was written.
  double error_of(const std::vector<float>& out) {
    const AttentionArgs& args = subject_.args();
    const SegmentArgs& segment = args.segments[0];
    double error = 0.0;
    double size = 0.0;
    for (int32_t head = 0; head < config().num_q_heads; ++head) {
      const int32_t kv_head = head / kGroup;
      std::vector<double> expected(kDim);
      double row_sum = 0.0;
      for (int32_t t = 0; t < kKeys; ++t) {
        double logit = 0.0;
        for (int32_t d = 0; d < kDim; ++d) {
          logit +=
              double{load_as_float(args.q.data, args.q.dtype, head * args.q.strides[1] + d)} * at(t, kv_head, false)[d];
        }
        const double p = std::exp(logit * double{args.sm_scale} * double{segment.k_scale.value});
        row_sum += p;
        for (int32_t d = 0; d < kDim; ++d) expected[static_cast<size_t>(d)] += p * at(t, kv_head, true)[d];
      }
      for (size_t d = 0; d < kDim; ++d) {
        const double want = expected[d] / row_sum * double{segment.v_scale.value};
        const double difference = double{out[static_cast<size_t>(head) * kDim + d]} - want;
        error += difference * difference;
        size += want * want;
      }
    }
    return std::sqrt(error / size);
  }

  /// The same of the oracle over the int8 cache: the error of quantization alone.
  double error_of_quantization() {
    std::vector<double> out(static_cast<size_t>(config().num_q_heads) * kDim);
    std::vector<double> lse(static_cast<size_t>(config().num_q_heads));
    verify::reference_attention(config(), subject_.view(), subject_.args(), out, lse);
    return error_of(std::vector<float>(out.begin(), out.end()));
  }

 private:
  static constexpr int32_t kKeys = 512, kDim = 128, kGroup = 32;  // rows enough for a work tile of AMX

  static AttentionConfig config() {
    AttentionConfig config = int8_config(kDim);
    config.num_q_heads = kGroup * config.num_kv_heads;
    config.kv_format = KvFormat::kStrided;
    return config;
  }
  const float* at(int32_t token, int32_t head, bool values) const {
    return written_.data() + ((token * 2 + head) * 2 + (values ? 1 : 0)) * kDim;
  }
  void write(int32_t token, int32_t head, bool values, const std::vector<float>& row) {
    const SegmentArgs& args = subject_.args().segments[0];
    const KvCacheView& cache = args.cache;
    const int64_t page = args.table.indices[args.table.indptr[0] + token / cache.page_size];
    const int64_t slot = token % cache.page_size;
    float largest = 0.0f;
    for (const float x : row) largest = std::max(largest, std::abs(x));
    const TokenScales& scales = values ? cache.v_token_scales : cache.k_token_scales;
    const float scale = largest / 127.0f;
    scales.data[page * scales.strides.page + slot * scales.strides.token + head * scales.strides.head] = scale;
    const KvStrides& strides = values ? cache.v_strides : cache.k_strides;
    int64_t index = page * strides.page + slot * strides.token + head * strides.head;
    for (const float x : row) store_from_float(values ? cache.v : cache.k, DType::kInt8, index++, x / scale);
    written_.insert(written_.end(), row.begin(), row.end());
  }

  AttentionCase subject_;
  std::vector<float> written_;  ///< [kKeys, heads, K and V, kDim]
};

/// The kernel adds to the error of quantization what the rounding of P to bfloat16 does: a fifth of it at most.
TEST_P(AmxInt8Kernels, Error_IsThatOfQuantization) {
  for (const float logits : {1.0f, 3.0f}) {
    QuantizedDecode decode(logits);
    const double of_kernel = decode.error_of(decode.run(*GetParam()).out);
    const double of_quantization = decode.error_of_quantization();
    const std::string name = "logits_" + std::to_string(static_cast<int>(logits));
    RecordProperty(name + "_kernel", std::to_string(of_kernel));
    RecordProperty(name + "_quantization", std::to_string(of_quantization));
    EXPECT_LT(of_kernel, 1.2 * of_quantization) << logits;
    EXPECT_GT(of_quantization, 0.002) << logits;
  }
}

}  // namespace
}  // namespace folio::inline v0::kernels

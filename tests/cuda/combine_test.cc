// Merges and quantisation on a GPU against the CPU's.
#include <bit>
#include <limits>

#include "folio/backends/merge_attn_states.hpp"
#include "twin_array.hpp"

namespace folio::cuda_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr DType kWideTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

/// LSEs of either sign, some infinite, many far from their neighbours.
std::vector<float> random_lses(size_t count, std::mt19937& random) {
  std::vector<float> lses(count);
  std::normal_distribution<float> normal(0.0f, 6.0f);
  for (float& lse : lses) {
    lse = normal(random);
    if (random() % 11 == 0) lse = random() % 2 == 0 ? -kInfinity : kInfinity;
  }
  return lses;
}

/// Elements that differ by more than the neighbouring code, and how many differ at all.
struct Difference {
  int64_t wrong = 0;
  int64_t unequal = 0;
};

Difference difference(const Bytes& array, DType dtype) {
  const std::vector<std::byte> gpu = array.gpu();
  const auto bytes = static_cast<size_t>(size_of(dtype));
  Difference result;
  for (size_t i = 0; i < gpu.size() / bytes; ++i) {
    if (std::equal(gpu.begin() + static_cast<std::ptrdiff_t>(i * bytes),
                   gpu.begin() + static_cast<std::ptrdiff_t>((i + 1) * bytes),
                   array.host.begin() + static_cast<std::ptrdiff_t>(i * bytes))) {
      continue;
    }
    const float mine = load_as_float(gpu.data(), dtype, static_cast<int64_t>(i));
    const float expected = load_as_float(array.host.data(), dtype, static_cast<int64_t>(i));
    if (std::isnan(mine) && std::isnan(expected)) continue;
    ++result.unequal;
    // Float32: an exponential's last bit, through products and sums that may cancel. Narrow types: the next code.
    const float step = dtype == DType::kFloat32    ? 1e-6f
                       : dtype == DType::kFloat16  ? 1.0f / 1024
                       : dtype == DType::kBFloat16 ? 1.0f / 128
                                                   : 0.26f;
    if (!(std::abs(mine - expected) <= step * (std::abs(expected) + (dtype == DType::kFloat32 ? 20.0f : 0.02f)))) {
      ++result.wrong;
    }
  }
  return result;
}

struct MergeSizes {
  int64_t tokens, heads, dim, gap;
};
constexpr MergeSizes kMergeSizes[] = {{37, 5, 64, 0}, {9, 3, 128, 8}, {13, 2, 256, 0}, {5, 2, 576, 0}, {11, 3, 20, 3}};

class Combine : public CudaTest, public testing::WithParamInterface<DType> {
 protected:
  std::mt19937 random_{21};
  int64_t unequal_ = 0;
  int64_t all_ = 0;

  void expect_close(const Bytes& array, DType dtype, const MergeSizes& sizes) {
    const Difference found = difference(array, dtype);
    EXPECT_EQ(found.wrong, 0) << to_string(dtype) << " dim " << sizes.dim;
    unequal_ += found.unequal;
    all_ += static_cast<int64_t>(array.host.size()) / size_of(dtype);
  }
  void expect_lses_close(const Twin<float>& lses) {
    const std::vector<float> gpu = lses.gpu();
    for (size_t i = 0; i < gpu.size(); ++i) {
      const bool both_nan = std::isnan(gpu[i]) && std::isnan(lses.host[i]);
      const bool equal = std::bit_cast<uint32_t>(gpu[i]) == std::bit_cast<uint32_t>(lses.host[i]);
      if (both_nan || equal) continue;
      ++unequal_;
      EXPECT_NEAR(gpu[i], lses.host[i], 1e-6f * (1.0f + std::abs(lses.host[i])));
    }
  }
  void TearDown() override { EXPECT_LE(unequal_, all_ / 100) << "of " << all_; }
};

TEST_P(Combine, MergesTwoStatesAsTheCpu) {
  for (const DType output : {GetParam(), DType::kFloat32, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const MergeSizes& s : kMergeSizes) {
      const auto rows = static_cast<size_t>(s.tokens * s.heads);
      const int64_t elements = s.tokens * (s.heads * s.dim + s.gap);
      Bytes a(random_elements(GetParam(), elements, random_)), b(random_elements(GetParam(), elements, random_));
      Bytes out(random_elements(output, elements, random_));
      Twin<float> a_lse(random_lses(rows, random_)), b_lse(random_lses(rows, random_));
      Twin<float> lse(std::vector<float>(rows, 7.0f)), scale(std::vector<float>{0.5f});
      for (const bool on_gpu : {false, true}) {
        const auto view = [&](Bytes& bytes, DType dtype) {
          TensorView tensor(bytes.at(on_gpu), dtype, {s.tokens, s.heads, s.dim});
          tensor.strides[0] = s.heads * s.dim + s.gap;
          return tensor;
        };
        Scale out_scale;
        if (is_fp8(output)) out_scale.data = scale.at(on_gpu);
        // One state's LSEs are [heads, tokens] and in base 2.
        merge_state(context_of(on_gpu), {view(a, GetParam()), a_lse.at(on_gpu), s.heads, 1, LseBase::kE},
                    {view(b, GetParam()), b_lse.at(on_gpu), 1, s.tokens, LseBase::k2}, view(out, output),
                    {lse.at(on_gpu), s.heads, 1, LseBase::k2}, out_scale);
      }
      expect_close(out, output, s);
      expect_lses_close(lse);
    }
  }
}

TEST_P(Combine, MergesInPlaceWhereTheMaskSaysSo) {
  for (const MergeSizes& s : kMergeSizes) {
    const auto rows = static_cast<size_t>(s.tokens * s.heads);
    const int64_t elements = s.tokens * s.heads * s.dim;
    Bytes a(random_elements(GetParam(), elements, random_)), b(random_elements(GetParam(), elements, random_));
    Twin<float> a_lse(random_lses(rows, random_)), b_lse(random_lses(rows, random_));
    b_lse = Twin<float>([&] {
      std::vector<float> values = b_lse.host;
      values[0] = std::numeric_limits<float>::quiet_NaN();
      return values;
    }());
    std::vector<uint8_t> bytes(static_cast<size_t>(s.tokens), 1);
    bytes[1] = 0;
    Twin<uint8_t> mask(bytes);
    for (const bool on_gpu : {false, true}) {
      const std::initializer_list<int64_t> shape = {s.tokens, s.heads, s.dim};
      merge_state_in_place(
          context_of(on_gpu), TensorView(a.at(on_gpu), GetParam(), shape), {a_lse.at(on_gpu), s.heads, 1, LseBase::kE},
          {ConstTensorView(b.at(on_gpu), GetParam(), shape), b_lse.at(on_gpu), s.heads, 1, LseBase::kE},
          mask.at(on_gpu));
    }
    expect_close(a, GetParam(), s);
    expect_lses_close(a_lse);
  }
}

TEST_P(Combine, MergesManyStatesAsTheCpu) {
  for (const int64_t states : {1, 3, 40}) {
    for (const MergeSizes& s : kMergeSizes) {
      const auto rows = static_cast<size_t>(s.tokens * s.heads * states);
      Bytes in(random_elements(GetParam(), s.tokens * states * s.heads * s.dim, random_));
      Bytes out(random_elements(GetParam(), s.tokens * s.heads * s.dim, random_));
      Twin<float> in_lse(random_lses(rows, random_));
      Twin<float> lse(std::vector<float>(static_cast<size_t>(s.tokens * s.heads), 7.0f));
      for (const bool on_gpu : {false, true}) {
        AttentionStatesView view;
        view.out = ConstTensorView(in.at(on_gpu), GetParam(), {s.tokens, states, s.heads, s.dim});
        view.lse = in_lse.at(on_gpu);
        view.lse_token_stride = states * s.heads;
        view.lse_state_stride = s.heads;
        view.lse_head_stride = 1;
        merge_states(context_of(on_gpu), view, TensorView(out.at(on_gpu), GetParam(), {s.tokens, s.heads, s.dim}),
                     {lse.at(on_gpu), s.heads, 1, LseBase::kE});
      }
      expect_close(out, GetParam(), s);
      expect_lses_close(lse);
    }
  }
}

/// vLLM's merge: the prefix's rows of tokens without a context are not read, whatever stands there.
TEST_P(Combine, MergesAttentionStatesAsTheCpu) {
  const MergeSizes s{24, 4, 64, 0};
  const auto rows = static_cast<size_t>(s.tokens * s.heads);
  Bytes prefix(random_elements(GetParam(), s.tokens * s.heads * s.dim, random_));
  Bytes suffix(random_elements(GetParam(), s.tokens * s.heads * s.dim, random_));
  Bytes out(random_elements(GetParam(), s.tokens * s.heads * s.dim, random_));
  Twin<float> prefix_lse(random_lses(rows, random_)), suffix_lse(random_lses(rows, random_));
  Twin<float> lse(std::vector<float>(rows, 7.0f));
  for (const bool on_gpu : {false, true}) {
    const std::initializer_list<int64_t> shape = {s.tokens, s.heads, s.dim};
    backends::merge_attn_states(context_of(on_gpu), TensorView(out.at(on_gpu), GetParam(), shape),
                                ConstTensorView(prefix.at(on_gpu), GetParam(), shape), prefix_lse.at(on_gpu),
                                ConstTensorView(suffix.at(on_gpu), GetParam(), shape), suffix_lse.at(on_gpu),
                                lse.at(on_gpu), 15);
  }
  expect_close(out, GetParam(), s);
  expect_lses_close(lse);
}

INSTANTIATE_TEST_SUITE_P(Types, Combine, testing::ValuesIn(kWideTypes),
                         [](const auto& dtype) { return std::string(to_string(dtype.param)); });

class Quantize : public CudaTest, public testing::WithParamInterface<DType> {
 protected:
  std::mt19937 random_{31};
};

TEST_P(Quantize, Fp8AsTheCpu) {
  for (const DType output : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const MergeSizes& s : kMergeSizes) {
      const int64_t elements = s.tokens * (s.heads * s.dim + s.gap);
      Bytes in(random_elements(GetParam(), elements, random_, 300.0f)), out(random_elements(output, elements, random_));
      Twin<float> scale(std::vector<float>{0.37f});
      for (const bool on_gpu : {false, true}) {
        ConstTensorView from(in.at(on_gpu), GetParam(), {s.tokens, s.heads, s.dim});
        TensorView to(out.at(on_gpu), output, {s.tokens, s.heads, s.dim});
        from.strides[0] = to.strides[0] = s.heads * s.dim + s.gap;
        Scale given;
        given.data = scale.at(on_gpu);
        quantize_fp8(context_of(on_gpu), from, to, given);
      }
      EXPECT_TRUE(out.equal()) << to_string(output) << " dim " << s.dim;
    }
  }
}

TEST_P(Quantize, Nvfp4AndBackAsTheCpu) {
  for (const MergeSizes& s : {MergeSizes{150, 3, 64, 0}, MergeSizes{9, 2, 48, 16}, MergeSizes{7, 1, 16, 3}}) {
    const int64_t elements = s.tokens * (s.heads * s.dim + s.gap);
    Bytes in(random_elements(GetParam(), elements, random_));
    for (size_t i = 0; i < 16 * static_cast<size_t>(size_of(GetParam())); ++i)
      in.host[i] = std::byte{0};  // a scale of 0
    store_from_float(in.host.data(), GetParam(), 2 * s.dim + 3, 1e4f);
    in = Bytes(in.host);
    Bytes codes(std::vector<std::byte>(static_cast<size_t>(s.tokens * s.heads * s.dim / 2), std::byte{0x55}));
    const auto scale_bytes = static_cast<size_t>(nvfp4_scale_bytes(s.tokens + 5, s.heads * s.dim / 16));
    Bytes scales(std::vector<std::byte>(scale_bytes, std::byte{0x11}));
    Bytes back(random_elements(DType::kFloat32, s.tokens * s.heads * s.dim, random_));
    for (const bool on_gpu : {false, true}) {
      ConstTensorView from(in.at(on_gpu), GetParam(), {s.tokens, s.heads, s.dim});
      from.strides[0] = s.heads * s.dim + s.gap;
      const BlockScaleArgs block_scale{scales.at(on_gpu), 5};
      const TensorView to(codes.at(on_gpu), DType::kFloat4E2M1x2, {s.tokens, s.heads, s.dim / 2});
      const Context context = context_of(on_gpu);
      quantize_nvfp4(context, from, to, block_scale, 3.7f);
      dequantize_nvfp4(context, to, block_scale, 3.7f,
                       TensorView(back.at(on_gpu), DType::kFloat32, {s.tokens, s.heads, s.dim}));
    }
    EXPECT_TRUE(codes.equal()) << s.dim;
    EXPECT_TRUE(scales.equal()) << s.dim;
    EXPECT_TRUE(back.equal()) << s.dim;
  }
}

/// So many blocks that codes are looked up. Blocks differ in magnitude by many binades; half of them are multiples of a
/// quarter, among whose quotients are ties.
TEST_P(Quantize, Nvfp4OfManyBlocksAsTheCpu) {
  constexpr int64_t kRows = 2064, kDim = 2048;
  Bytes in(std::vector<std::byte>(static_cast<size_t>(kRows * kDim * size_of(GetParam()))));
  for (int64_t block = 0; block < kRows * kDim / kNvfp4BlockSize; ++block) {
    const int32_t exponent = static_cast<int32_t>(random_() % 36) - 24;
    for (int64_t i = block * kNvfp4BlockSize; i < (block + 1) * kNvfp4BlockSize; ++i) {
      const auto bits = static_cast<uint32_t>(random_());
      const int32_t quarters = static_cast<int32_t>(bits % 97) - 48;
      const double value = block % 2 == 0 ? quarters * 0.25 : static_cast<int32_t>(bits) * 0x1p-28;
      store_from_float(in.host.data(), GetParam(), i, static_cast<float>(std::ldexp(value, exponent)));
    }
  }
  in = Bytes(in.host);
  Bytes codes(std::vector<std::byte>(static_cast<size_t>(kRows * kDim / 2), std::byte{0x55}));
  Bytes scales(std::vector<std::byte>(static_cast<size_t>(nvfp4_scale_bytes(kRows, kDim / 16)), std::byte{0x11}));
  for (const float global_scale : {1.0f, 3.7f, 448.0f, 1e-25f, 1e25f}) {
    for (const bool on_gpu : {false, true}) {
      quantize_nvfp4(context_of(on_gpu), ConstTensorView(in.at(on_gpu), GetParam(), {kRows, 1, kDim}),
                     TensorView(codes.at(on_gpu), DType::kFloat4E2M1x2, {kRows, 1, kDim / 2}), {scales.at(on_gpu), 0},
                     global_scale);
    }
    EXPECT_TRUE(codes.equal()) << global_scale;
    EXPECT_TRUE(scales.equal()) << global_scale;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, Quantize, testing::ValuesIn(kWideTypes),
                         [](const auto& dtype) { return std::string(to_string(dtype.param)); });

}  // namespace
}  // namespace folio::cuda_test

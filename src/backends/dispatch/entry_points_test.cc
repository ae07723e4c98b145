#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "folio/backends/dispatch.hpp"
#include "folio/types/error.hpp"
#include "folio/types/float_convert.hpp"

namespace folio::inline v0::backends {
namespace {

using Sum = LazyEntryPoint<int(int, int)>;

TEST(LazyEntryPointTest, IsBoundOnTheFirstCallAndOnce) {
  int bound = 0;
  const Sum sum(KernelDispatch(), "flashinfer.concat_ops", "concat_mla_k", [&]() -> Sum::Function {
    ++bound;
    return [](int a, int b) { return a + b; };
  });
  EXPECT_EQ(bound, 0);
  EXPECT_EQ(sum(1, 2), 3);
  EXPECT_EQ(sum(3, 4), 7);
  EXPECT_EQ(bound, 1);
}

TEST(LazyEntryPointTest, RemembersThatItIsAbsent) {
  int bound = 0;
  const Sum sum(
      KernelDispatch(), "flashinfer.fused_moe", "cutlass_fused_moe",
      [&]() -> Sum::Function {
        ++bound;
        return {};
      },
      [](int a, int b) { return a * b; });
  EXPECT_EQ(sum(3, 4), 12) << "the fallback gets the arguments";
  EXPECT_EQ(sum(5, 4), 20);
  EXPECT_EQ(bound, 0) << "what the registry does not have is not bound";

  const Sum empty(KernelDispatch(), "flashinfer.concat_ops", "concat_mla_k", [&]() -> Sum::Function {
    ++bound;
    return {};
  });
  EXPECT_THROW(empty(1, 2), Error);
  EXPECT_THROW(empty(1, 2), Error);
  EXPECT_EQ(bound, 1) << "nor is what turned out absent looked for again";
}

TEST(LazyEntryPointTest, ThrowsTheDocumentedErrorWithoutAFallback) {
  const Sum sum(KernelDispatch(), "flashinfer.fused_moe", "cutlass_fused_moe", [] { return Sum::Function(); });
  try {
    sum(1, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnavailable);
    EXPECT_STREQ(error.what(),
                 "FlashInfer backend is not available. Please install the package to enable FlashInfer kernels: "
                 "https://github.com/flashinfer-ai/flashinfer");
  }
}

TEST(LazyEntryPointTest, NeedsTheLibraryItself) {
  DispatchFacts facts;  // a module without its package
  facts.profile = BackendProfile::kVllm2026_03;
  facts.has_module = [](std::string_view module) { return module == "flashinfer.concat_ops"; };
  facts.has_attribute = [](std::string_view, std::string_view) { return true; };
  const KernelDispatch dispatch(facts);
  EXPECT_TRUE(dispatch.has_submodule("flashinfer.concat_ops"));
  EXPECT_FALSE(dispatch.has_entry_point("flashinfer.concat_ops", "concat_mla_k"));
}

/// A strided tensor of bytes that stand for values of `dtype`; gaps are filled with 0xee.
struct Rows {
  std::vector<uint8_t> bytes;
  TensorView view;

  Rows(DType dtype, int64_t tokens, int64_t heads, int64_t dim, int64_t token_gap, int64_t head_gap, uint32_t seed) {
    const int64_t head_stride = dim + head_gap;
    const int64_t token_stride = heads * head_stride + token_gap;
    bytes.assign(static_cast<size_t>((tokens * token_stride + 8) * size_of(dtype)), 0xee);
    view = TensorView(bytes.data(), dtype, {tokens, heads, dim});
    view.strides = {token_stride, head_stride, 1};
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t b = 0; b < dim * size_of(dtype); ++b) {
          seed = seed * 1664525u + 1013904223u;
          row(t, h)[b] = static_cast<uint8_t>(seed >> 24);
        }
      }
    }
  }
  uint8_t* row(int64_t t, int64_t h) {
    return bytes.data() + (t * view.strides[0] + h * view.strides[1]) * size_of(view.dtype);
  }
};

TEST(ConcatMlaK, PutsTheSharedRotaryPartBehindEveryHead) {
  struct Shape {
    int64_t tokens, heads, nope, rope;
  };
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const Shape& s : {Shape{3, 128, 128, 64}, {5, 3, 7, 5}, {2, 1, 8, 0}, {2, 2, 0, 3}, {0, 4, 8, 8}}) {
      Rows k(dtype, s.tokens, s.heads, s.nope + s.rope, 9, 2, 1);
      Rows nope(dtype, s.tokens, s.heads, s.nope, 0, 3, 2);
      Rows pe(dtype, s.tokens, 1, s.rope, 5, 0, 3);
      std::vector<uint8_t> expected = k.bytes;
      for (int64_t t = 0; t < s.tokens; ++t) {
        for (int64_t h = 0; h < s.heads; ++h) {
          uint8_t* row = expected.data() + (k.row(t, h) - k.bytes.data());
          std::copy_n(nope.row(t, h), s.nope * size_of(dtype), row);
          std::copy_n(pe.row(t, 0), s.rope * size_of(dtype), row + s.nope * size_of(dtype));
        }
      }
      concat_mla_k(k.view, nope.view, pe.view);
      EXPECT_EQ(k.bytes, expected) << "nothing between the rows is written";
    }
  }
}

TEST(ConcatMlaK, TakesKItselfAsTheFirstPart) {
  Rows k(DType::kBFloat16, 4, 2, 12, 0, 0, 1);
  Rows pe(DType::kBFloat16, 4, 1, 4, 0, 0, 2);
  const std::vector<uint8_t> before = k.bytes;
  ConstTensorView nope = k.view;
  nope.shape[2] = 8;
  concat_mla_k(k.view, nope, pe.view);
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + 16, k.bytes.begin()));
  EXPECT_TRUE(std::equal(pe.row(3, 0), pe.row(3, 0) + 8, k.row(3, 1) + 16));
}

TEST(ConcatMlaK, TakesHeadsOutsideTokens) {
  std::vector<uint8_t> memory(2 * 3 * 4, 0);
  TensorView k(memory.data(), DType::kFloat8E4M3, {2, 3, 4});
  k.strides = {4, 8, 1};
  Rows nope(DType::kFloat8E4M3, 2, 3, 3, 0, 0, 1);
  Rows pe(DType::kFloat8E4M3, 2, 1, 1, 0, 0, 2);
  concat_mla_k(k, nope.view, pe.view);
  EXPECT_EQ(memory[static_cast<size_t>(1 * 4 + 2 * 8)], *nope.row(1, 2));
  EXPECT_EQ(memory[static_cast<size_t>(1 * 4 + 2 * 8 + 3)], *pe.row(1, 0));
}

TEST(ConcatMlaK, RefusesBeforeItWrites) {
  Rows k(DType::kBFloat16, 4, 2, 12, 0, 0, 1);
  Rows nope(DType::kBFloat16, 4, 2, 8, 0, 0, 2);
  Rows pe(DType::kBFloat16, 4, 1, 4, 0, 0, 3);
  const std::vector<uint8_t> before = k.bytes;
  const auto refused = [&](const std::string& text, auto change) {
    TensorView a = k.view;
    TensorView b = nope.view;
    TensorView c = pe.view;
    change(a, b, c);
    try {
      concat_mla_k(a, b, c);
      ADD_FAILURE() << "not refused: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  using View = TensorView;
  refused("rank 2", [](View&, View& b, View&) { b.rank = 2; });
  refused("k is unset", [](View& a, View&, View&) { a.dtype = DType::kUnset; });
  refused("k_pe is float16; k is bfloat16", [](View&, View&, View& c) { c.dtype = DType::kFloat16; });
  refused("must be 1", [](View&, View& b, View&) { b.strides[2] = 2; });
  refused("k_nope is [3,", [](View&, View& b, View&) { b.shape[0] = 3; });
  refused("k_pe is [4, 2,", [](View&, View&, View& c) { c.shape[1] = 2; });
  refused("k has 12 components", [](View&, View& b, View&) { b.shape[2] = 7; });
  refused("negative", [](View&, View& b, View&) { b.shape[2] = -8; });
  refused("k_pe is null", [](View&, View&, View& c) { c.data = nullptr; });
  refused("rows of k overlap", [](View& a, View&, View&) { a.strides[1] = 11; });
  refused("rows of k overlap", [](View& a, View&, View&) { a.strides[0] = 0; });
  EXPECT_EQ(k.bytes, before);
}

}  // namespace
}  // namespace folio::inline v0::backends

#include "core/aligned_buffer.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "folio/types/error.hpp"

namespace folio::core {
namespace {

bool aligned(const void* pointer, size_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

void fill(AlignedBuffer& buffer) {
  for (size_t i = 0; i < buffer.bytes(); ++i) buffer.data()[i] = static_cast<std::byte>(i);
}

TEST(AlignedBuffer, HonoursTheAlignment) {
  for (const size_t alignment :
       {size_t{1}, size_t{8}, size_t{64}, size_t{256}, size_t{4096}, AlignedBuffer::kHugePage}) {
    AlignedBuffer buffer(1000, alignment);
    EXPECT_TRUE(aligned(buffer.data(), alignment)) << alignment;
    EXPECT_EQ(buffer.bytes(), 1000u);
    fill(buffer);
  }
}

TEST(AlignedBuffer, LargeOnesStartOnAHugePage) {
  AlignedBuffer buffer(AlignedBuffer::kHugePageThreshold + 123, 64);
  EXPECT_TRUE(aligned(buffer.data(), AlignedBuffer::kHugePage));
  EXPECT_EQ(buffer.bytes(), AlignedBuffer::kHugePageThreshold + 123);
  fill(buffer);
}

TEST(AlignedBuffer, EmptyAndMoved) {
  AlignedBuffer empty(0);
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.bytes(), 0u);
  AlignedBuffer first(64);
  std::byte* data = first.data();
  AlignedBuffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.as<float>(), reinterpret_cast<float*>(data));
  empty = std::move(second);
  EXPECT_EQ(empty.data(), data);
  EXPECT_EQ(empty.bytes(), 64u);
}

ErrorCode error_code(size_t bytes, size_t alignment) {
  try {
    AlignedBuffer buffer(bytes, alignment);
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kOk;
}

TEST(AlignedBuffer, RefusesBadAlignments) {
  EXPECT_EQ(error_code(64, 0), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_code(64, 96), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_code(64, 2 * AlignedBuffer::kHugePage), ErrorCode::kInvalidArgument);
}

TEST(AlignedBuffer, ReportsWhatCannotBeHad) {
  EXPECT_EQ(error_code(std::numeric_limits<size_t>::max(), 64), ErrorCode::kOutOfMemory);
  EXPECT_EQ(error_code(static_cast<size_t>(std::numeric_limits<std::ptrdiff_t>::max()), 64), ErrorCode::kOutOfMemory);
}

}  // namespace
}  // namespace folio::core

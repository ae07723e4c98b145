// A group of threads, from arbitrary sequences of operations and sizes. Every rank gets what the definitions say; where
// one leaves, fails or disagrees, none gets a result of that operation or of a later one, and nobody waits for it.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "calls.hpp"
#include "folio/distributed.hpp"

namespace {

using folio::Error;
using folio::ErrorCode;
using folio::distributed::ProcessGroup;

constexpr size_t kMostValues = 300;
constexpr float kUntouched = -12345.0f;

enum class Operation : uint8_t { kGather, kAllToAll, kReduce, kReduceScatter, kBarrier };

struct Call {
  Operation operation = Operation::kBarrier;
  size_t count = 0;  ///< float32 values of a rank's part
  bool with_refusals = false;
};

/// How the last call of a rank differs from the others'.
enum class Odd : uint8_t { kNone, kLeaves, kThrows, kFails, kOtherSize, kOtherOperation };

/// Whole numbers, whose sums are exact.
float sent(int32_t rank, size_t i) {
  return static_cast<float>((rank + 1) * 1000 + static_cast<int32_t>(i % 97));
}

/// Runs the call as `rank` and, if it returns, checks what it left.
void run(ProcessGroup& group, const Call& call) {
  const int32_t rank = group.rank(), size = group.size();
  const auto world = static_cast<size_t>(size);
  const size_t n = call.count;
  std::vector<float> send(world * n), recv(world * n, kUntouched);
  for (size_t i = 0; i < send.size(); ++i) send[i] = sent(rank, i);
  const float ranks = static_cast<float>(size * (size + 1) / 2) * 1000.0f;
  switch (call.operation) {
    case Operation::kGather:
      group.all_gather(send.data(), recv.data(), n * sizeof(float));
      for (size_t i = 0; i < recv.size(); ++i) FUZZ_CHECK(recv[i] == sent(static_cast<int32_t>(i / n), i % n));
      break;
    case Operation::kAllToAll:
      group.all_to_all(send.data(), recv.data(), n * sizeof(float));
      for (size_t i = 0; i < recv.size(); ++i) {
        FUZZ_CHECK(recv[i] == sent(static_cast<int32_t>(i / n), static_cast<size_t>(rank) * n + i % n));
      }
      break;
    case Operation::kReduce:
      group.all_reduce_sum(send.data(), n);
      for (size_t i = 0; i < n; ++i)
        FUZZ_CHECK(send[i] == ranks + static_cast<float>(size) * static_cast<float>(i % 97));
      break;
    case Operation::kReduceScatter:
      group.reduce_scatter_sum(send.data(), recv.data(), n);
      for (size_t i = 0; i < n; ++i) {
        const size_t at = static_cast<size_t>(rank) * n + i;
        FUZZ_CHECK(recv[i] == ranks + static_cast<float>(size) * static_cast<float>(at % 97));
      }
      break;
    case Operation::kBarrier: group.barrier();
  }
}

/// Arguments that cannot be are refused before anything is sent: the group goes on.
void refuse(ProcessGroup& group) {
  const auto kBad = ErrorCode::kInvalidArgument;
  std::array<float, 8> data{};
  FUZZ_CHECK(refused(kBad, [&] { group.all_reduce_sum(nullptr, 3); }));
  FUZZ_CHECK(refused(kBad, [&] { group.all_gather(nullptr, data.data(), 4); }));
  FUZZ_CHECK(refused(kBad, [&] { group.all_to_all(data.data(), data.data(), 4); }));
  FUZZ_CHECK(refused(kBad, [&] { group.reduce_scatter_sum(data.data(), data.data(), 1); }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const int32_t world = input.take<uint8_t>() < 250 ? input.take_between(1, 4) : -input.take<uint8_t>();
  std::vector<Call> calls;
  for (int i = input.take_between(0, 6); i >= 0; --i) {
    Call call;
    call.operation = static_cast<Operation>(input.take<uint8_t>() % 5);
    call.count = 1 + input.take<uint16_t>() % kMostValues;
    call.with_refusals = input.take<uint8_t>() % 8 == 0;
    calls.push_back(call);
  }
  const int32_t odd_rank = input.take<uint8_t>() % 4;
  Odd odd = static_cast<Odd>(input.take<uint8_t>() % 6);
  if (odd_rank >= world || (world == 1 && odd >= Odd::kOtherSize)) odd = Odd::kNone;
  const auto body = [&](ProcessGroup& group) {
    for (size_t i = 0; i < calls.size(); ++i) {
      Call call = calls[i];
      if (call.with_refusals) refuse(group);
      const bool last = i + 1 == calls.size();
      if (!last || odd == Odd::kNone) {
        run(group, call);
        continue;
      }
      if (group.rank() == odd_rank) {
        if (odd == Odd::kLeaves) return;
        if (odd == Odd::kThrows) throw Error(ErrorCode::kUnavailable, "this rank throws");
        if (odd == Odd::kFails) group.fail("this rank fails");
        if (odd == Odd::kOtherOperation) {
          call.operation = call.operation == Operation::kBarrier ? Operation::kReduce : Operation::kBarrier;
        }
        if (odd == Odd::kOtherSize) {
          call.operation = Operation::kReduce;
          ++call.count;
        }
      } else if (odd == Odd::kOtherSize) {
        call.operation = Operation::kReduce;
      }
      FUZZ_CHECK(refused(ErrorCode::kUnavailable, [&] { run(group, call); }));
      FUZZ_CHECK(refused(ErrorCode::kUnavailable, [&] { group.barrier(); }));
    }
  };
  folio::distributed::ThreadGroupOptions options;
  options.timeout = std::chrono::seconds(10);
  if (world < 1) {
    FUZZ_CHECK(refused(ErrorCode::kInvalidArgument, [&] { folio::distributed::run_ranks(world, body, options); }));
  } else if (odd == Odd::kThrows) {
    FUZZ_CHECK(refused(ErrorCode::kUnavailable, [&] { folio::distributed::run_ranks(world, body, options); }));
  } else {
    folio::distributed::run_ranks(world, body, options);
  }
  return 0;
}

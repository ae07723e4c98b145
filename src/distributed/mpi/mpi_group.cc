#include "folio/distributed/mpi_group.hpp"

#include <mpi.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "distributed/operation_checks.hpp"

namespace folio::inline v0::distributed {
namespace {

[[noreturn]] void unavailable(const std::string& text) {
  throw Error(ErrorCode::kUnavailable, text);
}

/// A type of `bytes` consecutive bytes or of a divisor of them, so that MPI's int can count them.
class ByteType {
 public:
  explicit ByteType(size_t bytes) {
    size_t unit = 1;
    while (unit < kLargestUnit && bytes % (2 * unit) == 0) unit *= 2;
    if (bytes / unit > INT_MAX)
      refuse("one rank's part", " is too large for MPI to count; a multiple of 4096 bytes may be larger");
    count_ = static_cast<int>(bytes / unit);
    MPI_Type_contiguous(static_cast<int>(unit), MPI_BYTE, &type_);
    MPI_Type_commit(&type_);
  }
  ByteType(const ByteType&) = delete;
  ByteType& operator=(const ByteType&) = delete;
  ~ByteType() { MPI_Type_free(&type_); }
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  static constexpr size_t kLargestUnit = 4096;
  int count_ = 0;
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

/// Sums are made here, in the order of the ranks, from parts that MPI only carries: MPI's own reductions may add in
/// another order for another size.
class MpiGroup final : public ProcessGroup {
 public:
  MpiGroup(MPI_Comm parent, std::chrono::milliseconds timeout) : timeout_(timeout) {
    require_success(MPI_Comm_dup(parent, &communicator_), "MPI_Comm_dup");
    MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    int rank = 0, size = 0;
    MPI_Comm_rank(communicator_, &rank);
    MPI_Comm_size(communicator_, &size);
    rank_ = rank;
    size_ = size;
  }

  ~MpiGroup() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // Freeing is collective: after a failure the others may never come.
    if (finalized == 0 && failure_.empty()) MPI_Comm_free(&communicator_);
  }

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  std::chrono::milliseconds timeout() const noexcept override { return timeout_; }

  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    check_stream(stream);
    check_all_gather(send, recv, bytes, rank_, size_);
    const ByteType type(bytes);
    if (send == static_cast<const std::byte*>(recv) + static_cast<size_t>(rank_) * bytes && bytes > 0) {
      // MPI's own way of gathering in place has to be every rank's.
      send = std::memcpy(scratch(bytes / sizeof(float) + 1).data(), send, bytes);
    }
    begin();
    MPI_Request request;
    require_success(
        MPI_Iallgather(send, type.count(), type.type(), recv, type.count(), type.type(), communicator_, &request),
        "MPI_Iallgather");
    wait(request, "all_gather");
  }

  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    check_stream(stream);
    const size_t all = bytes_of_all(size_, bytes);
    check_exchange(send, all, recv, all);
    exchange(send, recv, bytes, "all_to_all");
  }

  void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream) override {
    check_stream(stream);
    const size_t bytes = bytes_of_floats(count);
    check_exchange(send, bytes_of_all(size_, bytes), recv, bytes);
    std::vector<float>& parts = scratch(count * static_cast<size_t>(size_));
    exchange(send, parts.data(), bytes, "reduce_scatter_sum");
    sum(parts.data(), count, recv);
  }

  void all_reduce_sum(float* data, size_t count, Stream stream) override {
    check_stream(stream);
    check_buffer("data", data, bytes_of_floats(count));
    // Everybody sums one section, all of one length: the last ones may reach beyond the data.
    const auto world = static_cast<size_t>(size_);
    const size_t section = (count + world - 1) / world, padded = section * world;
    std::vector<float>& memory = scratch(2 * padded + section);
    float *send = memory.data(), *parts = send + padded, *mine = parts + padded;
    std::copy_n(data, count, send);
    std::fill(send + count, send + padded, 0.0f);
    exchange(send, parts, section * sizeof(float), "all_reduce_sum");
    sum(parts, section, mine);
    all_gather(mine, send, section * sizeof(float), stream);
    std::copy_n(send, count, data);
  }

  void barrier(Stream stream) override {
    check_stream(stream);
    begin();
    MPI_Request request;
    require_success(MPI_Ibarrier(communicator_, &request), "MPI_Ibarrier");
    wait(request, "barrier");
  }

  void fail(std::string_view reason) noexcept override {
    try {
      if (failure_.empty()) failure_ = reason.empty() ? "this rank gave up" : std::string(reason);
    } catch (...) {  // no memory for the text: the next operation runs into its timeout
    }
  }

 private:
  void begin() const {
    if (!failure_.empty()) unavailable("the MPI group has failed: " + failure_);
  }

  void require_success(int code, const char* what) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    MPI_Error_string(code, text, &length);
    fail(std::string(what) + ": " + text);
    begin();
  }

  void exchange(const void* send, void* recv, size_t bytes, const char* name) {
    const ByteType type(bytes);
    begin();
    MPI_Request request;
    require_success(
        MPI_Ialltoall(send, type.count(), type.type(), recv, type.count(), type.type(), communicator_, &request),
        "MPI_Ialltoall");
    wait(request, name);
  }

  /// Waits for the operation, or until the time is up.
  void wait(MPI_Request& request, const char* name) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point deadline = Clock::now() + timeout_;
    int done = 0;
    for (int64_t polls = 0;; ++polls) {
      require_success(MPI_Test(&request, &done, MPI_STATUS_IGNORE), name);
      if (done != 0) return;
      if (polls < kBusyPolls) continue;
      std::this_thread::yield();
      if (Clock::now() < deadline) continue;
      fail("rank " + std::to_string(rank_) + " waited " + std::to_string(timeout_.count()) + " ms in " + name);
      begin();
    }
  }

  void sum(const float* parts, size_t count, float* out) const {
    std::copy_n(parts, count, out);
    for (int32_t r = 1; r < size_; ++r) {
      const float* part = parts + static_cast<size_t>(r) * count;
      for (size_t i = 0; i < count; ++i) out[i] += part[i];
    }
  }

  /// Grows to the largest operation.
  std::vector<float>& scratch(size_t count) {
    if (scratch_.size() < count) scratch_.resize(count);
    return scratch_;
  }

  static constexpr int64_t kBusyPolls = 1000;  // then others may run on this core
  const std::chrono::milliseconds timeout_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int32_t rank_ = 0;
  int32_t size_ = 1;
  std::string failure_;  ///< empty while the group works
  std::vector<float> scratch_;
};

}  // namespace

std::unique_ptr<ProcessGroup> make_mpi_group(const MpiGroupOptions& options) {
  if (options.timeout.count() <= 0) refuse("the timeout", " must be above 0 ms");
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0) unavailable("MPI is not initialised: call MPI_Init first");
  MPI_Comm parent =
      options.communicator != nullptr ? *static_cast<const MPI_Comm*>(options.communicator) : MPI_COMM_WORLD;
  return std::make_unique<MpiGroup>(parent, options.timeout);
}

}  // namespace folio::inline v0::distributed

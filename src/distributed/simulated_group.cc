#include "folio/distributed/simulated_group.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "attention/op_state.hpp"
#include "core/error.hpp"
#include "distributed/operation_checks.hpp"

namespace folio::inline v0::distributed {
namespace {

class Simulation final : public SimulatedGroup {
 public:
  Simulation(int32_t world, const SimulatedGroupOptions& options)
      : rank_(options.rank), size_(world), topology_(options.topology) {
    const int32_t node = rank_ / topology_.ranks_per_node * topology_.ranks_per_node;
    neighbours_ = std::min(topology_.ranks_per_node, world - node) - 1;
    if (!options.context) return;
    device_ = options.context->device();
    gpu_ = options.context->state().gpu;
  }

  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  Device device() const noexcept override { return device_; }
  bool enqueues() const noexcept override { return true; }

  void all_gather(const void* send, void* recv, size_t bytes, Stream stream) override {
    begin(stream);
    check_all_gather(send, recv, bytes, rank_, size_);
    // What is there is doubled: copies are rank 0's time, and a group of 64 has 7 of them.
    auto* const to = static_cast<std::byte*>(recv);
    const size_t all = bytes_of_all(size_, bytes);
    copy(to, send, bytes, stream);
    for (size_t done = bytes; done < all && done > 0; done *= 2)
      copy(to + done, to, std::min(done, all - done), stream);
    count(bytes, 1);
  }

  void all_to_all(const void* send, void* recv, size_t bytes, Stream stream) override {
    begin(stream);
    const size_t all = bytes_of_all(size_, bytes);
    check_exchange(send, all, recv, all);
    copy(recv, send, all, stream);
    count(bytes, 1);
  }

  /// What this rank sends is kept: a sum over ranks that all send it would grow from run to run.
  void all_reduce_sum(float* data, size_t count_of_floats, Stream stream) override {
    begin(stream);
    const size_t bytes = bytes_of_floats(count_of_floats);
    check_buffer("data", data, bytes);
    count((bytes + static_cast<size_t>(size_) - 1) / static_cast<size_t>(size_), 2);
  }

  void reduce_scatter_sum(const float* send, float* recv, size_t count_of_floats, Stream stream) override {
    begin(stream);
    const size_t bytes = bytes_of_floats(count_of_floats);
    check_exchange(send, bytes_of_all(size_, bytes), recv, bytes);
    copy(recv, send + static_cast<size_t>(rank_) * count_of_floats, bytes, stream);
    count(bytes, 1);
  }

  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    if (!failure_.empty()) unavailable();
    check_all_gather(send, recv, bytes, rank_, size_);
    auto* to = static_cast<std::byte*>(recv);
    for (int32_t r = 0; r < size_ && bytes > 0; ++r, to += bytes) std::memmove(to, send, bytes);
  }

  void barrier(Stream stream) override {
    begin(stream);
    count(0, 1);
  }

  void fail(std::string_view reason) noexcept override {
    if (failure_.empty()) failure_ = reason.empty() ? "a rank gave up" : reason;
  }

  Traffic traffic() const noexcept override { return traffic_; }
  void reset_traffic() noexcept override { traffic_ = {}; }

 private:
  [[noreturn]] void unavailable() const {
    core::fail(ErrorCode::kUnavailable, "the simulated group has failed: ", failure_);
  }

  void begin(Stream stream) const {
    if (!failure_.empty()) unavailable();
    if (gpu_ == nullptr) check_stream(stream);
  }

  void copy(void* to, const void* from, size_t bytes, Stream stream) const {
    if (bytes == 0 || to == from) return;
    if (gpu_ != nullptr) {
      gpu_->copy(to, from, bytes, stream);
    } else {
      std::memcpy(to, from, bytes);
    }
  }

  /// `times` operations, in each of which every other rank is sent so many bytes.
  void count(size_t bytes, int32_t times) {
    ++traffic_.operations;
    if (size_ == 1) return;
    const double per_rank = static_cast<double>(bytes);
    const auto seconds = [&](const Link& link, int32_t ranks) {
      if (ranks == 0) return 0.0;
      const double to_one = link.bytes_per_second_to_one > 0.0 ? link.bytes_per_second_to_one : link.bytes_per_second;
      return link.seconds_per_operation + std::max(per_rank * ranks / link.bytes_per_second, per_rank / to_one);
    };
    const int32_t others = size_ - 1;
    traffic_.bytes_sent += times * per_rank * others;
    traffic_.seconds += times * std::max(seconds(topology_.within_node, neighbours_),
                                         seconds(topology_.between_nodes, others - neighbours_));
  }

  int32_t rank_;
  int32_t size_;
  Topology topology_;
  int32_t neighbours_ = 0;  ///< other ranks of this one's node
  Device device_;
  std::shared_ptr<const attention::GpuBackend> gpu_;  ///< null: host memory
  Traffic traffic_;
  std::string failure_;  ///< empty: none
};

void check_link(const char* name, const Link& link) {
  core::require(link.bytes_per_second > 0.0, "the link ", name, " moves ", link.bytes_per_second,
                " bytes a second; it must be above 0");
  core::require(link.bytes_per_second_to_one >= 0.0, "the link ", name, " moves ", link.bytes_per_second_to_one,
                " bytes a second to one rank; it must not be negative");
  core::require(link.seconds_per_operation >= 0.0, "an operation on the link ", name, " takes ",
                link.seconds_per_operation, " s; it must not be negative");
}

}  // namespace

std::unique_ptr<SimulatedGroup> make_simulated_group(int32_t world, const SimulatedGroupOptions& options) {
  core::require(world >= 1, "the world is ", world, "; a group has 1 rank or more");
  core::require(options.rank >= 0 && options.rank < world, "rank ", options.rank, " of ", world,
                ": ranks are in [0, world)");
  core::require(options.topology.ranks_per_node >= 1, "a node has ", options.topology.ranks_per_node,
                " ranks; it has 1 or more");
  check_link("within a node", options.topology.within_node);
  check_link("between nodes", options.topology.between_nodes);
  return std::make_unique<Simulation>(world, options);
}

}  // namespace folio::inline v0::distributed

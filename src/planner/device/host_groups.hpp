#pragma once

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

/// Who runs the device planner in tests on the host.
namespace folio::inline v0::planner::testing {

/// One thread alone.
class Alone {
 public:
  int32_t rank() const { return 0; }
  int32_t size() const { return 1; }
  void sync() {}
  template <typename T, typename Combine>
  T exclusive_scan(const T& value, const T& identity, const Combine&, T& total) {
    total = value;
    return identity;
  }
};

/// Several threads with a barrier, as a thread block has one.
class Team {
 public:
  /// Runs body(member) on `size` threads.
  template <typename Body>
  static void run(int32_t size, const Body& body) {
    Shared shared(size);
    std::vector<std::jthread> threads;
    for (int32_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&shared, &body, rank, size] {
        Team member(shared, rank, size);
        body(member);
      });
    }
  }

  int32_t rank() const { return rank_; }
  int32_t size() const { return size_; }
  void sync() { shared_.barrier.arrive_and_wait(); }
  template <typename T, typename Combine>
  T exclusive_scan(const T& value, const T& identity, const Combine& combine, T& total) {
    static_assert(sizeof(T) <= kSlot);
    new (slot(rank_)) T(value);
    sync();
    T before = identity;
    total = identity;
    for (int32_t rank = 0; rank < size_; ++rank) {
      if (rank == rank_) before = total;
      total = combine(total, *reinterpret_cast<const T*>(slot(rank)));
    }
    sync();
    return before;
  }

 private:
  static constexpr size_t kSlot = 64;
  struct Shared {
    explicit Shared(int32_t size) : barrier(size), slots(static_cast<size_t>(size) * kSlot) {}
    std::barrier<> barrier;
    std::vector<std::byte> slots;
  };
  Team(Shared& shared, int32_t rank, int32_t size) : shared_(shared), rank_(rank), size_(size) {}
  std::byte* slot(int32_t rank) { return shared_.slots.data() + static_cast<size_t>(rank) * kSlot; }

  Shared& shared_;
  int32_t rank_;
  int32_t size_;
};

}  // namespace folio::inline v0::planner::testing

#pragma once

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

/// Who runs the device scheduler in tests on the host.
namespace folio::inline v0::scheduler::testing {

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
  bool all_of(bool mine) { return mine; }
  template <size_t N, typename Of>
  void sum_each(int32_t (&values)[N], int32_t count, const Of& of) {
    for (size_t i = 0; i < N; ++i) {
      const auto of_i = of(static_cast<int32_t>(i));
      values[i] = 0;
      for (int32_t j = 0; j < count; ++j) values[i] += of_i(j);
    }
  }
  template <size_t N>
  void sum_before(int32_t (&values)[N], int32_t (&total)[N]) {
    std::copy_n(values, N, total);
    std::fill_n(values, N, 0);
  }
};

/// Several threads with a barrier, as a CTA has one.
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
  bool all_of(bool mine) {
    int32_t wrong[1] = {mine ? 0 : 1};
    int32_t total[1];
    sum_before(wrong, total);
    return total[0] == 0;
  }
  template <size_t N, typename Of>
  void sum_each(int32_t (&values)[N], int32_t count, const Of& of) {
    Alone().sum_each(values, count, of);
    sync();
  }
  template <size_t N>
  void sum_before(int32_t (&values)[N], int32_t (&total)[N]) {
    for (size_t i = 0; i < N; ++i) {
      values[i] = exclusive_scan(
          values[i], int32_t{0}, [](int32_t a, int32_t b) { return a + b; }, total[i]);
    }
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

}  // namespace folio::inline v0::scheduler::testing

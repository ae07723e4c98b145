#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "folio/context.hpp"
#include "folio/types/device.hpp"
#include "folio/types/export.hpp"

namespace folio::inline v0::distributed {

/// One rank's handle of a group of `size` ranks, numbered from 0. Every operation is collective: all ranks call the
/// same ones, in the same order, with the same sizes, or none of them gets a result.
///
/// Operations are ordered by their stream, and their buffers lie in the group's memory. A group over host memory (those
/// of threads and of MPI) takes the default stream, and a call returns when its result is there and its input may be
/// changed. A handle is used by one thread at a time.
///
/// Sums are of float32 and run in the order of the ranks, whatever the sizes: equal inputs give equal bits, on every
/// rank, for a row alone as among others.
///
/// Throws kInvalidArgument before anything is sent, for null buffers, overlaps and other streams; kUnavailable where
/// the group has failed: a rank has left it or has called fail(), the ranks disagree about the operation, or one of
/// them has not come in time. A failed group stays so: every rank's operations throw, at once.
class FOLIO_API ProcessGroup {
 public:
  ProcessGroup() = default;
  ProcessGroup(const ProcessGroup&) = delete;
  ProcessGroup& operator=(const ProcessGroup&) = delete;
  virtual ~ProcessGroup();

  virtual int32_t rank() const noexcept = 0;
  virtual int32_t size() const noexcept = 0;
  /// Where the operations' buffers lie.
  virtual Device device() const noexcept { return {}; }
  /// True: an operation is enqueued on its stream and returns at once; the device waits for the other ranks, not the
  /// host, and a graph may capture it. False: a call returns when its result is there.
  virtual bool enqueues() const noexcept { return false; }
  /// How long a rank waits for the others in one operation before the group fails.
  virtual std::chrono::milliseconds timeout() const noexcept { return std::chrono::minutes(5); }

  /// recv [size * bytes]: rank i's `send` [bytes] at i * bytes. `send` may be this rank's part of `recv`.
  virtual void all_gather(const void* send, void* recv, size_t bytes, Stream stream = {}) = 0;

  /// Rank i gets send[i * bytes ..] of every rank j, at recv[j * bytes ..]. Both are [size * bytes] and lie apart.
  virtual void all_to_all(const void* send, void* recv, size_t bytes, Stream stream = {}) = 0;

  /// data [count] becomes the sum over all ranks, on every rank.
  virtual void all_reduce_sum(float* data, size_t count, Stream stream = {}) = 0;

  /// recv [count]: the sum over all ranks of part rank() of their `send` [size * count]. They lie apart.
  virtual void reduce_scatter_sum(const float* send, float* recv, size_t count, Stream stream = {}) = 0;

  /// all_gather over host memory, whatever device() is: for a few bytes, once a step. Returns when the result is there.
  /// The default serves groups over host memory; for others it throws kUnsupported.
  virtual void all_gather_host(const void* send, void* recv, size_t bytes);

  /// Returns when every rank has called it. Of a group that enqueues: what `stream` gets afterwards waits for every
  /// rank's stream to come to its barrier.
  virtual void barrier(Stream stream = {}) = 0;

  /// Throws kUnavailable if the group has failed. A group that enqueues fails after its calls have returned, so an
  /// engine asks once a step. Waits for nothing.
  virtual void check() {}

  /// Makes the group fail, for this rank and, where the group can reach them, for all others, also those that wait in
  /// an operation. For a rank that cannot go on: without it the others wait until their time is up. The first reason
  /// stays.
  virtual void fail(std::string_view reason) noexcept = 0;
};

/// out [count] = sent[0] + sent[1] + ..., of [count] each, in that order: the sums that ProcessGroup promises, for
/// groups that have brought all ranks' parts to one place. Enqueued on a GPU. `out` lies apart from the parts. Throws
/// kInvalidArgument.
FOLIO_API void sum_over_ranks(const Context& context, std::span<const float* const> sent, size_t count, float* out,
                              Stream stream = {});

}  // namespace folio::inline v0::distributed

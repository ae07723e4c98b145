#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan.hpp"

namespace folio::python {

/// An int64 slot mapping. On a CPU it is a copy: the slots that are checked are those that are written.
class Slots {
 public:
  Slots() = default;
  Slots(nb::handle source, const Device& device);
  const int64_t* data() const { return copied_ ? values_.data() : static_cast<const int64_t*>(array_.data); }
  int64_t count() const { return count_; }
  const Array& array() const { return array_; }

 private:
  Array array_;
  std::vector<int64_t> values_;
  int64_t count_ = 0;
  bool copied_ = false;
};

/// Step: a plan with what its layers share. Immutable once made.
struct Step {
  nb::object plan_object;  ///< keeps the plan
  std::shared_ptr<Scratch> workspace;
  std::optional<Stream> stream;  ///< none: each call takes the current one of its arrays
  std::optional<Slots> slots;
  const uint8_t* custom_mask = nullptr;
  int64_t custom_mask_bytes = 0;
  TableCopies copies;                     ///< on a CPU
  std::vector<SegmentArg> segment_args;   ///< tables and offsets, as they were given
  std::span<const SegmentArgs> segments;  ///< without this or that layer's memory: the copies, or on a GPU the views
  std::vector<SegmentArgs> segment_views;
  std::vector<Array> arrays;

  const Plan& plan() const { return *nb::inst_ptr<Plan>(plan_object); }
  /// Of a call with these arrays.
  Stream stream_of(const std::vector<Array>& call_arrays) const {
    return stream ? *stream : to_stream(nb::none(), device(), {&call_arrays});
  }
  Device device() const { return plan().buffer->op.context().device(); }
  bool is_ragged(size_t segment) const { return plan().batch.segments()[segment].source == KvSource::kRagged; }
  /// Whether a segment's page ids are those of a cache. On a GPU they are trusted.
  bool ids_are_pages(size_t segment, int64_t num_pages) const {
    return device().type != DeviceType::kCpu || copies.ids_are_pages(segment, num_pages);
  }
};

std::string text_of(const Step& step);

}  // namespace folio::python

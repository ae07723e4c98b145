#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "folio/attention.hpp"
#include "folio/kv_cache.hpp"
#include "folio/types/error.hpp"

/// What Python calls Folio's enumerators and element types, and what is taken where one is wanted: the enumerator, or
/// its name in lower case as a string. Every file that binds a function with such an argument includes this header: it
/// has the type casters.
namespace folio::python {

namespace nb = nanobind;

/// One enumerator: upper case, without the k.
template <typename Enum>
struct Enumerator {
  const char* name;
  Enum value;
  const char* doc;
};

/// The enumerators of an enum, specialised for each that Python has: kName, kDoc, kAll. An enum of another header gets
/// its own specialisation there, a FOLIO_PYTHON_ENUM line, and a bind_enum call.
template <typename Enum>
struct Names;

template <>
struct Names<ErrorCode> {
  static constexpr const char* kName = "ErrorCode";
  static constexpr const char* kDoc = "Why a call failed: Error.code.";
  static constexpr Enumerator<ErrorCode> kAll[] = {
      {"INVALID_ARGUMENT", ErrorCode::kInvalidArgument, "What no configuration accepts."},
      {"UNSUPPORTED", ErrorCode::kUnsupported, "Well-formed, but no kernel here offers it."},
      {"UNAVAILABLE", ErrorCode::kUnavailable, "Offered in general, absent here: no GPU, no such CPU feature."},
      {"OUT_OF_MEMORY", ErrorCode::kOutOfMemory, "Host or device memory could not be had."},
      {"WORKSPACE_TOO_SMALL", ErrorCode::kWorkspaceTooSmall, "The workspace is smaller than the plan needs."},
      {"STALE_PLAN", ErrorCode::kStalePlan, "The plan's buffer has been planned into again since."},
      {"DEVICE_ERROR", ErrorCode::kDeviceError, "The device's runtime reported an error."},
      {"INTERNAL", ErrorCode::kInternal, "A bug in Folio."}};
};

template <>
struct Names<DeviceType> {
  static constexpr const char* kName = "DeviceType";
  static constexpr const char* kDoc = "The kind of a device.";
  static constexpr Enumerator<DeviceType> kAll[] = {{"CPU", DeviceType::kCpu, nullptr},
                                                    {"CUDA", DeviceType::kCuda, nullptr}};
};

template <>
struct Names<Where> {
  static constexpr const char* kName = "Where";
  static constexpr const char* kDoc = "Where a batch's lengths lie.";
  static constexpr Enumerator<Where> kAll[] = {{"HOST", Where::kHost, nullptr}, {"DEVICE", Where::kDevice, nullptr}};
};

template <>
struct Names<ThreadPinning> {
  static constexpr const char* kName = "ThreadPinning";
  static constexpr const char* kDoc =
      "Whether the threads of Folio's own pool stay on one CPU each. The caller's thread is never pinned.";
  static constexpr Enumerator<ThreadPinning> kAll[] = {
      {"AUTOMATIC", ThreadPinning::kAutomatic,
       "Where the process was given CPUs of its own, an affinity mask narrower than the machine, and the pool has as "
       "many threads."},
      {"PINNED", ThreadPinning::kPinned, "At most as many threads as the process may run on."},
      {"UNPINNED", ThreadPinning::kUnpinned, "The OS moves them."}};
};

/// Element types have torch's names, in lower case; kUnset is None. Their strings may also be the C++ names (fp8_e4m3).
template <>
struct Names<DType> {
  static constexpr const char* kName = "DType";
  static constexpr const char* kDoc =
      "Element types: folio.float32, folio.bfloat16 and so on. Where one is taken, so is torch's, numpy's or "
      "ml_dtypes' dtype of the same name, and that name as a string.";
  static constexpr Enumerator<DType> kAll[] = {
      {"float32", DType::kFloat32, "IEEE binary32"},
      {"float16", DType::kFloat16, "IEEE binary16"},
      {"bfloat16", DType::kBFloat16, "the upper half of a float32"},
      {"float8_e4m3fn", DType::kFloat8E4M3, "8 bits without infinities, at most 448"},
      {"float8_e5m2", DType::kFloat8E5M2, "8 bits with infinities, at most 57344"},
      {"float4_e2m1fn_x2", DType::kFloat4E2M1x2, "two 4-bit values a byte: NVFP4 outputs"},
      {"int8", DType::kInt8, "KV caches with a scale a token and KV head"}};
};

template <>
struct Names<KvFormat> {
  static constexpr const char* kName = "KvFormat";
  static constexpr const char* kDoc = "How a page's keys and values lie in memory.";
  static constexpr Enumerator<KvFormat> kAll[] = {
      {"STRIDED", KvFormat::kStrided, "Any strides with a contiguous head dimension: NHD, HND, interleaved K and V."},
      {"CPU_PACKED", KvFormat::kCpuPacked, "V keeps pairs of tokens side by side, as AMX reads them."},
      {"FP8_DS_MLA", KvFormat::kFp8DsMla, "DeepSeek's rows of 656 bytes: e4m3 latents, four scales, the RoPE part."}};
};

template <>
struct Names<KvSource> {
  static constexpr const char* kName = "KvSource";
  static constexpr const char* kDoc = "Where a segment's keys and values lie.";
  static constexpr Enumerator<KvSource> kAll[] = {{"PAGED", KvSource::kPaged, "In the pages of a cache."},
                                                  {"RAGGED", KvSource::kRagged, "In tensors, request after request."}};
};

template <>
struct Names<MaskKind> {
  static constexpr const char* kName = "MaskKind";
  static constexpr const char* kDoc = "Which keys are visible to a query, before the window.";
  static constexpr Enumerator<MaskKind> kAll[] = {
      {"NONE", MaskKind::kNone, "All keys."},
      {"CAUSAL", MaskKind::kCausal, "Keys at or before the query's position."},
      {"CUSTOM", MaskKind::kCustom, "Those that AttentionArgs.custom_mask says; replaces causal."}};
};

template <>
struct Names<SegmentMask> {
  static constexpr const char* kName = "SegmentMask";
  static constexpr const char* kDoc = "Whether the config's mask and window apply to a segment.";
  static constexpr Enumerator<SegmentMask> kAll[] = {
      {"AS_CONFIG", SegmentMask::kAsConfig, nullptr},
      {"ALL_VISIBLE", SegmentMask::kAllVisible, "Every key of the segment is visible."}};
};

template <>
struct Names<CustomMaskScope> {
  static constexpr const char* kName = "CustomMaskScope";
  static constexpr const char* kDoc = "Which keys a custom mask's columns stand for.";
  static constexpr Enumerator<CustomMaskScope> kAll[] = {
      {"ALL", CustomMaskScope::kAll, "All keys of the request, its segments in order."},
      {"TAIL", CustomMaskScope::kTail, "Its last tail_len keys; earlier ones are visible."}};
};

template <>
struct Names<Determinism> {
  static constexpr const char* kName = "Determinism";
  static constexpr const char* kDoc = "What must not change a result's bits. Each level contains the ones above it.";
  static constexpr Enumerator<Determinism> kAll[] = {
      {"NONE", Determinism::kNone, "Nothing is promised."},
      {"RUN_TO_RUN", Determinism::kRunToRun, "Same inputs, same concurrency: same bits."},
      {"BATCH_INVARIANT", Determinism::kBatchInvariant, "Nor the other requests, padding, concurrency, replay."},
      {"SCHEDULE_INVARIANT", Determinism::kScheduleInvariant, "Nor how a request's tokens were divided over steps."}};
};

template <>
struct Names<Feature> {
  static constexpr const char* kName = "Feature";
  static constexpr const char* kDoc = "Per-layer features that an op must be prepared for; a set of them is their |.";
  static constexpr Enumerator<Feature> kAll[] = {
      {"SOFT_CAP", Feature::kSoftCap, "logits_soft_cap"},
      {"ALIBI", Feature::kAlibi, "alibi_slopes"},
      {"SINKS", Feature::kSinks, "sinks"},
      {"ROPE_LLAMA", Feature::kRopeLlama, "Rotary embedding inside the kernel."},
      {"SPANS", Feature::kSpans, "BatchView's spans; a causal mask only."},
      {"REQUEST_CAUSAL", Feature::kRequestCausal, "BatchView's causal; a causal mask only."},
      {"KV_START", Feature::kKvStart, "BatchView's kv_start."}};
};

template <>
struct Names<LseBase> {
  static constexpr const char* kName = "LseBase";
  static constexpr const char* kDoc = "The logarithm's base of LSE values.";
  static constexpr Enumerator<LseBase> kAll[] = {{"E", LseBase::kE, nullptr}, {"TWO", LseBase::k2, nullptr}};
};

template <>
struct Names<ScaleGranularity> {
  static constexpr const char* kName = "ScaleGranularity";
  static constexpr const char* kDoc = "How a scale array is indexed.";
  static constexpr Enumerator<ScaleGranularity> kAll[] = {
      {"PER_TENSOR", ScaleGranularity::kPerTensor, "One number."},
      {"PER_HEAD", ScaleGranularity::kPerHead, "[heads]"},
      {"PER_REQUEST", ScaleGranularity::kPerRequest, "[requests]"},
      {"PER_REQUEST_AND_HEAD", ScaleGranularity::kPerRequestAndHead, "[requests, heads]"}};
};

/// ASCII alone.
std::string to_lower(std::string text);

/// Whether a Python string is an enumerator's name in lower case.
bool names(nb::handle source, const char* enumerator) noexcept;

/// The type that torch's, numpy's or ml_dtypes' dtype, or a string, stands for. False where it is none of Folio's.
bool find_dtype(nb::handle source, DType& dtype) noexcept;

/// A Feature, a string, an iterable of either, or None. False where it is none of these.
bool to_features(nb::handle source, Features& features) noexcept;

/// "folio.MaskKind.CAUSAL", "folio.Feature.SOFT_CAP | folio.Feature.SINKS", "folio.float32": Python that makes it.
template <typename Enum>
std::string enumerator_text(Enum value) {
  const std::string prefix = std::is_same_v<Enum, DType> ? "folio." : std::string("folio.") + Names<Enum>::kName + ".";
  std::string set;
  for (const Enumerator<Enum>& one : Names<Enum>::kAll) {
    if (value == one.value) return prefix + one.name;
    if ((static_cast<int64_t>(value) & static_cast<int64_t>(one.value)) == 0) continue;
    set += (set.empty() ? "" : " | ") + prefix + one.name;
  }
  return set.empty() ? std::string("folio.") + Names<Enum>::kName + "(0)" : set;
}

/// "causal": what a string says for an enumerator; "invalid" for a value that is none.
template <typename Enum>
std::string lower_name(Enum value) {
  for (const Enumerator<Enum>& one : Names<Enum>::kAll) {
    if (value == one.value) return to_lower(one.name);
  }
  return "invalid";
}

/// Binds one enum as its Names say.
template <typename Enum, typename... Extra>
nb::enum_<Enum> bind_enum(nb::module_& m, const Extra&... extra) {
  nb::enum_<Enum> bound(m, Names<Enum>::kName, Names<Enum>::kDoc, extra...);
  for (const Enumerator<Enum>& one : Names<Enum>::kAll) bound.value(one.name, one.value, one.doc);
  bound.def("__repr__", [](Enum self) { return enumerator_text(self); });
  return bound;
}

}  // namespace folio::python

namespace nanobind::detail {

/// The caster of an enum: the enumerator or its lower-case name; never a bare integer.
template <typename Enum>
struct NamedEnumCaster {
  NB_TYPE_CASTER(Enum, const_name<Enum>() + io_name(" | str", ""))

  bool from_python(handle source, uint32_t, cleanup_list* cleanup) noexcept {
    for (const folio::python::Enumerator<Enum>& one : folio::python::Names<Enum>::kAll) {
      if (!folio::python::names(source, one.name)) continue;
      value = one.value;
      return true;
    }
    int64_t found = 0;
    if (!NB_CALL(enum_from_python)(NB_CTX_C(cleanup), &typeid(Enum), source.ptr(), &found, 0)) return false;
    value = static_cast<Enum>(found);
    return true;
  }

  static handle from_cpp(Enum source, rv_policy, cleanup_list* cleanup) noexcept {
    return NB_CALL(enum_from_cpp)(NB_CTX_C(cleanup), &typeid(Enum), static_cast<int64_t>(source));
  }
};

}  // namespace nanobind::detail

/// Strings are taken where this enum is. At namespace scope, outside of every namespace.
#define FOLIO_PYTHON_ENUM(Enum) \
  template <>                   \
  struct nanobind::detail::type_caster<Enum> : nanobind::detail::NamedEnumCaster<Enum> {}

FOLIO_PYTHON_ENUM(folio::DeviceType);
FOLIO_PYTHON_ENUM(folio::Where);
FOLIO_PYTHON_ENUM(folio::ThreadPinning);
FOLIO_PYTHON_ENUM(folio::KvFormat);
FOLIO_PYTHON_ENUM(folio::KvSource);
FOLIO_PYTHON_ENUM(folio::MaskKind);
FOLIO_PYTHON_ENUM(folio::SegmentMask);
FOLIO_PYTHON_ENUM(folio::CustomMaskScope);
FOLIO_PYTHON_ENUM(folio::Determinism);
FOLIO_PYTHON_ENUM(folio::Feature);
FOLIO_PYTHON_ENUM(folio::LseBase);
FOLIO_PYTHON_ENUM(folio::ScaleGranularity);

/// kUnset is None both ways; a parameter takes None where it says `.none()`.
template <>
struct nanobind::detail::type_caster<folio::DType> {
  NB_TYPE_CASTER(folio::DType, const_name<folio::DType>() + io_name(" | typing.Any", ""))

  bool from_python(handle source, uint32_t, cleanup_list* cleanup) noexcept {
    int64_t found = 0;
    const bool unset = source.is_none();
    if (!unset && !NB_CALL(enum_from_python)(NB_CTX_C(cleanup), &typeid(folio::DType), source.ptr(), &found, 0)) {
      return folio::python::find_dtype(source, value);
    }
    value = static_cast<folio::DType>(found);
    return true;
  }

  static handle from_cpp(folio::DType source, rv_policy, cleanup_list* cleanup) noexcept {
    if (source == folio::DType::kUnset) return none().release();
    return NB_CALL(enum_from_cpp)(NB_CTX_C(cleanup), &typeid(folio::DType), static_cast<int64_t>(source));
  }
};

template <>
struct nanobind::detail::type_caster<folio::Features> {
  NB_TYPE_CASTER(folio::Features,
                 const_name<folio::Feature>() + io_name(" | str | collections.abc.Iterable[Feature | str]", ""))

  bool from_python(handle source, uint32_t, cleanup_list*) noexcept {
    return folio::python::to_features(source, value);
  }

  static handle from_cpp(const folio::Features& source, rv_policy, cleanup_list* cleanup) noexcept {
    return NB_CALL(enum_from_cpp)(NB_CTX_C(cleanup), &typeid(folio::Feature), static_cast<int64_t>(source.bits));
  }
};

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "core/error.hpp"
#include "folio/backends/batch_order.hpp"

namespace folio::inline v0::backends {
namespace {

enum class Section : int32_t { kDecode = 0, kExtend = 1, kPrefill = 2 };

Section section_of(int32_t num_scheduled_tokens, int32_t num_computed_tokens, int32_t decode_threshold) {
  if (num_computed_tokens == 0) return Section::kPrefill;
  return num_scheduled_tokens <= decode_threshold ? Section::kDecode : Section::kExtend;
}

}  // namespace

bool reorder_batch_to_split_decodes_and_prefills(std::span<const int32_t> num_scheduled_tokens,
                                                 std::span<const int32_t> num_computed_tokens, int32_t decode_threshold,
                                                 const SwapStates& swap_states) {
  const auto num_reqs = static_cast<int32_t>(num_scheduled_tokens.size());
  core::require(num_computed_tokens.size() == num_scheduled_tokens.size(), "num_scheduled_tokens has ", num_reqs,
                " entries, num_computed_tokens ", num_computed_tokens.size());
  std::vector<Section> sections(num_scheduled_tokens.size());
  int32_t num_decodes = 0;
  int32_t num_extends = 0;
  for (size_t i = 0; i < sections.size(); ++i) {
    sections[i] = section_of(num_scheduled_tokens[i], num_computed_tokens[i], decode_threshold);
    num_decodes += sections[i] == Section::kDecode;
    num_extends += sections[i] == Section::kExtend;
  }

  // Requests that stand in a wrong section are dealt out, in the order of their sections, to the places they leave
  // free.
  std::vector<int32_t> places;
  for (int32_t i = 0; i < num_reqs; ++i) {
    const Section wanted = i < num_decodes                 ? Section::kDecode
                           : i < num_decodes + num_extends ? Section::kExtend
                                                           : Section::kPrefill;
    if (sections[static_cast<size_t>(i)] != wanted) places.push_back(i);
  }
  if (places.empty()) return false;
  std::vector<int32_t> sources = places;
  std::ranges::stable_sort(sources, {}, [&](int32_t i) { return sections[static_cast<size_t>(i)]; });

  std::unordered_map<int32_t, int32_t> destination;
  for (size_t k = 0; k < places.size(); ++k) destination[sources[k]] = places[k];
  // Each cycle of the permutation is walked from its first source: after swapping, the request that was displaced
  // stands at the source and is sent on to its own place.
  for (int32_t source : sources) {
    int32_t place = destination[source];
    while (place != source) {
      swap_states(source, place);
      const int32_t next = destination[place];
      destination[place] = place;
      place = next;
    }
    destination[source] = source;
  }
  return true;
}

SingleTokenReorder reorder_batch_single_token_decodes(std::span<const int32_t> num_scheduled_tokens,
                                                      const SwapStates& swap_states) {
  std::vector<int32_t> decodes;
  std::vector<int32_t> prefills;
  SingleTokenReorder result;
  for (size_t i = 0; i < num_scheduled_tokens.size(); ++i) {
    const bool is_decode = num_scheduled_tokens[i] == 1;
    (is_decode ? decodes : prefills).push_back(static_cast<int32_t>(i));
    (is_decode ? result.split.num_decode_tokens : result.split.num_prefill_tokens) += num_scheduled_tokens[i];
  }
  result.split.num_decodes = static_cast<int32_t>(decodes.size());
  result.split.num_prefills = static_cast<int32_t>(prefills.size());
  for (size_t i = 0; i < std::min(decodes.size(), prefills.size()); ++i) {
    const int32_t last_decode = decodes[decodes.size() - 1 - i];
    if (last_decode < result.split.num_decodes) break;
    swap_states(prefills[i], last_decode);
    result.modified = true;
  }
  return result;
}

}  // namespace folio::inline v0::backends

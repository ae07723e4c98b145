#include "replay/drafts.hpp"

#include "replay/mix.hpp"

namespace folio::replay {
namespace {

constexpr uint64_t kDraftTag = 0xd4;
constexpr uint64_t kRightOfTen = 7;  // drafts in ten that are right, about what published draft models reach

}  // namespace

void true_path(const DraftOptions& drafts, int32_t request, int32_t position, int32_t limit,
               std::vector<int32_t>& nodes) {
  nodes.assign(1, 0);
  while (static_cast<int32_t>(nodes.size()) < limit) {
    const auto at = static_cast<uint64_t>(position) + nodes.size();
    const uint64_t choice = mix(drafts.seed ^ kDraftTag, static_cast<uint64_t>(request), at);
    const auto which = static_cast<int32_t>((choice >> 32) % static_cast<uint64_t>(drafts.topk));
    const int64_t child = int64_t{nodes.back()} * drafts.topk + 1 + which;
    if (choice % 10 >= kRightOfTen || child >= drafts.tokens) return;
    nodes.push_back(static_cast<int32_t>(child));
  }
}

}  // namespace folio::replay

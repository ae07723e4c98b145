// Which steps of DcpAttention go over peer memory, and how large that is.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>

#include "core/checked_math.hpp"
#include "core/error.hpp"
#include "distributed/dcp_state.hpp"

namespace folio::inline v0::distributed {

DcpTransport dcp_transport_from_name(std::string_view name) {
  if (name == "auto") return DcpTransport::kAuto;
  if (name == "group") return DcpTransport::kGroup;
  core::require(name == "peer", "transport is '", name, "'; 'auto', 'group' and 'peer' are offered");
  return DcpTransport::kPeer;
}

std::string_view to_string(DcpTransport transport) {
  if (transport == DcpTransport::kPeer) return "peer";
  return transport == DcpTransport::kGroup ? "group" : "auto";
}

namespace {

/// Bytes of one token: of this rank's queries, and of the rows that one rank gets from one other.
struct TokenBytes {
  int64_t queries = 0;
  int64_t rows = 0;
};
TokenBytes token_bytes(const DcpState& state) {
  const AttentionConfig& config = state.config.attention;
  TokenBytes bytes;
  if (state.gathers())
    bytes.queries = core::checked_mul(int64_t{state.heads()}, int64_t{config.head_dim_qk}, int64_t{size_of(config.q)});
  const int64_t values = int64_t{config.head_dim_v} * size_of(state.partial_dtype());
  bytes.rows = core::checked_mul(int64_t{state.out_heads()}, values + int64_t{sizeof(float)});
  return bytes;
}

PeerSizes sizes_for(const DcpState& state, int32_t num_tokens) {
  const TokenBytes bytes = token_bytes(state);
  const int64_t world = state.group->size();
  PeerSizes sizes;
  if (state.gathers()) sizes.slopes = static_cast<size_t>(state.all_heads()) * sizeof(float);
  sizes.queries = static_cast<size_t>(core::checked_mul(world, int64_t{num_tokens}, bytes.queries));
  sizes.half = static_cast<size_t>(core::checked_mul(world, int64_t{num_tokens}, bytes.rows));
  return sizes;
}

/// The most tokens of a step that may go over peer memory.
int32_t most_tokens(const DcpState& state) {
  const TokenBytes bytes = token_bytes(state);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // kernels count words and rows in 31 bits
  int64_t most = kMost / std::max(bytes.queries, bytes.rows);
  if (state.config.transport == DcpTransport::kAuto) {
    most = std::min(most, kMostAutoPeerBytes / ((bytes.queries + bytes.rows) * (state.group->size() - 1)));
  }
  return static_cast<int32_t>(most);
}

/// Finds out, once, whether there can be peer memory.
void find_peers(DcpState& state) {
  DcpPeers& peers = state.peers;
  if (peers.known) return;
  peers.access = find_peers(*state.gpu(), *state.group);
  peers.known = true;
  if (peers.access.why_not.empty() && peers.access.shares_gpu && state.config.transport == DcpTransport::kAuto) {
    peers.access.why_not = "ranks share a GPU";
  }
}

void connect(DcpState& state, int32_t num_tokens, const PeerSizes& sizes) {
  DcpPeers& peers = state.peers;
  peers.memory = PeerMemory::connect(*state.gpu(), *state.group, peers.access, sizes, peers.access.why_not);
  peers.tokens = peers.memory == nullptr ? 0 : num_tokens;
}

/// Lets go of memory that kernels may still store to. Collective.
void release(DcpState& state, Stream stream) {
  std::exception_ptr failure;
  try {
    state.gpu()->synchronize(stream);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const Agreement all_waited{"could not finish its earlier steps", "is at another step"};
  agree(*state.group, state.records, 0, failure, all_waited);
  state.peers.memory->disconnect();
  agree(*state.group, state.records, 0, nullptr, all_waited);
  state.peers.memory = nullptr;
}

void require_peers(const DcpState& state) {
  if (state.config.transport != DcpTransport::kPeer || state.peers.access.why_not.empty()) return;
  core::fail(ErrorCode::kUnsupported, "transport is peer, and there is no peer memory: ", state.peers.access.why_not);
}

}  // namespace

void connect_peers(DcpState& state) {
  if (state.config.transport == DcpTransport::kGroup) return;
  find_peers(state);
  const int32_t tokens = std::min(state.config.bounds->max_tokens, most_tokens(state));
  if (tokens > 0 && state.peers.access.why_not.empty()) connect(state, tokens, sizes_for(state, tokens));
  require_peers(state);
}

bool plan_over_peers(DcpState& state, int32_t num_tokens, bool capturing, Stream stream) {
  if (state.config.transport == DcpTransport::kGroup || num_tokens == 0) return false;
  DcpPeers& peers = state.peers;
  const int32_t most = most_tokens(state);
  const bool forced = state.config.transport == DcpTransport::kPeer;
  if (num_tokens > most) {
    if (!forced) return false;
    core::fail(ErrorCode::kUnsupported, "transport is peer, for ", most, " tokens at most; this batch has ",
               num_tokens);
  }
  if (!capturing && !state.config.bounds) {
    find_peers(state);
    if (peers.access.why_not.empty() && peers.tokens < num_tokens) {
      const auto tokens =
          static_cast<int32_t>(std::min<int64_t>(most, std::max<int64_t>(num_tokens, int64_t{peers.tokens} * 2)));
      if (peers.memory != nullptr) release(state, stream);
      connect(state, tokens, sizes_for(state, tokens));
    }
    require_peers(state);
  }
  return peers.memory != nullptr && num_tokens <= peers.tokens;
}

}  // namespace folio::inline v0::distributed

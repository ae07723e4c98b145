#include "folio/distributed/pcp_tokens.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::distributed {
namespace {

void check_world(int32_t world) {
  core::require(world >= 1 && world <= (1 << 20), "world is ", world, "; it must be from 1 to ", 1 << 20);
}

void check_ranks(int32_t world, int32_t rank) {
  check_world(world);
  core::require(rank >= 0 && rank < world, "rank is ", rank, "; it must be in [0, ", world, ")");
}

int32_t requests_of(std::span<const int32_t> cu_q) {
  core::require(!cu_q.empty() && cu_q[0] == 0, "cu_q must begin with 0");
  for (size_t i = 1; i < cu_q.size(); ++i) {
    core::require(cu_q[i] >= cu_q[i - 1], "request ", i - 1, ": cu_q descends");
  }
  return core::checked_cast<int32_t>(cu_q.size() - 1);
}

PcpChunk chunk(int32_t q_len, int32_t world, int32_t number) {
  const int32_t chunks = 2 * world, shorter = q_len / chunks, longer = q_len % chunks;
  const auto begin_of = [&](int32_t c) { return c * shorter + std::min(c, longer); };
  return {begin_of(number), begin_of(number + 1)};
}

std::array<PcpChunk, 2> chunks_of(int32_t q_len, int32_t request, int32_t world, int32_t rank) {
  const auto pair = static_cast<int32_t>((int64_t{rank} + request) % world);
  return {chunk(q_len, world, pair), chunk(q_len, world, 2 * world - 1 - pair)};
}

/// Calls body(request, chunk) for a rank's chunks, in the order of its tokens.
template <typename Body>
void for_chunks(std::span<const int32_t> cu_q, int32_t world, int32_t rank, const Body& body) {
  for (size_t i = 0; i + 1 < cu_q.size(); ++i) {
    for (const PcpChunk& part : chunks_of(cu_q[i + 1] - cu_q[i], static_cast<int32_t>(i), world, rank)) body(i, part);
  }
}

int32_t num_tokens(std::span<const int32_t> cu_q, int32_t world, int32_t rank) {
  int32_t tokens = 0;
  for_chunks(cu_q, world, rank, [&](size_t, const PcpChunk& part) { tokens += part.size(); });
  return tokens;
}

}  // namespace

std::array<PcpChunk, 2> pcp_chunks(int32_t q_len, int32_t request, int32_t world, int32_t rank) {
  check_ranks(world, rank);
  core::require(q_len >= 0, "q_len is ", q_len, "; it must not be negative");
  core::require(request >= 0, "request is ", request, "; it must not be negative");
  return chunks_of(q_len, request, world, rank);
}

void pcp_local_cu_q(std::span<const int32_t> cu_q, int32_t world, int32_t rank, std::span<int32_t> local_cu_q) {
  check_ranks(world, rank);
  requests_of(cu_q);
  core::require(local_cu_q.size() == cu_q.size(), "local_cu_q has ", local_cu_q.size(), " entries; cu_q has ",
                cu_q.size());
  local_cu_q[0] = 0;
  for (size_t i = 0; i + 1 < cu_q.size(); ++i) {
    const auto parts = chunks_of(cu_q[i + 1] - cu_q[i], static_cast<int32_t>(i), world, rank);
    local_cu_q[i + 1] = local_cu_q[i] + parts[0].size() + parts[1].size();
  }
}

int32_t max_pcp_tokens(std::span<const int32_t> cu_q, int32_t world) {
  check_world(world);
  requests_of(cu_q);
  int32_t most = 0;
  for (int32_t rank = 0; rank < world; ++rank) most = std::max(most, num_tokens(cu_q, world, rank));
  return most;
}

void pcp_tokens(std::span<const int32_t> cu_q, int32_t world, int32_t rank, std::span<int32_t> tokens) {
  check_ranks(world, rank);
  requests_of(cu_q);
  const auto count = static_cast<size_t>(num_tokens(cu_q, world, rank));
  core::require(tokens.size() == count, "tokens has ", tokens.size(), " entries; rank ", rank, " has ", count,
                " tokens");
  size_t next = 0;
  for_chunks(cu_q, world, rank, [&](size_t i, const PcpChunk& part) {
    for (int32_t k = part.begin; k < part.end; ++k) tokens[next++] = cu_q[i] + k;
  });
}

void pcp_token_rows(std::span<const int32_t> cu_q, int32_t world, int32_t rows_per_rank, std::span<int32_t> rows) {
  check_world(world);
  requests_of(cu_q);
  core::require(rows.size() == static_cast<size_t>(cu_q.back()), "rows has ", rows.size(), " entries; cu_q has ",
                cu_q.back(), " tokens");
  const int32_t most = max_pcp_tokens(cu_q, world);
  core::require(rows_per_rank >= most, "rows_per_rank is ", rows_per_rank, "; some rank has ", most, " tokens");
  core::checked_cast<int32_t>(int64_t{world} * rows_per_rank);
  for (int32_t rank = 0; rank < world; ++rank) {
    int32_t row = rank * rows_per_rank;
    for_chunks(cu_q, world, rank, [&](size_t i, const PcpChunk& part) {
      for (int32_t k = part.begin; k < part.end; ++k) rows[static_cast<size_t>(int64_t{cu_q[i]} + k)] = row++;
    });
  }
}

}  // namespace folio::inline v0::distributed

#pragma once

#include <bit>
#include <cmath>
#include <functional>
#include <string>

#include "device_layers.hpp"

/// What tests of the engine backends' graphs share: random steps, and how outputs and errors are looked at.
namespace folio::cuda_test {

using Bits = std::vector<uint16_t>;

inline int32_t between(std::mt19937& random, int32_t low, int32_t high) {
  return std::uniform_int_distribution<int32_t>(low, high)(random);
}

/// What the backend replays: of FlashInfer decodes, each with as many drafts, padded with requests of length 0; of
/// FlashAttention any mix.
inline StepRequests random_requests(std::mt19937& random, bool uniform) {
  StepRequests requests;
  const int32_t count = between(random, 1, DeviceLayers::kRequests);
  const int32_t same = between(random, 0, 1) == 0 ? 1 : 3;
  int32_t room = DeviceLayers::kTokens - count;
  for (int32_t r = 0; r < count; ++r) {
    const int32_t more = uniform ? same - 1 : between(random, 0, between(random, 0, 1) == 0 ? 0 : room);
    room -= more;
    requests.query_lens.push_back(1 + more);
    requests.seq_lens.push_back(between(random, 1 + more, DeviceLayers::kMaxLen));
  }
  return requests;
}

/// The tokens of the captured batch, which FlashInfer's uniform ones reach by requests without tokens.
inline int32_t pad(StepRequests& requests, bool uniform) {
  if (!uniform) return (requests.num_tokens() + 7) / 8 * 8;
  const int32_t same = requests.query_lens.front();
  const size_t padded = std::bit_ceil(requests.query_lens.size());
  requests.query_lens.resize(padded, 0);
  requests.seq_lens.resize(padded, 0);
  return static_cast<int32_t>(padded) * same;
}

inline float furthest(const Bits& a, const Bits& b, size_t count) {
  float worst = 0.0f;
  for (size_t i = 0; i < count; ++i) {
    const float difference = std::abs(bfloat16_to_float(a[i]) - bfloat16_to_float(b[i]));
    if (!(difference <= worst)) worst = difference;  // a NaN stays
  }
  return worst;
}

inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

}  // namespace folio::cuda_test

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "folio/types/device.hpp"

/// On which CPUs a pool's threads run: what the OS tells of cores and memory nodes, and the order of threads.
namespace folio::inline v0::platform {

/// Where Linux describes CPUs and memory nodes.
inline constexpr const char* kSystemRoot = "/sys/devices/system";

/// The numbers of a list as the kernel writes it, "0-3,8\n": ascending. None for anything else.
std::optional<std::vector<int32_t>> parse_cpu_list(std::string_view text);

struct Cpu {
  int32_t number = 0;
  int32_t core = 0;  ///< the least number among the CPUs of its physical core
  int32_t node = 0;  ///< its memory node
};

/// What the files under `root` say of the CPUs `numbers`, in their order. Where a file is missing or odd, a CPU is a
/// core of its own, on node 0.
std::vector<Cpu> read_topology(std::span<const int32_t> numbers, const std::string& root = kSystemRoot);

/// CPUs of the machine that are online; 0: unknown.
int32_t online_cpus(const std::string& root = kSystemRoot);

/// CPUs for `num_threads` <= cpus.size() threads. Thread 0 is the caller, on `caller_cpu` if that is among them. One
/// thread a core comes before sibling threads, and the caller's node before others. Then threads are numbered node by
/// node, so that neighbouring threads share a node.
std::vector<int32_t> order_threads(std::span<const Cpu> cpus, int32_t caller_cpu, int32_t num_threads);

/// The CPU of each of a pool's threads, the caller first; empty: they are not pinned. `mask`: the process's CPUs.
/// Throws kInvalidArgument for kPinned with more threads than CPUs.
std::vector<int32_t> place_threads(int32_t num_threads, ThreadPinning pinning, std::span<const int32_t> mask,
                                   int32_t caller_cpu, const std::string& root = kSystemRoot);

}  // namespace folio::inline v0::platform

#include "platform/thread_placement.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <tuple>

#include "core/error.hpp"

namespace folio::inline v0::platform {
namespace {

/// No Linux build knows more.
constexpr int32_t kMaxCpus = 1 << 16;

/// The list in a file; none if it is missing or odd.
std::optional<std::vector<int32_t>> read_cpu_list(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  if (!std::getline(file, text, '\0')) return std::nullopt;
  return parse_cpu_list(text);
}

/// The least CPU of the core that `cpu` is part of.
int32_t read_core(const std::string& root, int32_t cpu) {
  const std::string topology = root + "/cpu/cpu" + std::to_string(cpu) + "/topology/";
  for (const char* name : {"core_cpus_list", "thread_siblings_list"}) {  // the second is what old kernels call it
    const std::optional<std::vector<int32_t>> siblings = read_cpu_list(topology + name);
    if (siblings && std::binary_search(siblings->begin(), siblings->end(), cpu)) return siblings->front();
  }
  return cpu;
}

void read_nodes(const std::string& root, std::vector<Cpu>& cpus) {
  const std::optional<std::vector<int32_t>> nodes = read_cpu_list(root + "/node/online");
  if (!nodes) return;
  for (const int32_t node : *nodes) {
    const std::optional<std::vector<int32_t>> local =
        read_cpu_list(root + "/node/node" + std::to_string(node) + "/cpulist");
    if (!local) continue;
    for (Cpu& cpu : cpus) {
      if (std::binary_search(local->begin(), local->end(), cpu.number)) cpu.node = node;
    }
  }
}

/// A number at the beginning of `text`, which loses it; -1 if there is none below kMaxCpus.
int32_t take_number(std::string_view& text) {
  int32_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || text.front() == '-' || number >= kMaxCpus) return -1;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace

std::optional<std::vector<int32_t>> parse_cpu_list(std::string_view text) {
  if (text.ends_with('\n')) text.remove_suffix(1);
  std::vector<int32_t> numbers;
  while (!text.empty()) {
    if (!numbers.empty()) {
      if (text.front() != ',') return std::nullopt;
      text.remove_prefix(1);
    }
    const int32_t first = take_number(text);
    if (first < 0 || (!numbers.empty() && first <= numbers.back())) return std::nullopt;
    int32_t last = first;
    if (text.starts_with('-')) {
      text.remove_prefix(1);
      last = take_number(text);
      if (last < first) return std::nullopt;
    }
    for (int32_t number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

std::vector<Cpu> read_topology(std::span<const int32_t> numbers, const std::string& root) {
  std::vector<Cpu> cpus;
  for (const int32_t number : numbers) cpus.push_back({number, read_core(root, number), 0});
  read_nodes(root, cpus);
  return cpus;
}

int32_t online_cpus(const std::string& root) {
  const std::optional<std::vector<int32_t>> online = read_cpu_list(root + "/cpu/online");
  return online ? static_cast<int32_t>(online->size()) : 0;
}

std::vector<int32_t> order_threads(std::span<const Cpu> cpus, int32_t caller_cpu, int32_t num_threads) {
  const auto own = std::find_if(cpus.begin(), cpus.end(), [&](const Cpu& cpu) { return cpu.number == caller_cpu; });
  const Cpu caller = own != cpus.end() ? *own : Cpu{};
  struct Place {
    int32_t sibling;  ///< how many CPUs of its core come before it
    // Nodes and CPUs are counted from the caller's on, round about. Callers of other processes run elsewhere, so their
    // first threads do too.
    bool node_below;
    int32_t node;
    bool cpu_below;
    int32_t cpu;
    int32_t core;
  };
  std::vector<Place> places;
  for (const Cpu& cpu : cpus) {
    places.push_back({0, cpu.node < caller.node, cpu.node, cpu.number < caller.number, cpu.number, cpu.core});
  }
  const auto by_cpu = [](const Place& place) { return std::tuple(place.cpu_below, place.cpu); };
  std::sort(places.begin(), places.end(), [&](const Place& a, const Place& b) {
    return std::tuple(a.core, a.cpu != caller.number, a.cpu) < std::tuple(b.core, b.cpu != caller.number, b.cpu);
  });
  for (size_t i = 1; i < places.size(); ++i) {
    if (places[i].core == places[i - 1].core) places[i].sibling = places[i - 1].sibling + 1;
  }
  const auto by_node = [](const Place& place) { return std::tuple(place.node_below, place.node); };
  std::sort(places.begin(), places.end(), [&](const Place& a, const Place& b) {
    return std::tuple(a.sibling, by_node(a), by_cpu(a)) < std::tuple(b.sibling, by_node(b), by_cpu(b));
  });
  places.resize(static_cast<size_t>(num_threads));
  std::sort(places.begin(), places.end(), [&](const Place& a, const Place& b) {
    return std::tuple(by_node(a), a.sibling, by_cpu(a)) < std::tuple(by_node(b), b.sibling, by_cpu(b));
  });
  std::vector<int32_t> order;
  order.reserve(places.size());
  for (const Place& place : places) order.push_back(place.cpu);
  return order;
}

std::vector<int32_t> place_threads(int32_t num_threads, ThreadPinning pinning, std::span<const int32_t> mask,
                                   int32_t caller_cpu, const std::string& root) {
  const auto num_cpus = static_cast<int32_t>(mask.size());
  switch (pinning) {
    case ThreadPinning::kUnpinned: return {};
    case ThreadPinning::kAutomatic:
      if (num_threads != num_cpus) return {};
      // CPUs of the whole machine are everyone's: another process may be on any of them.
      if (num_cpus >= online_cpus(root)) return {};
      break;
    case ThreadPinning::kPinned:
      core::require(num_threads <= num_cpus, "pinning of ", num_threads, " threads, where the process may run on ",
                    num_cpus, " CPUs");
      break;
    default:
      core::fail(ErrorCode::kInvalidArgument, "pinning is ", static_cast<int32_t>(pinning), "; 0 to 2 are known");
  }
  return order_threads(read_topology(mask, root), caller_cpu, num_threads);
}

}  // namespace folio::inline v0::platform

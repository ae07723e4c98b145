#include "platform/thread_placement.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "core/expect_refused_test_util.hpp"

namespace folio::platform {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Numbers = std::vector<int32_t>;

/// A directory like /sys/devices/system.
class EmulatedMachine {
 public:
  EmulatedMachine() {
    std::string name = (std::filesystem::temp_directory_path() / "folio-machine-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) root_ = name;
  }
  ~EmulatedMachine() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  EmulatedMachine(const EmulatedMachine&) = delete;
  EmulatedMachine& operator=(const EmulatedMachine&) = delete;

  EmulatedMachine& write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(root_) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return *this;
  }
  EmulatedMachine& core(const Numbers& cpus, const char* file = "core_cpus_list") {
    std::string list;
    for (const int32_t cpu : cpus) list += (list.empty() ? "" : ",") + std::to_string(cpu);
    for (const int32_t cpu : cpus) write("cpu/cpu" + std::to_string(cpu) + "/topology/" + file, list + "\n");
    return *this;
  }
  const std::string& root() const { return root_; }

 private:
  std::string root_;
};

/// Two nodes of four cores with two threads each: CPUs 0-3 and 8-11 on node 0, 4-7 and 12-15 on node 1.
EmulatedMachine& two_nodes() {
  static EmulatedMachine machine;
  static const bool written = [] {
    machine.write("cpu/online", "0-15\n").write("node/online", "0-1\n");
    machine.write("node/node0/cpulist", "0-3,8-11\n").write("node/node1/cpulist", "4-7,12-15\n");
    for (int32_t core = 0; core < 8; ++core) machine.core({core, core + 8});
    return true;
  }();
  EXPECT_TRUE(written);
  return machine;
}

Numbers up_to(int32_t n) {
  Numbers numbers;
  for (int32_t i = 0; i < n; ++i) numbers.push_back(i);
  return numbers;
}

Numbers order(const EmulatedMachine& machine, const Numbers& mask, int32_t caller, int32_t threads) {
  return place_threads(threads, ThreadPinning::kPinned, mask, caller, machine.root());
}

TEST(CpuList, Parses) {
  EXPECT_EQ(parse_cpu_list("0\n"), (Numbers{0}));
  EXPECT_EQ(parse_cpu_list("0-3,8,10-11\n"), (Numbers{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cpu_list("7"), (Numbers{7}));
  EXPECT_EQ(parse_cpu_list("65535"), (Numbers{65535}));
  EXPECT_EQ(parse_cpu_list("\n"), Numbers{}) << "a memory node without CPUs";
  for (const char* odd : {"a",
                          "-1",
                          "1-",
                          "1-0",
                          "0,",
                          ",0",
                          "0,,1",
                          "0 1",
                          "0-3,2",
                          "1,1",
                          "0x1",
                          "+1",
                          "0-3:2/4",
                          "0\n\n",
                          "65536",
                          "0-65536",
                          "99999999999999999999",
                          "0-99999999999999999999",
                          "--1",
                          "0--1",
                          " 0"}) {
    EXPECT_EQ(parse_cpu_list(odd), std::nullopt) << odd;
  }
}

TEST(CpuList, AnyTextIsAscendingNumbersOrNothing) {
  std::mt19937 random(7);
  const std::string letters = "0123456789,,--\n x";
  int32_t parsed = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (size_t length = random() % 9; length > 0; --length) text += letters[random() % letters.size()];
    const std::optional<Numbers> numbers = parse_cpu_list(text);
    if (!numbers) continue;
    ++parsed;
    for (size_t n = 0; n < numbers->size(); ++n) {
      ASSERT_GE((*numbers)[n], n == 0 ? 0 : (*numbers)[n - 1] + 1) << text;
      ASSERT_LT((*numbers)[n], 1 << 16) << text;
    }
  }
  EXPECT_GT(parsed, 1000);
}

TEST(Topology, KnowsCoresAndNodes) {
  const Numbers mask{1, 4, 9, 12};
  EXPECT_EQ(online_cpus(two_nodes().root()), 16);
  Numbers numbers, cores, nodes;
  for (const Cpu& cpu : read_topology(mask, two_nodes().root())) {
    numbers.push_back(cpu.number);
    cores.push_back(cpu.core);
    nodes.push_back(cpu.node);
  }
  EXPECT_EQ(numbers, mask);
  EXPECT_THAT(cores, ElementsAre(1, 4, 1, 4));
  EXPECT_THAT(nodes, ElementsAre(0, 1, 0, 1));
}

TEST(Topology, OldKernelsNameSiblingsOtherwise) {
  EmulatedMachine machine;
  machine.core({0, 1}, "thread_siblings_list");
  EXPECT_EQ(read_topology(Numbers{1}, machine.root())[0].core, 0);
}

TEST(Topology, MissingAndOddFilesSayNothing) {
  EmulatedMachine machine;
  const auto plain = [&](const char* what) {
    EXPECT_EQ(online_cpus(machine.root()), 0) << what;
    const std::vector<Cpu> cpus = read_topology(Numbers{0, 5}, machine.root());
    ASSERT_EQ(cpus.size(), 2u);
    for (const Cpu& cpu : cpus) {
      EXPECT_EQ(cpu.core, cpu.number) << what;
      EXPECT_EQ(cpu.node, 0) << what;
    }
  };
  plain("nothing there");
  machine.write("cpu/online", "").write("node/online", "");
  machine.write("cpu/cpu5/topology/core_cpus_list", "");
  plain("empty files");
  machine.write("cpu/online", "0-5,").write("node/online", "1-0");
  machine.write("cpu/cpu5/topology/core_cpus_list", "garbage");
  plain("odd files");
  machine.write("node/online", "0-1").write("node/node1/cpulist", std::string("5\0", 2) + "-");
  machine.write("cpu/cpu5/topology/core_cpus_list", "0-4");
  machine.write("cpu/cpu0/topology/core_cpus_list/a", "a directory");
  const std::vector<Cpu> cpus = read_topology(Numbers{0, 5}, machine.root());
  EXPECT_EQ(cpus[1].core, 5) << "a core that the CPU is not part of";
  EXPECT_EQ(cpus[0].core, 0);
  EXPECT_EQ(cpus[0].node, 0) << "in no node's list";
}

TEST(OrderThreads, CoresComeBeforeSiblingsAndNodesStayTogether) {
  EXPECT_EQ(order(two_nodes(), up_to(16), 0, 16), (Numbers{0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15}));
  EXPECT_EQ(order(two_nodes(), up_to(16), 0, 8), up_to(8)) << "no sibling while a core is free";
  EXPECT_EQ(order(two_nodes(), up_to(16), 0, 10), (Numbers{0, 1, 2, 3, 8, 9, 4, 5, 6, 7}));
  EXPECT_EQ(order(two_nodes(), up_to(16), 0, 3), (Numbers{0, 1, 2}));
}

TEST(OrderThreads, BeginsWhereTheCallerIs) {
  EXPECT_EQ(order(two_nodes(), up_to(16), 6, 8), (Numbers{6, 7, 4, 5, 0, 1, 2, 3}));
  EXPECT_EQ(order(two_nodes(), up_to(16), 2, 3), (Numbers{2, 3, 0}));
  const Numbers of_sibling = order(two_nodes(), up_to(16), 13, 8);
  EXPECT_EQ(of_sibling.front(), 13) << "the caller is its core's thread";
  EXPECT_EQ(std::count(of_sibling.begin(), of_sibling.end(), 5), 0);
  EXPECT_EQ(order(two_nodes(), up_to(4), 6, 4), up_to(4)) << "a caller outside";
}

TEST(OrderThreads, TakesEveryCpuOnceAndTheFewestSiblings) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    Numbers mask;
    for (int32_t cpu = 0; cpu < 16; ++cpu) {
      if (random() % 2 == 0) mask.push_back(cpu);
    }
    if (mask.empty()) continue;
    const auto threads = static_cast<int32_t>(random() % mask.size() + 1);
    const Numbers cpus = order(two_nodes(), mask, static_cast<int32_t>(random() % 16), threads);
    ASSERT_EQ(cpus.size(), static_cast<size_t>(threads));
    Numbers sorted = cpus;
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end());
    EXPECT_TRUE(std::includes(mask.begin(), mask.end(), sorted.begin(), sorted.end()));
    const auto cores_of = [](const Numbers& numbers) {
      uint32_t cores = 0;
      for (const int32_t cpu : numbers) cores |= 1u << cpu % 8;
      return std::popcount(cores);
    };
    EXPECT_EQ(cores_of(cpus), std::min(threads, cores_of(mask)));
    int changes = 0;
    for (size_t i = 1; i < cpus.size(); ++i) changes += cpus[i] / 4 % 2 != cpus[i - 1] / 4 % 2 ? 1 : 0;
    EXPECT_LE(changes, 1) << "threads of a node have neighbouring numbers";
  }
}

TEST(PlaceThreads, AutomaticPinsAllOfANarrowMask) {
  const auto automatic = [](int32_t threads, const Numbers& mask) {
    return place_threads(threads, ThreadPinning::kAutomatic, mask, 0, two_nodes().root());
  };
  EXPECT_THAT(automatic(4, up_to(4)), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(automatic(3, up_to(4)), IsEmpty()) << "another pool may have the rest";
  EXPECT_THAT(automatic(5, up_to(4)), IsEmpty());
  EXPECT_THAT(automatic(16, up_to(16)), IsEmpty()) << "the whole machine is everyone's";
  EXPECT_THAT(automatic(15, up_to(15)), ::testing::SizeIs(15));
  EXPECT_THAT(place_threads(4, ThreadPinning::kAutomatic, up_to(4), 0, "/nonexistent"), IsEmpty())
      << "of a machine of unknown size";
}

TEST(PlaceThreads, OfflineCpusAreNoPartOfTheMachine) {
  EmulatedMachine machine;  // CPU 2 is offline: it has no topology, and no mask has it
  machine.write("cpu/online", "0-1,3\n").write("node/online", "0\n").write("node/node0/cpulist", "0-1,3\n");
  const Numbers all{0, 1, 3};
  EXPECT_THAT(place_threads(3, ThreadPinning::kAutomatic, all, 0, machine.root()), IsEmpty());
  EXPECT_THAT(place_threads(3, ThreadPinning::kPinned, all, 1, machine.root()), ElementsAre(1, 3, 0));
}

TEST(PlaceThreads, DoesAsItIsTold) {
  EXPECT_THAT(place_threads(4, ThreadPinning::kUnpinned, up_to(4), 0, two_nodes().root()), IsEmpty());
  EXPECT_THAT(place_threads(9, ThreadPinning::kUnpinned, up_to(4), 0, two_nodes().root()), IsEmpty());
  EXPECT_THAT(place_threads(2, ThreadPinning::kPinned, up_to(16), 0, two_nodes().root()), ElementsAre(0, 1));
  folio::testing::expect_refused("pinning of 5 threads, where the process may run on 4 CPUs",
                                 [] { place_threads(5, ThreadPinning::kPinned, up_to(4), 0, two_nodes().root()); });
  folio::testing::expect_refused("pinning is 3; 0 to 2 are known", [] {
    place_threads(1, static_cast<ThreadPinning>(3), up_to(4), 0, two_nodes().root());
  });
}

}  // namespace
}  // namespace folio::platform

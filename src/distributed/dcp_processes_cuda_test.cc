// Peer memory between processes of one host (CUDA IPC). The program starts itself once for each rank; what ranks tell
// each other on the host goes through a file that all of them map.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "distributed/dcp_steps_test_util.hpp"

namespace folio::distributed::testing {
namespace {

constexpr int32_t kWorld = 2;
constexpr const char* kRank = "FOLIO_TEST_RANK";
constexpr const char* kFile = "FOLIO_TEST_FILE";
constexpr std::chrono::seconds kLongest(60);

/// What the ranks' processes map.
struct Board {
  static constexpr size_t kMessage = 1024;
  std::atomic<uint32_t> arrived{0};  ///< at any meeting so far
  std::byte messages[kWorld][kMessage]{};
};

/// A group of processes that can only talk to each other on the host: over peer memory that is all it takes.
class BoardGroup final : public ProcessGroup {
 public:
  BoardGroup(Board& board, int32_t rank, Device device, std::chrono::milliseconds timeout)
      : board_(board), rank_(rank), device_(device), timeout_(timeout) {}
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return kWorld; }
  Device device() const noexcept override { return device_; }
  std::chrono::milliseconds timeout() const noexcept override { return timeout_; }
  void all_gather_host(const void* send, void* recv, size_t bytes) override {
    if (bytes > Board::kMessage) throw std::runtime_error("the message is too long");
    std::memcpy(board_.messages[rank_], send, bytes);
    meet();
    for (int32_t r = 0; r < kWorld; ++r) {
      std::memcpy(static_cast<std::byte*>(recv) + static_cast<size_t>(r) * bytes, board_.messages[r], bytes);
    }
    meet();
  }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void meet() {
    target_ += kWorld;
    board_.arrived.fetch_add(1);
    const auto begin = std::chrono::steady_clock::now();
    while (board_.arrived.load() < target_) {
      if (std::chrono::steady_clock::now() - begin > kLongest) throw std::runtime_error("the other process is gone");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  void all_gather(const void*, void*, size_t, Stream) override { refuse(); }
  void all_to_all(const void*, void*, size_t, Stream) override { refuse(); }
  void all_reduce_sum(float*, size_t, Stream) override { refuse(); }
  void reduce_scatter_sum(const float*, float*, size_t, Stream) override { refuse(); }
  void barrier(Stream) override { refuse(); }
  void fail(std::string_view) noexcept override {}

 private:
  [[noreturn]] static void refuse() { throw std::runtime_error("the group's operation was called"); }

  Board& board_;
  int32_t rank_;
  Device device_;
  std::chrono::milliseconds timeout_;
  uint32_t target_ = 0;
};

DcpSetup setup_of_processes() {
  DcpSetup setup = small_setup();
  setup.world = kWorld;
  setup.alibi = true;
  setup.requests = {{37, 1}, {20, 3}, {9, 9}};
  return setup;
}

/// Runs in a process of its own; other runs of the program skip it.
TEST(DcpRankProcess, Body) {
  const char* const rank_text = std::getenv(kRank);
  if (rank_text == nullptr) GTEST_SKIP() << "DcpProcessesOnGpu starts it";
  const int32_t rank = std::atoi(rank_text);
  void* const mapped =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, std::atoi(std::getenv(kFile)), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  int count = 0;
  check(cudaGetDeviceCount(&count));
  check(cudaSetDevice(rank % count));
  const Context context = Context::cuda(rank % count);
  // Two processes share one GPU, whose time is sliced.
  BoardGroup group(*static_cast<Board*>(mapped), rank, context.device(), std::chrono::seconds(20));
  DcpCase whole(setup_of_processes());
  DcpConfig config = whole.config();
  config.transport = DcpTransport::kPeer;
  {
    DcpAttention attention(context, group, config);
    TestStream stream;
    DeviceRank memory(whole, rank);
    memory.load(whole);
    const DcpPlan plan = attention.plan(whole.batch(), stream.get());
    ASSERT_TRUE(plan.over_peer_memory);
    DeviceMemory scratch(attention.workspace_size(plan));
    group.meet();
    for (int32_t layer = 0; layer < 5; ++layer) {
      attention.run(plan, memory.args(), scratch.workspace(), stream.get());
    }
    stream.wait();
    memory.store(whole, attention);
    EXPECT_NO_THROW(attention.check());
    EXPECT_EQ(whole.wrong_output(rank), "");
    group.meet();
  }
  {
    group.set_timeout(std::chrono::milliseconds(500));
    DcpAttention attention(context, group, config);
    TestStream stream;
    DeviceRank memory(whole, rank);
    memory.load(whole);
    const DcpPlan plan = attention.plan(whole.batch(), stream.get());
    DeviceMemory scratch(attention.workspace_size(plan));
    group.meet();
    if (rank == 0) {
      attention.run(plan, memory.args(), scratch.workspace(), stream.get());
      stream.wait();
      expect_error(ErrorCode::kUnavailable, "rank 1 of the group did not come", [&] { attention.check(); });
    }
    group.meet();
  }
}

TEST(DcpProcessesOnGpu, ShareMemory) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
  const int file = memfd_create("board", 0);
  ASSERT_GE(file, 0);
  ASSERT_EQ(ftruncate(file, sizeof(Board)), 0);
  std::vector<pid_t> processes;
  for (int32_t rank = 0; rank < kWorld; ++rank) {
    const std::string of_rank = std::to_string(rank), of_file = std::to_string(file);
    const pid_t process = fork();
    ASSERT_GE(process, 0);
    if (process == 0) {
      setenv(kRank, of_rank.c_str(), 1);
      setenv(kFile, of_file.c_str(), 1);
      execl("/proc/self/exe", "folio_distributed_processes_cuda_test", "--gtest_filter=DcpRankProcess.Body", nullptr);
      _exit(127);
    }
    processes.push_back(process);
  }
  for (const pid_t process : processes) {
    int status = -1;
    ASSERT_EQ(waitpid(process, &status, 0), process);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "a rank's process failed: " << status;
  }
  close(file);
}

}  // namespace
}  // namespace folio::distributed::testing

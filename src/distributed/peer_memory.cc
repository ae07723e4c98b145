#include "distributed/peer_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "core/checked_math.hpp"
#include "core/error.hpp"

namespace folio::inline v0::distributed {

using kernels::cuda::PeerFault;
using kernels::cuda::PeerMemoryLayout;

namespace {

template <typename Message>
std::vector<Message> gather(ProcessGroup& group, const Message& mine) {
  std::vector<Message> all(static_cast<size_t>(group.size()));
  group.all_gather_host(&mine, all.data(), sizeof(mine));
  return all;
}

uint64_t digest_of_text(const std::string& text) {
  uint64_t digest = 0xcbf29ce484222325u;
  for (const char c : text) digest = (digest ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return digest;
}

std::string first_line(const char* path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

/// Containers of one host have the same; whether one of them can open the other's memory is found out by opening it.
uint64_t this_host() {
  std::string boot = first_line("/proc/sys/kernel/random/boot_id");
  if (boot.empty()) {
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) == 0) boot = name;
  }
  return digest_of_text(boot);
}

/// Process numbers alone repeat from container to container, and what was drawn once is a fork's too. The kernel has
/// another uuid at every read; std::random_device would ask for a newer glibc than wheels do.
uint64_t this_process() {
  static const uint64_t drawn = digest_of_text(first_line("/proc/sys/kernel/random/uuid"));
  return drawn ^ (static_cast<uint64_t>(getpid()) * 0x9e3779b97f4a7c15u);
}

/// Memory that a rank shows the ranks of its process while they connect: they hold it too, so that nobody writes to
/// freed memory, whoever ends first.
class Shown {
 public:
  explicit Shown(const std::shared_ptr<void>& memory) {
    const std::lock_guard lock(table().mutex);
    number_ = ++table().last;
    table().memory[number_] = memory;
  }
  ~Shown() {
    const std::lock_guard lock(table().mutex);
    table().memory.erase(number_);
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;
  uint64_t number() const { return number_; }

  /// Null where the rank has taken it back.
  static std::shared_ptr<void> at(uint64_t number) {
    const std::lock_guard lock(table().mutex);
    const auto found = table().memory.find(number);
    return found == table().memory.end() ? nullptr : found->second;
  }

 private:
  struct Table {
    std::mutex mutex;
    uint64_t last = 0;
    std::map<uint64_t, std::shared_ptr<void>> memory;
  };
  static Table& table() {
    static Table all;
    return all;
  }
  uint64_t number_ = 0;
};

/// A rank's memory as it is offered to the others.
struct Offer {
  uint64_t made = 0;    ///< 1: there is memory
  uint64_t number = 0;  ///< Shown
  uint64_t is_named = 0;
  attention::GpuMemoryName name{};
};

/// Control words are apart from what is exchanged, and what is exchanged begins where anything can.
PeerMemoryLayout lay_out(int32_t world, int32_t grid, const PeerSizes& sizes) {
  constexpr size_t kAlignment = 256;
  PeerMemoryLayout layout;
  layout.world = world;
  layout.grid = grid;
  const auto take = [&layout](size_t bytes) {
    const size_t begin = layout.total;
    layout.total = core::checked_add(begin, core::checked_round_up(bytes, kAlignment));
    return begin;
  };
  const auto ctas = static_cast<size_t>(grid), ranks = static_cast<size_t>(world);
  layout.fault = take(sizeof(PeerFault));
  layout.counters = take(ctas * sizeof(uint32_t));
  layout.flags = take(ranks * ctas * sizeof(uint32_t));
  layout.headers = take(ranks * static_cast<size_t>(PeerMemoryLayout::kHeaderStride));
  layout.slopes = take(sizes.slopes);
  layout.queries = take(sizes.queries);
  for (size_t& half : layout.halves) half = take(sizes.half);
  // Other processes see whole blocks of the driver's, in which nothing else should lie.
  constexpr size_t kBlock = size_t{2} << 20;
  layout.total = core::checked_round_up(layout.total, kBlock);
  return layout;
}

}  // namespace

PeerSizes PeerSizes::with(const PeerSizes& other) const {
  return {std::max(slopes, other.slopes), std::max(queries, other.queries), std::max(half, other.half)};
}

PeerAccess find_peers(const attention::GpuBackend& gpu, ProcessGroup& group) {
  PeerAccess access;
  const int32_t world = group.size();
  if (world > kernels::cuda::kMostPeers) {
    access.why_not = core::message("the group has ", world, " ranks, more than ", kernels::cuda::kMostPeers);
    return access;
  }
  access.records = gather(group, PeerRecord{group.rank(), this_host(), this_process(), gpu.identity(), gpu.num_sms()});
  const std::vector<PeerRecord>& records = access.records;
  int64_t grid = records[0].num_sms;
  for (int32_t r = 0; r < world; ++r) {
    const PeerRecord& record = records[static_cast<size_t>(r)];
    if (record.rank != r) {
      access.why_not = core::message("the group does not bring what rank ", r, " sends: a simulated one cannot");
      return access;
    }
    if (record.host != records[0].host) {
      access.why_not = core::message("rank ", r, " is on another host than rank 0");
      return access;
    }
    const auto on_this_gpu =
        std::count_if(records.begin(), records.end(), [&](const PeerRecord& other) { return other.gpu == record.gpu; });
    access.shares_gpu = access.shares_gpu || on_this_gpu > 1;
    grid = std::min<int64_t>(grid, record.num_sms / on_this_gpu);
  }
  access.grid = static_cast<int32_t>(std::max<int64_t>(grid, 1));
  // Ranks of other processes are found out by opening their memory.
  const PeerRecord& mine = records[static_cast<size_t>(group.rank())];
  int64_t beyond = -1;
  for (int32_t r = 0; r < world && beyond < 0; ++r) {
    const PeerRecord& other = records[static_cast<size_t>(r)];
    if (other.process == mine.process && !gpu.reach(other.gpu)) beyond = r;
  }
  const std::vector<int64_t> all = gather(group, beyond);
  for (int32_t r = 0; r < world && access.why_not.empty(); ++r) {
    const int64_t other = all[static_cast<size_t>(r)];
    if (other >= 0) access.why_not = core::message("the GPU of rank ", r, " cannot reach the memory of rank ", other);
  }
  return access;
}

std::unique_ptr<PeerMemory> PeerMemory::connect(const attention::GpuBackend& gpu, ProcessGroup& group,
                                                const PeerAccess& access, const PeerSizes& sizes,
                                                std::string& why_not) {
  const int32_t world = group.size(), rank = group.rank();
  std::unique_ptr<PeerMemory> made(new PeerMemory);
  made->sizes_ = sizes;
  kernels::cuda::PeerRanks& ranks = made->ranks_;
  ranks.layout = lay_out(world, access.grid, sizes);
  ranks.rank = rank;
  ranks.timeout = static_cast<uint64_t>(std::chrono::nanoseconds(group.timeout()).count());
  Offer mine;
  try {
    const std::shared_ptr<void> page_locked = gpu.allocate_page_locked(sizeof(PeerFault));
    made->fault_ = {page_locked, new (page_locked.get()) PeerFault};
    ranks.fault = made->fault_.get();
    made->memory_.push_back(gpu.allocate(ranks.layout.total));
    const std::vector<std::byte> zeros(ranks.layout.headers);
    gpu.upload(made->memory_[0].get(), zeros.data(), zeros.size(), {});
    gpu.synchronize({});
    mine.made = 1;
    if (const auto name = gpu.name_memory(made->memory_[0].get())) {
      mine.is_named = 1;
      mine.name = *name;
    }
  } catch (const std::exception&) {  // said by the offer
    made->memory_.resize(1);
  }
  const Shown shown(made->memory_[0]);
  mine.number = shown.number();
  const std::vector<Offer> offers = gather(group, mine);
  int64_t beyond = -1;
  for (int32_t r = 0; r < world && beyond < 0; ++r) {
    const Offer& offer = offers[static_cast<size_t>(r)];
    const PeerRecord& record = access.records[static_cast<size_t>(r)];
    const bool same_process = record.process == access.records[static_cast<size_t>(rank)].process;
    std::shared_ptr<void> memory;
    if (r == rank) {
      memory = made->memory_[0];
    } else if (offer.made == 1 && same_process) {
      memory = Shown::at(offer.number);
    } else if (offer.made == 1 && offer.is_named == 1) {
      memory = gpu.open_memory(offer.name);
    }
    ranks.memory[r] = static_cast<std::byte*>(memory.get());
    if (memory == nullptr) {
      beyond = r;
    } else if (r != rank) {
      made->memory_.push_back(std::move(memory));
    }
  }
  const std::vector<int64_t> all = gather(group, beyond);
  for (int32_t r = 0; r < world; ++r) {
    const int64_t other = all[static_cast<size_t>(r)];
    if (other < 0) continue;
    why_not = offers[static_cast<size_t>(other)].made == 1
                  ? core::message("rank ", r, " cannot open the memory of rank ", other)
                  : core::message("rank ", other, " has no memory for it: ", ranks.layout.total, " bytes");
    return nullptr;
  }
  return made;
}

namespace {

std::string text_of(const PeerFault& fault, const ProcessGroup& group) {
  if (fault.missing() == fault.reporter()) {
    return core::message("rank ", fault.missing(), " of the group threw while it enqueued a layer over peer memory");
  }
  return core::message(
      "rank ", fault.missing(), " of the group did not come to an exchange over peer memory within the ",
      static_cast<int64_t>(group.timeout().count()), " ms that rank ", fault.reporter(), " waited for it");
}

}  // namespace

void PeerMemory::report(ProcessGroup& group) const {
  const PeerFault found{std::atomic_ref(fault_->word).load(std::memory_order_acquire)};
  if (found.word == 0) return;
  const std::string what = text_of(found, group);
  group.fail(what);
  throw Error(ErrorCode::kUnavailable, what);
}

void PeerMemory::abandon(const attention::GpuBackend& gpu, ProcessGroup& group, Stream stream) const noexcept {
  const PeerFault mine = PeerFault::of(ranks_.rank, ranks_.rank);
  try {
    if (gpu.is_capturing(stream)) return;
    group.fail(text_of(mine, group));
    uint32_t none = 0;
    std::atomic_ref(fault_->word).compare_exchange_strong(none, mine.word);  // the first fault stays
    for (int32_t r = 0; r < ranks_.layout.world; ++r) {
      gpu.upload(ranks_.memory[r] + ranks_.layout.fault, &mine, sizeof(mine), stream);
    }
  } catch (const std::exception&) {  // a GPU that takes no copies: the others find out when their time is up
  }
}

}  // namespace folio::inline v0::distributed

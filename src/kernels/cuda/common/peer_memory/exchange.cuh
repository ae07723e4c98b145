#pragma once

#include "kernels/cuda/common/peer_memory/peer_memory.hpp"
#include "ptx/system.cuh"

namespace folio::inline v0::kernels::cuda {

/// One exchange of a CTA with the CTAs of the same number on the other ranks. Every exchange has a number, which each
/// CTA counts by itself, so that a graph may be replayed: nothing of it is the host's.
///
/// A kernel that makes one: stores to the peers, calls meet, and reads what they stored. It has no static shared memory
/// across meet, and every rank launches it with layout.grid CTAs, which all run at once.
class PeerExchange {
 public:
  __device__ explicit PeerExchange(const PeerRanks& ranks)
      : ranks_(ranks),
        cta_(blockIdx.x),
        number_(own<uint32_t>(ranks.layout.counters)[cta_] + 1),
        earlier_fault_(own<volatile uint32_t>(ranks.layout.fault)[0]) {}

  __device__ uint32_t number() const { return number_; }

  /// Every thread of the CTA calls once, after its stores. True: what the same CTAs of all ranks stored is here.
  __device__ bool meet() {
    __syncthreads();  // the CTA's stores stand before each flag
    const auto peer = static_cast<int32_t>(threadIdx.x);
    const PeerMemoryLayout& layout = ranks_.layout;
    if (peer == ranks_.rank) own<uint32_t>(layout.counters)[cta_] = number_;
    bool came = true;
    if (peer < layout.world && peer != ranks_.rank) {
      ptx::st_release_system(flag(peer, ranks_.rank), number_);
      came = wait_for(peer);
    }
    return __syncthreads_and(came ? 1 : 0) != 0;
  }

 private:
  template <typename T>
  __device__ T* own(size_t offset) const {
    return reinterpret_cast<T*>(ranks_.memory[ranks_.rank] + offset);
  }
  /// What rank `from` tells this CTA of rank `to`.
  __device__ uint32_t* flag(int32_t to, int32_t from) const {
    return reinterpret_cast<uint32_t*>(ranks_.memory[to] + ranks_.layout.flags) + from * ranks_.layout.grid + cta_;
  }

  /// Whether the peer's part is here. It is not after a fault: ranks that have waited for one in vain do not wait
  /// again.
  __device__ bool wait_for(int32_t peer) const {
    constexpr uint32_t kLooksAtFlag = 32;  // for each at the clock, which is slow
    uint32_t* const fault = &own<PeerFault>(ranks_.layout.fault)->word;
    const uint32_t* const there = flag(ranks_.rank, peer);
    const uint64_t begin = ptx::global_timer();
    uint32_t reported = earlier_fault_;
    for (;;) {
      if (reported != 0) {
        tell_host({reported});
        return false;
      }
      for (uint32_t i = 0; i < kLooksAtFlag; ++i) {
        if (static_cast<int32_t>(ptx::ld_acquire_system(there) - number_) >= 0) return true;
        ptx::wait_for_other_grids();
      }
      if (ptx::global_timer() - begin > ranks_.timeout) break;
      reported = ptx::ld_acquire_system(fault);
    }
    const PeerFault found = PeerFault::of(peer, ranks_.rank);
    for (int32_t r = 0; r < ranks_.layout.world; ++r) {
      ptx::st_release_system(&reinterpret_cast<PeerFault*>(ranks_.memory[r] + ranks_.layout.fault)->word, found.word);
    }
    tell_host(found);
    return false;
  }

  /// The first fault stays.
  __device__ void tell_host(PeerFault found) const {
    if (ptx::ld_acquire_system(&ranks_.fault->word) == 0) ptx::st_release_system(&ranks_.fault->word, found.word);
  }

  const PeerRanks& ranks_;
  const uint32_t cta_;
  const uint32_t number_;
  const uint32_t earlier_fault_;
};

}  // namespace folio::inline v0::kernels::cuda

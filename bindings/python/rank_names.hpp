#pragma once

#include "folio/distributed.hpp"
#include "names.hpp"

/// What Python calls the enumerators of context parallelism.
template <>
struct folio::python::Names<folio::distributed::DcpCombine> {
  static constexpr const char* kName = "DcpCombine";
  static constexpr const char* kDoc = "How ranks combine their partial results of all heads.";
  static constexpr Enumerator<distributed::DcpCombine> kAll[] = {
      {"ALL_GATHER_REDUCE_SCATTER", distributed::DcpCombine::kAllGatherReduceScatter,
       "LSEs are gathered, outputs reduce-scattered in float32: vLLM's ag_rs."},
      {"ALL_TO_ALL", distributed::DcpCombine::kAllToAll, "Every rank is sent its heads with their LSE: vLLM's a2a."}};
};
FOLIO_PYTHON_ENUM(folio::distributed::DcpCombine);

template <>
struct folio::python::Names<folio::distributed::DcpTransport> {
  static constexpr const char* kName = "DcpTransport";
  static constexpr const char* kDoc = "By what ranks bring each other queries and partial results.";
  static constexpr Enumerator<distributed::DcpTransport> kAll[] = {
      {"AUTO", distributed::DcpTransport::kAuto,
       "Peer memory where it can be had, each rank has a GPU of its own and a layer's bytes are few; else GROUP."},
      {"GROUP", distributed::DcpTransport::kGroup, "The process group's operations."},
      {"PEER", distributed::DcpTransport::kPeer, "Peer memory: GPUs of one host store to each other's memory."}};
};
FOLIO_PYTHON_ENUM(folio::distributed::DcpTransport);

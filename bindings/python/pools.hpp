#pragma once

#include <memory>
#include <vector>

#include "folio/pools.hpp"
#include "views.hpp"

namespace folio::python {

/// KvPool, with what keeps its memory alive: itself, or the arrays that it borrows.
struct Pool {
  std::shared_ptr<KvPool> pool;
  std::vector<Array> k, v;  ///< one a layer
  std::vector<ScaleArg> k_scales, v_scales;
};

}  // namespace folio::python

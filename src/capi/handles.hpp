#pragma once

#include <string>

#include "folio/attention.hpp"
#include "folio/c/folio.h"
#include "folio/context.hpp"

// The C handles. Each keeps what it needs alive through the shared states behind the C++ handles.

struct folio_context {
  folio::Context context;
};

struct folio_op {
  folio::AttentionOp op;
  std::string kernel_name;
};

struct folio_plan_buffer {
  folio::PlanBuffer buffer;
};

#pragma once

/// Kernels that wait for each other: one grid runs at a time until a thread of it calls this.
namespace folio::emulation {

/// Lets the other fibers run, and then grids of other streams: for a thread that waits for what these will write.
/// Static __shared__ variables are lost by it, since other grids have the same ones.
void let_other_grids_run();

}  // namespace folio::emulation

//! Folio: paged attention for LLM serving, over its C API.
//!
//! ```text
//! Context -> Op::prepare -> PlanBuffer -> PlanBuffer::plan, once a step -> Plan::run, once a layer
//! ```
//!
//! The wrappers serve CPUs: tensors are slices, and whatever they accept, memory stays safe. `Plan::run` checks every
//! page id first, which costs O(pages) a layer. GPUs, the prefix cache, tables and the engine backends are reached
//! through [`ffi`], whose functions are unsafe; `docs/c_api.md` of Folio has their rules.
//!
//! # Threads
//!
//! [`Context`] and [`Op`] are `Send` and `Sync`: the C API lets several threads use them at once. [`PlanBuffer`],
//! [`Plan`], [`Workspace`], [`TokenAllocator`] and [`ReqToTokenPool`] are `Send` only: they have state, and no lock.
//! [`KvPool`] is `Sync` besides, because reading it is safe from several threads and writing takes `&mut`.

mod cache;
mod context;
mod dtype;
mod error;
mod merge;
mod op;
mod plan;
mod pool;
mod run;
mod tensor;

/// The C API's declarations, as `generate.sh` writes them.
#[allow(non_camel_case_types, non_upper_case_globals, dead_code, clippy::all)]
pub mod ffi;

pub use cache::{CacheView, KvCache, KvCacheShape, KvLayout};
pub use context::Context;
pub use dtype::{Bf16, DType, Element, Fp8E4M3, Fp8E5M2, F16};
pub use error::{Error, Result, Status};
pub use merge::{merge_state, merge_states, StateView};
pub use op::{AttentionConfig, Determinism, Features, KernelAnswer, Mask, Op, PrepareOptions};
pub use plan::{Batch, Plan, PlanBuffer, Segment, SegmentSource};
pub use pool::{KvPool, KvPoolConfig, PoolLayout, ReqToTokenPool, TokenAllocator};
pub use run::{AttentionArgs, PageTable, SegmentArgs, Workspace};
pub use tensor::{TensorMut, TensorRef};

/// The linked library's version, "major.minor.patch".
pub fn version() -> &'static str {
    // SAFETY: a static string of ASCII.
    unsafe { std::ffi::CStr::from_ptr(ffi::folio_version()) }
        .to_str()
        .unwrap_or("")
}

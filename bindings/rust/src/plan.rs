use std::ptr::{self, NonNull};

use crate::context::{created, init};
use crate::error::{check, count, require, Error, Result};
use crate::ffi;
use crate::op::Op;

/// Where a segment's keys and values lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SegmentSource {
    #[default]
    Paged,
    Ragged,
}

/// One part of the keys of every request: lengths only.
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment<'a> {
    pub source: SegmentSource,
    /// Tokens of each row.
    pub kv_len: &'a [i32],
    /// Position of each row's first token; None = where the segment before ends.
    pub first_pos: Option<&'a [i32]>,
    /// Rows that neighbouring requests share: row g belongs to requests [indptr[g], indptr[g + 1]). None: one a request.
    pub group_indptr: Option<&'a [i32]>,
    /// Mask and window do not apply.
    pub all_visible: bool,
}

impl<'a> Segment<'a> {
    pub fn paged(kv_len: &'a [i32]) -> Self {
        Self {
            kv_len,
            ..Self::default()
        }
    }

    pub fn ragged(kv_len: &'a [i32]) -> Self {
        Self {
            source: SegmentSource::Ragged,
            kv_len,
            ..Self::default()
        }
    }
}

/// One step's batch of R requests: lengths only.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch<'a> {
    /// [R + 1]: request r has the query tokens [cu_q[r], cu_q[r + 1]).
    pub cu_q: &'a [i32],
    /// Rows of q and out; at least cu_q[R]. Rows beyond are padding.
    pub num_tokens: usize,
    /// In the order of the keys.
    pub segments: &'a [Segment<'a>],
    /// [R], position of each first query; None = so that the last query is the last key.
    pub q_first_pos: Option<&'a [i32]>,
}

/// Memory that plans are made into; for one op. Threads do not share it:
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>() {}
/// shared::<folio::PlanBuffer>();
/// ```
#[derive(Debug)]
pub struct PlanBuffer {
    handle: NonNull<ffi::folio_plan_buffer>,
    num_q_heads: usize,
}

// SAFETY: used from one thread at a time: planning takes &mut, and a plan borrows it so.
unsafe impl Send for PlanBuffer {}

/// One step's work. It borrows its buffer, so that no stale plan can run:
///
/// ```compile_fail,E0499
/// # fn steps(op: &folio::Op, buffer: &mut folio::PlanBuffer, batch: &folio::Batch<'_>) -> folio::Result<()> {
/// let first = buffer.plan(op, batch)?;
/// let second = buffer.plan(op, batch)?;
/// first.workspace_size()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Plan<'a> {
    pub(crate) raw: ffi::folio_plan,
    /// Of each segment, in order: where its keys lie, and its rows.
    pub(crate) segments: Vec<(SegmentSource, usize)>,
    pub(crate) num_tokens: usize,
    pub(crate) num_q_heads: usize,
    /// Held, not used: the plan is the buffer's only user.
    _buffer: &'a mut PlanBuffer,
}

// SAFETY: as the buffer's; a plan may move to another thread, and be used there.
unsafe impl Send for Plan<'_> {}

impl PlanBuffer {
    pub fn new(op: &Op) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: a live handle.
        check(unsafe { ffi::folio_create_plan_buffer(op.as_ptr(), &mut handle) })?;
        Ok(Self {
            handle: created(handle),
            num_q_heads: op.num_q_heads(),
        })
    }

    /// Plans one step. `op`: the one that the buffer was made for.
    pub fn plan(&mut self, op: &Op, batch: &Batch<'_>) -> Result<Plan<'_>> {
        let requests = batch
            .cu_q
            .len()
            .checked_sub(1)
            .ok_or_else(|| Error::invalid("cu_q is empty; it has R + 1 offsets"))?;
        let mut segments = Vec::with_capacity(batch.segments.len());
        let mut rows = Vec::with_capacity(batch.segments.len());
        for (i, segment) in batch.segments.iter().enumerate() {
            let num_rows = segment_rows(segment, requests, i)?;
            segments.push(raw_segment(segment)?);
            rows.push((segment.source, num_rows));
        }
        check_length(batch.q_first_pos, requests, "q_first_pos")?;
        let mut raw = init(ffi::folio_batch_init)?;
        raw.num_requests = count(requests, "cu_q")?;
        raw.num_tokens = count(batch.num_tokens, "the batch")?;
        raw.cu_q = batch.cu_q.as_ptr();
        raw.q_first_pos = pointer(batch.q_first_pos);
        raw.segments = segments.as_ptr();
        raw.num_segments = count(segments.len(), "segments")?;
        let mut plan = ffi::folio_plan {
            buffer: ptr::null(),
            generation: 0,
        };
        // SAFETY: arrays are as long as their counts; lengths are checked by the call and not kept.
        check(unsafe { ffi::folio_make_plan(op.as_ptr(), &raw, self.handle.as_ptr(), ptr::null_mut(), &mut plan) })?;
        Ok(Plan {
            raw: plan,
            segments: rows,
            num_tokens: batch.num_tokens,
            num_q_heads: self.num_q_heads,
            _buffer: self,
        })
    }
}

impl Drop for PlanBuffer {
    fn drop(&mut self) {
        // SAFETY: freed once; no plan of it is left, since plans borrow it.
        unsafe { ffi::folio_free_plan_buffer(self.handle.as_ptr()) }
    }
}

impl Plan<'_> {
    /// Bytes of workspace that the plan needs.
    pub fn workspace_size(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: the buffer lives.
        check(unsafe { ffi::folio_plan_workspace_size(&self.raw, &mut bytes) })?;
        Ok(bytes)
    }
}

fn pointer<T>(array: Option<&[T]>) -> *const T {
    array.map_or(ptr::null(), <[T]>::as_ptr)
}

fn check_length(array: Option<&[i32]>, length: usize, name: &str) -> Result<()> {
    require(array.map_or(true, |array| array.len() == length), || {
        format!(
            "{name} has {} elements; it must have {length}",
            array.map_or(0, <[i32]>::len)
        )
    })
}

/// Rows of a segment, after its arrays' lengths have been checked.
fn segment_rows(segment: &Segment<'_>, requests: usize, index: usize) -> Result<usize> {
    let rows = match segment.group_indptr {
        Some(indptr) => indptr.len().checked_sub(1).ok_or_else(|| {
            Error::invalid(format!(
                "group_indptr of segment {index} is empty; it has one offset more than groups"
            ))
        })?,
        None => requests,
    };
    check_length(Some(segment.kv_len), rows, &format!("kv_len of segment {index}"))?;
    check_length(segment.first_pos, rows, &format!("first_pos of segment {index}"))?;
    Ok(rows)
}

fn raw_segment(segment: &Segment<'_>) -> Result<ffi::folio_kv_segment> {
    let mut raw = init(ffi::folio_kv_segment_init)?;
    raw.source = match segment.source {
        SegmentSource::Paged => ffi::FOLIO_KV_PAGED,
        SegmentSource::Ragged => ffi::FOLIO_KV_RAGGED,
    };
    raw.kv_len = segment.kv_len.as_ptr();
    raw.first_pos = pointer(segment.first_pos);
    raw.group_indptr = pointer(segment.group_indptr);
    if let Some(indptr) = segment.group_indptr {
        raw.num_groups = count(indptr.len() - 1, "group_indptr")?;
    }
    if segment.all_visible {
        raw.mask = ffi::FOLIO_SEGMENT_ALL_VISIBLE;
    }
    Ok(raw)
}

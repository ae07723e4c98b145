use std::alloc::{self, Layout};
use std::ptr::{self, NonNull};

use crate::cache::CacheView;
use crate::context::init;
use crate::error::{check, count, require, Error, Result};
use crate::ffi;
use crate::op::Op;
use crate::plan::{Plan, SegmentSource};
use crate::tensor::{TensorMut, TensorRef};

/// Which pages a row's tokens lie in.
#[derive(Clone, Copy, Debug)]
pub enum PageTable<'a> {
    /// Row r has indices[indptr[r]..indptr[r + 1]].
    Csr { indices: &'a [i32], indptr: &'a [i32] },
    /// Row r begins at entries[r * row_stride].
    Dense {
        entries: &'a [i32],
        num_rows: usize,
        row_stride: usize,
    },
}

/// Where one segment's keys and values lie in a layer.
#[derive(Clone, Copy)]
pub enum SegmentArgs<'a> {
    /// fp8 caches: real = stored * scale.
    Paged {
        cache: CacheView<'a>,
        table: PageTable<'a>,
        k_scale: f32,
        v_scale: f32,
    },
    /// k [tokens, num_kv_heads, head_dim_qk], v likewise; row r's tokens are [indptr[r], indptr[r + 1]).
    Ragged {
        k: TensorRef<'a>,
        v: TensorRef<'a>,
        indptr: &'a [i32],
    },
}

impl<'a> SegmentArgs<'a> {
    pub fn paged(cache: CacheView<'a>, table: PageTable<'a>) -> Self {
        Self::Paged {
            cache,
            table,
            k_scale: 1.0,
            v_scale: 1.0,
        }
    }
}

/// One layer's arguments. Features used must be among the config's.
pub struct AttentionArgs<'a> {
    /// [num_tokens, num_q_heads, head_dim_qk]
    pub q: TensorRef<'a>,
    /// [num_tokens, num_q_heads, head_dim_v]
    pub out: TensorMut<'a>,
    /// As the plan has them.
    pub segments: &'a [SegmentArgs<'a>],
    /// [num_tokens, num_q_heads], natural logarithms; None = not wanted.
    pub lse: Option<&'a mut [f32]>,
    /// 0 = 1 / sqrt(head_dim_qk)
    pub sm_scale: f32,
    /// 0 = off
    pub logits_soft_cap: f32,
    /// [num_q_heads]
    pub alibi_slopes: Option<&'a [f32]>,
    /// [num_q_heads]
    pub sinks: Option<&'a [f32]>,
    /// Bits, each request's from a byte of its own; `Mask::Custom` only.
    pub custom_mask: Option<&'a [u8]>,
}

impl<'a> AttentionArgs<'a> {
    pub fn new(q: TensorRef<'a>, out: TensorMut<'a>, segments: &'a [SegmentArgs<'a>]) -> Self {
        Self {
            q,
            out,
            segments,
            lse: None,
            sm_scale: 0.0,
            logits_soft_cap: 0.0,
            alibi_slopes: None,
            sinks: None,
            custom_mask: None,
        }
    }
}

/// Scratch memory of runs, of one op. Runs that overlap need one each.
#[derive(Debug)]
pub struct Workspace<'a> {
    op: &'a Op,
    memory: Option<(NonNull<u8>, Layout)>,
}

// SAFETY: plain memory with one owner, and an Op, which is Sync.
unsafe impl Send for Workspace<'_> {}

impl<'a> Workspace<'a> {
    /// Empty; it grows to what plans need.
    pub fn new(op: &'a Op) -> Self {
        Self { op, memory: None }
    }

    pub fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |(_, layout)| layout.size())
    }

    fn free(&mut self) {
        if let Some((data, layout)) = self.memory.take() {
            // SAFETY: allocated with this layout, freed once.
            unsafe { alloc::dealloc(data.as_ptr(), layout) };
        }
    }

    /// At least so many bytes, 256-byte aligned and initialised.
    fn reserve(&mut self, bytes: usize) -> Result<*mut std::os::raw::c_void> {
        if bytes > self.bytes() {
            self.free();
            let layout = Layout::from_size_align(bytes, 256).map_err(|_| Error::invalid("no such workspace"))?;
            // SAFETY: bytes is not 0. Zeroed, so that no call reads what was never written.
            let data = unsafe { alloc::alloc_zeroed(layout) };
            let data = NonNull::new(data).unwrap_or_else(|| alloc::handle_alloc_error(layout));
            self.memory = Some((data, layout));
            // SAFETY: fresh memory of that size.
            check(unsafe {
                ffi::folio_init_workspace(self.op.as_ptr(), data.as_ptr().cast(), bytes, ptr::null_mut())
            })?;
        }
        Ok(self
            .memory
            .as_ref()
            .map_or(ptr::null_mut(), |(data, _)| data.as_ptr().cast()))
    }
}

impl Drop for Workspace<'_> {
    fn drop(&mut self) {
        self.free();
    }
}

impl Plan<'_> {
    /// Attention of one layer. Every page id that it reads is checked first: O(pages).
    pub fn run(&self, args: AttentionArgs<'_>, workspace: &mut Workspace<'_>) -> Result<()> {
        let segments = self.raw_segments(args.segments)?;
        let raw = self.raw_args(args, &segments)?;
        let bytes = self.workspace_size()?;
        let memory = workspace.reserve(bytes)?;
        // SAFETY: tensors lie in borrowed slices, arrays are as long as the plan needs, page ids are checked by the first
        // call; outputs are borrowed mutably. Nothing is kept.
        unsafe {
            check(ffi::folio_validate(&self.raw, &raw))?;
            check(ffi::folio_run(
                &self.raw,
                &raw,
                memory,
                workspace.bytes(),
                ptr::null_mut(),
            ))
        }
    }

    fn raw_segments(&self, segments: &[SegmentArgs<'_>]) -> Result<Vec<ffi::folio_segment_args>> {
        require(segments.len() == self.segments.len(), || {
            format!(
                "{} segments are given; the plan has {}",
                segments.len(),
                self.segments.len()
            )
        })?;
        segments
            .iter()
            .zip(&self.segments)
            .map(|(segment, planned)| raw_segment(segment, *planned))
            .collect()
    }

    fn raw_args(
        &self,
        args: AttentionArgs<'_>,
        segments: &[ffi::folio_segment_args],
    ) -> Result<ffi::folio_attention_args> {
        let heads = self.num_q_heads;
        for (array, name) in [(args.alibi_slopes, "alibi_slopes"), (args.sinks, "sinks")] {
            require(array.map_or(true, |array| array.len() == heads), || {
                format!(
                    "{name} has {} elements; the op has {heads} heads",
                    array.map_or(0, <[f32]>::len)
                )
            })?;
        }
        let mut raw = init(ffi::folio_attention_args_init)?;
        raw.num_segments = count(segments.len(), "segments")?;
        raw.segments = segments.as_ptr();
        raw.q = args.q.raw;
        raw.out = args.out.raw;
        if let Some(lse) = args.lse {
            let rows = self.num_tokens * heads;
            require(lse.len() == rows, || {
                format!("lse has {} elements; it must have {rows}", lse.len())
            })?;
            raw.lse.data = lse.as_mut_ptr();
            raw.lse.token_stride = heads as i64;
            raw.lse.head_stride = 1;
        }
        raw.sm_scale = args.sm_scale;
        raw.logits_soft_cap = args.logits_soft_cap;
        raw.alibi_slopes = args.alibi_slopes.map_or(ptr::null(), <[f32]>::as_ptr);
        raw.sinks = args.sinks.map_or(ptr::null(), <[f32]>::as_ptr);
        if let Some(mask) = args.custom_mask {
            raw.custom_mask = mask.as_ptr();
            raw.custom_mask_bytes = mask.len() as i64;
        }
        Ok(raw)
    }
}

fn raw_segment(segment: &SegmentArgs<'_>, planned: (SegmentSource, usize)) -> Result<ffi::folio_segment_args> {
    let mut raw = init(ffi::folio_segment_args_init)?;
    match segment {
        SegmentArgs::Paged {
            cache,
            table,
            k_scale,
            v_scale,
        } => {
            raw.cache = cache.raw;
            raw.table = raw_table(table)?;
            raw.k_scale.value = *k_scale;
            raw.v_scale.value = *v_scale;
        }
        SegmentArgs::Ragged { k, v, indptr } => {
            let (source, rows) = planned;
            // The C API takes its length from the plan.
            require(source != SegmentSource::Ragged || indptr.len() == rows + 1, || {
                format!(
                    "indptr has {} offsets; the segment has {rows} rows, and one offset more",
                    indptr.len()
                )
            })?;
            raw.ragged.k = k.raw;
            raw.ragged.v = v.raw;
            raw.ragged.indptr = indptr.as_ptr();
        }
    }
    Ok(raw)
}

fn raw_table(table: &PageTable<'_>) -> Result<ffi::folio_page_table_view> {
    let mut raw = ffi::folio_page_table_view {
        kind: ffi::FOLIO_TABLE_CSR,
        indices: ptr::null(),
        num_indices: 0,
        indptr: ptr::null(),
        row_stride: 0,
        first_column: 0,
        num_rows: 0,
    };
    match *table {
        PageTable::Csr { indices, indptr } => {
            let rows = indptr
                .len()
                .checked_sub(1)
                .ok_or_else(|| Error::invalid("the table's indptr is empty"))?;
            raw.indices = indices.as_ptr();
            raw.num_indices = indices.len() as i64;
            raw.indptr = indptr.as_ptr();
            raw.num_rows = count(rows, "the table's indptr")?;
        }
        PageTable::Dense {
            entries,
            num_rows,
            row_stride,
        } => {
            raw.kind = ffi::FOLIO_TABLE_DENSE;
            raw.indices = entries.as_ptr();
            raw.num_indices = entries.len() as i64;
            raw.row_stride = row_stride as i64;
            raw.num_rows = count(num_rows, "the table")?;
        }
    }
    Ok(raw)
}

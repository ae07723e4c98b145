use std::ptr::{self, NonNull};

use crate::cache::CacheView;
use crate::context::{created, init, Context};
use crate::dtype::DType;
use crate::error::{check, count, require, Result};
use crate::ffi;
use crate::run::PageTable;
use crate::tensor::TensorRef;

/// How a layer's slots lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolLayout {
    /// Pages of any size that divides the slots.
    #[default]
    TokenMajor,
    HeadMajor,
    CpuPacked,
}

#[derive(Clone, Copy, Debug)]
pub struct KvPoolConfig {
    /// Slots to hand out, a multiple of page_size. Slots 0 to page_size - 1 are the dummy page besides.
    pub num_slots: i32,
    pub page_size: i32,
    pub num_layers: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub dtype: DType,
    pub layout: PoolLayout,
}

/// The keys and values of every layer, in memory of its own.
#[derive(Debug)]
pub struct KvPool {
    handle: NonNull<ffi::folio_kv_pool>,
}

// SAFETY: reading is safe from several threads (folio/c/pools.h), and writing takes &mut.
unsafe impl Send for KvPool {}
unsafe impl Sync for KvPool {}

impl KvPool {
    pub fn new(config: &KvPoolConfig) -> Result<Self> {
        let mut raw = init(ffi::folio_kv_pool_config_init)?;
        raw.num_slots = config.num_slots;
        raw.page_size = config.page_size;
        raw.num_layers = config.num_layers;
        raw.num_kv_heads = config.num_kv_heads;
        raw.head_dim_qk = config.head_dim_qk;
        raw.head_dim_v = config.head_dim_v;
        raw.dtype = config.dtype.code();
        raw.layout = match config.layout {
            PoolLayout::TokenMajor => ffi::FOLIO_POOL_TOKEN_MAJOR,
            PoolLayout::HeadMajor => ffi::FOLIO_POOL_HEAD_MAJOR,
            PoolLayout::CpuPacked => ffi::FOLIO_POOL_CPU_PACKED,
        };
        let mut handle = ptr::null_mut();
        // SAFETY: an initialised structure.
        check(unsafe { ffi::folio_create_kv_pool(&raw, &mut handle) })?;
        Ok(Self {
            handle: created(handle),
        })
    }

    /// The layer as pages of page_size tokens; 0 = the pool's.
    pub fn view(&self, layer: i32, page_size: i32) -> Result<CacheView<'_>> {
        // SAFETY: a structure of plain data, filled by the call; what it points to lives as long as the pool.
        let mut view = unsafe { std::mem::zeroed() };
        check(unsafe { ffi::folio_kv_pool_view(self.handle.as_ptr(), layer, page_size, &mut view) })?;
        Ok(CacheView::from_raw(view))
    }

    /// Scales of an fp8 layer: stored = real / scale.
    pub fn set_scales(&mut self, layer: i32, k: f32, v: f32) -> Result<()> {
        let scale = |value| ffi::folio_scale {
            value,
            data: ptr::null(),
            granularity: ffi::FOLIO_SCALE_PER_TENSOR,
            request_stride: 0,
        };
        let (k, v) = (scale(k), scale(v));
        // SAFETY: a live handle; values, no arrays.
        check(unsafe { ffi::folio_kv_pool_set_scales(self.handle.as_ptr(), layer, &k, &v) })
    }

    /// Stores token t of k and v [tokens, num_kv_heads, dim] in slots[t] of the layer, with its scales.
    pub fn write(
        &mut self,
        context: &Context,
        layer: i32,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        slots: &[i64],
    ) -> Result<()> {
        // SAFETY: tensors lie in borrowed slices; slots beyond the pool are refused. The call runs to its end.
        check(unsafe {
            ffi::folio_kv_pool_write(
                self.handle.as_ptr(),
                context.as_ptr(),
                layer,
                &k.raw,
                &v.raw,
                slots.as_ptr(),
                slots.len() as i64,
                ptr::null_mut(),
            )
        })
    }
}

impl Drop for KvPool {
    fn drop(&mut self) {
        // SAFETY: freed once; views borrow the pool.
        unsafe { ffi::folio_free_kv_pool(self.handle.as_ptr()) }
    }
}

/// Hands out the slots of a pool.
#[derive(Debug)]
pub struct TokenAllocator {
    handle: NonNull<ffi::folio_token_allocator>,
}

// SAFETY: one owner at a time; changes take &mut.
unsafe impl Send for TokenAllocator {}

impl TokenAllocator {
    pub fn new(num_slots: i32, page_size: i32) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: plain numbers.
        check(unsafe { ffi::folio_create_token_allocator(num_slots, page_size, &mut handle) })?;
        Ok(Self {
            handle: created(handle),
        })
    }

    /// Slots that are free.
    pub fn available(&self) -> Result<i32> {
        let mut slots = 0;
        // SAFETY: a live handle.
        check(unsafe { ffi::folio_token_allocator_available(self.handle.as_ptr(), &mut slots) })?;
        Ok(slots)
    }

    /// That many slots from fresh pages; None, and nothing changed, if too few are free.
    pub fn alloc(&mut self, num_slots: usize) -> Result<Option<Vec<i32>>> {
        count(num_slots, "the request")?;
        let mut slots = vec![0; num_slots];
        let mut allocated = 0;
        // SAFETY: slots has num_slots elements.
        check(unsafe {
            ffi::folio_token_allocator_alloc(
                self.handle.as_ptr(),
                slots.as_mut_ptr(),
                num_slots as i64,
                &mut allocated,
            )
        })?;
        Ok((allocated != 0).then_some(slots))
    }

    /// One slot more for each request: seq_lens count it, last_slots are those of the tokens before.
    pub fn alloc_decode(&mut self, seq_lens: &[i32], last_slots: &[i32]) -> Result<Option<Vec<i32>>> {
        require(seq_lens.len() == last_slots.len(), || {
            format!(
                "seq_lens has {} requests, last_slots {}",
                seq_lens.len(),
                last_slots.len()
            )
        })?;
        let mut slots = vec![0; seq_lens.len()];
        let mut allocated = 0;
        // SAFETY: all three arrays have as many elements as there are requests.
        check(unsafe {
            ffi::folio_token_allocator_alloc_decode(
                self.handle.as_ptr(),
                seq_lens.as_ptr(),
                last_slots.as_ptr(),
                count(seq_lens.len(), "seq_lens")?,
                slots.as_mut_ptr(),
                &mut allocated,
            )
        })?;
        Ok((allocated != 0).then_some(slots))
    }

    /// Gives back the pages of the slots.
    pub fn free(&mut self, slots: &[i32]) -> Result<()> {
        // SAFETY: a borrowed slice.
        check(unsafe { ffi::folio_token_allocator_free(self.handle.as_ptr(), slots.as_ptr(), slots.len() as i64) })
    }
}

impl Drop for TokenAllocator {
    fn drop(&mut self) {
        // SAFETY: freed once.
        unsafe { ffi::folio_free_token_allocator(self.handle.as_ptr()) }
    }
}

/// Which slot each token of each running request lies in.
#[derive(Debug)]
pub struct ReqToTokenPool {
    handle: NonNull<ffi::folio_req_to_token_pool>,
}

// SAFETY: one owner at a time; changes take &mut.
unsafe impl Send for ReqToTokenPool {}

impl ReqToTokenPool {
    pub fn new(max_reqs: i32, max_context_len: i32) -> Result<Self> {
        let mut handle = ptr::null_mut();
        // SAFETY: plain numbers.
        check(unsafe { ffi::folio_create_req_to_token_pool(max_reqs, max_context_len, &mut handle) })?;
        Ok(Self {
            handle: created(handle),
        })
    }

    /// The row that has been free longest; None if all are taken.
    pub fn alloc(&mut self) -> Result<Option<i32>> {
        let (mut row, mut allocated) = (0, 0);
        // SAFETY: room for one row.
        check(unsafe { ffi::folio_req_to_token_pool_alloc(self.handle.as_ptr(), &mut row, 1, &mut allocated) })?;
        Ok((allocated != 0).then_some(row))
    }

    pub fn free(&mut self, row: i32) -> Result<()> {
        // SAFETY: a live handle; rows that are not held are refused.
        check(unsafe { ffi::folio_req_to_token_pool_free_row(self.handle.as_ptr(), row) })
    }

    /// Writes slots at positions first, first + 1, ... of a held row.
    pub fn write(&mut self, row: i32, first: i32, slots: &[i32]) -> Result<()> {
        // SAFETY: a borrowed slice; rows and positions beyond the table are refused.
        check(unsafe {
            ffi::folio_req_to_token_pool_write(self.handle.as_ptr(), row, first, slots.as_ptr(), slots.len() as i64)
        })
    }

    /// All rows, row 0 included, as a table with pages of one token.
    pub fn table(&self) -> Result<PageTable<'_>> {
        // SAFETY: a structure of plain data, filled by the call; its entries live as long as the pool, which is borrowed.
        let mut raw: ffi::folio_page_table_view = unsafe { std::mem::zeroed() };
        check(unsafe { ffi::folio_req_to_token_pool_table(self.handle.as_ptr(), &mut raw) })?;
        let entries = unsafe { std::slice::from_raw_parts(raw.indices, raw.num_indices as usize) };
        Ok(PageTable::Dense {
            entries,
            num_rows: raw.num_rows as usize,
            row_stride: raw.row_stride as usize,
        })
    }
}

impl Drop for ReqToTokenPool {
    fn drop(&mut self) {
        // SAFETY: freed once; tables borrow the pool.
        unsafe { ffi::folio_free_req_to_token_pool(self.handle.as_ptr()) }
    }
}

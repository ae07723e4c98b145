use std::marker::PhantomData;

use crate::context::{init, Context};
use crate::dtype::Element;
use crate::error::{check, require, Error, Result};
use crate::ffi;
use crate::tensor::TensorRef;

/// The sizes of one layer's paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheShape {
    pub num_pages: i64,
    pub page_size: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
}

/// How pages lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// [page][token][head][dim]
    Nhd,
    /// [page][head][token][dim]
    Hnd,
    /// What CPU kernels read fastest; pages of 16 tokens or more, an even number.
    CpuPacked,
}

/// One layer's keys and values, borrowed for reading.
#[derive(Clone, Copy)]
pub struct CacheView<'a> {
    pub(crate) raw: ffi::folio_kv_cache_view,
    borrow: PhantomData<&'a [u8]>,
}

// SAFETY: a borrow of slices or of a pool's memory, whose elements are Send and Sync (Element).
unsafe impl Send for CacheView<'_> {}
unsafe impl Sync for CacheView<'_> {}

impl CacheView<'_> {
    pub(crate) fn from_raw(raw: ffi::folio_kv_cache_view) -> Self {
        Self {
            raw,
            borrow: PhantomData,
        }
    }
}

/// One layer's paged cache with memory of its own, zeroed.
#[derive(Clone, Debug)]
pub struct KvCache<T: Element> {
    shape: KvCacheShape,
    layout: KvLayout,
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Element> KvCache<T> {
    pub fn new(shape: KvCacheShape, layout: KvLayout) -> Result<Self> {
        let raw = raw_shape::<T>(&shape);
        let (mut k, mut v) = (0, 0);
        // SAFETY: plain numbers.
        check(unsafe { ffi::folio_kv_cache_elements(&raw, &mut k, &mut v) })?;
        let size = |elements: i64| usize::try_from(elements).map_err(|_| Error::invalid("the cache has no such size"));
        Ok(Self {
            shape,
            layout,
            k: vec![T::default(); size(k)?],
            v: vec![T::default(); size(v)?],
        })
    }

    pub fn shape(&self) -> &KvCacheShape {
        &self.shape
    }

    /// The elements of keys and values, in the order of the layout.
    pub fn k(&self) -> &[T] {
        &self.k
    }

    pub fn v(&self) -> &[T] {
        &self.v
    }

    pub fn view(&self) -> Result<CacheView<'_>> {
        // Views are for reading; the C structure has no const.
        self.raw_view(self.k.as_ptr() as *mut T, self.v.as_ptr() as *mut T)
            .map(CacheView::from_raw)
    }

    fn raw_view(&self, k: *mut T, v: *mut T) -> Result<ffi::folio_kv_cache_view> {
        let raw = raw_shape::<T>(&self.shape);
        let make = match self.layout {
            KvLayout::Nhd => ffi::folio_make_nhd_view,
            KvLayout::Hnd => ffi::folio_make_hnd_view,
            KvLayout::CpuPacked => ffi::folio_make_cpu_packed_view,
        };
        // SAFETY: a structure of plain data, filled by the call. k and v are as long as folio_kv_cache_elements says.
        let mut view = unsafe { std::mem::zeroed() };
        check(unsafe { make(&raw, k.cast(), v.cast(), &mut view) })?;
        Ok(view)
    }

    /// Writes token i of `k` and `v` [tokens, num_kv_heads, dim] to slots[i] = page * page_size + offset; negative: not
    /// at all. fp8 caches store value / scale; others take scales of 1.
    pub fn write(
        &mut self,
        context: &Context,
        k: TensorRef<'_>,
        v: TensorRef<'_>,
        slots: &[i64],
        k_scale: f32,
        v_scale: f32,
    ) -> Result<()> {
        let mut args = init(ffi::folio_cache_write_args_init)?;
        let (k_memory, v_memory) = (self.k.as_mut_ptr(), self.v.as_mut_ptr());
        args.cache = self.raw_view(k_memory, v_memory)?;
        args.k = k.raw;
        args.v = v.raw;
        args.slot_mapping = slots.as_ptr();
        args.num_slots = slots.len() as i64;
        args.k_scale.value = k_scale;
        args.v_scale.value = v_scale;
        // SAFETY: every view lies in a borrowed slice; slots beyond the cache are refused. The call runs to its end.
        check(unsafe { ffi::folio_write_kv_cache(context.as_ptr(), &args, std::ptr::null_mut()) })
    }

    /// Copies page source[i] to page destination[i]; destinations are distinct and no sources.
    pub fn copy_pages(&mut self, context: &Context, source: &[i32], destination: &[i32]) -> Result<()> {
        require(source.len() == destination.len(), || {
            format!("source has {} pages, destination {}", source.len(), destination.len())
        })?;
        let (k, v) = (self.k.as_mut_ptr(), self.v.as_mut_ptr());
        // SAFETY: a structure of plain data, for which zeros are none.
        let mut cache: ffi::folio_kv_cache = unsafe { std::mem::zeroed() };
        cache.view = self.raw_view(k, v)?;
        // SAFETY: page ids are checked by the call.
        check(unsafe {
            ffi::folio_copy_pages(
                context.as_ptr(),
                &cache,
                &cache,
                source.as_ptr(),
                destination.as_ptr(),
                source.len() as i64,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        })
    }
}

fn raw_shape<T: Element>(shape: &KvCacheShape) -> ffi::folio_kv_cache_shape {
    ffi::folio_kv_cache_shape {
        num_pages: shape.num_pages,
        page_size: shape.page_size,
        num_kv_heads: shape.num_kv_heads,
        head_dim_qk: shape.head_dim_qk,
        head_dim_v: shape.head_dim_v,
        dtype: T::DTYPE.code(),
    }
}

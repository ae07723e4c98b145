use std::marker::PhantomData;

use crate::dtype::Element;
use crate::error::{require, Result};
use crate::ffi;

const MAX_RANK: usize = ffi::FOLIO_MAX_RANK as usize;

/// A strided tensor in a borrowed slice.
#[derive(Clone, Copy)]
pub struct TensorRef<'a> {
    pub(crate) raw: ffi::folio_const_tensor_view,
    borrow: PhantomData<&'a [u8]>,
}

/// A packed row-major tensor in a borrowed slice, to be written.
pub struct TensorMut<'a> {
    pub(crate) raw: ffi::folio_tensor_view,
    borrow: PhantomData<&'a mut [u8]>,
}

// SAFETY: they are borrows of slices, whose elements are Send and Sync (Element).
unsafe impl Send for TensorRef<'_> {}
unsafe impl Sync for TensorRef<'_> {}
unsafe impl Send for TensorMut<'_> {}
unsafe impl Sync for TensorMut<'_> {}

/// Strides of packed memory, whose size must be that of `length` elements.
fn packed_strides(length: usize, shape: &[usize]) -> Result<Vec<usize>> {
    let mut strides = vec![0; shape.len()];
    let mut elements = 1usize;
    for (stride, &size) in strides.iter_mut().zip(shape).rev() {
        *stride = elements;
        elements = elements.saturating_mul(size);
    }
    require(elements == length, || {
        format!("a tensor of shape {shape:?} does not have {length} elements")
    })?;
    Ok(strides)
}

fn arrays(shape: &[usize], strides: &[usize]) -> Result<(i32, [i64; MAX_RANK], [i64; MAX_RANK])> {
    require(shape.len() <= MAX_RANK, || {
        format!("a tensor has {} dimensions; at most {MAX_RANK} are taken", shape.len())
    })?;
    let mut sizes = [0; MAX_RANK];
    let mut steps = [0; MAX_RANK];
    for i in 0..shape.len() {
        sizes[i] = shape[i] as i64;
        steps[i] = strides[i] as i64;
    }
    Ok((shape.len() as i32, sizes, steps))
}

impl<'a> TensorRef<'a> {
    /// A packed row-major tensor: `data` has as many elements as `shape`.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        let strides = packed_strides(data.len(), shape)?;
        Self::strided(data, shape, &strides)
    }

    /// Element (i0, i1, ...) lies at data[sum of i_k * strides[k]]. Every one must lie in `data`.
    pub fn strided<T: Element>(data: &'a [T], shape: &[usize], strides: &[usize]) -> Result<Self> {
        require(shape.len() == strides.len(), || {
            format!("shape {shape:?} and strides {strides:?} differ in length")
        })?;
        if shape.iter().all(|&size| size > 0) {
            let last = shape.iter().zip(strides).try_fold(0usize, |last, (&size, &stride)| {
                last.checked_add(stride.checked_mul(size - 1)?)
            });
            require(last.map_or(false, |last| last < data.len()), || {
                format!(
                    "a tensor of shape {shape:?} and strides {strides:?} does not lie in {} elements",
                    data.len()
                )
            })?;
        }
        let (rank, shape, strides) = arrays(shape, strides)?;
        let raw = ffi::folio_const_tensor_view {
            data: data.as_ptr().cast(),
            dtype: T::DTYPE.code(),
            rank,
            shape,
            strides,
        };
        Ok(Self {
            raw,
            borrow: PhantomData,
        })
    }
}

impl<'a> TensorMut<'a> {
    /// A packed row-major tensor: `data` has as many elements as `shape`.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let strides = packed_strides(data.len(), shape)?;
        let (rank, shape, strides) = arrays(shape, &strides)?;
        let raw = ffi::folio_tensor_view {
            data: data.as_mut_ptr().cast(),
            dtype: T::DTYPE.code(),
            rank,
            shape,
            strides,
        };
        Ok(Self {
            raw,
            borrow: PhantomData,
        })
    }
}

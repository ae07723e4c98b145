use std::ptr;

use crate::context::Context;
use crate::error::{check, require, Result};
use crate::ffi;
use crate::tensor::{TensorMut, TensorRef};

/// A partial attention result: outputs [tokens, heads, dim] and their log-sum-exps [tokens, heads], natural logarithms.
#[derive(Clone, Copy)]
pub struct StateView<'a> {
    pub out: TensorRef<'a>,
    pub lse: &'a [f32],
}

/// A size of a tensor of that rank; 0 of others, which the call refuses.
fn size(view: &ffi::folio_const_tensor_view, dimension: usize, rank: i32) -> usize {
    if view.rank == rank {
        view.shape[dimension] as usize
    } else {
        0
    }
}

fn check_lse(lse: &[f32], rows: usize, name: &str) -> Result<()> {
    require(lse.len() == rows, || {
        format!("{name} has {} elements; its outputs have {rows} rows", lse.len())
    })
}

fn raw_state(state: &StateView<'_>, name: &str) -> Result<ffi::folio_attention_state> {
    let (tokens, heads) = (size(&state.out.raw, 0, 3), size(&state.out.raw, 1, 3));
    check_lse(state.lse, tokens * heads, name)?;
    Ok(ffi::folio_attention_state {
        out: state.out.raw,
        lse: state.lse.as_ptr(),
        lse_token_stride: heads as i64,
        lse_head_stride: 1,
        base: ffi::FOLIO_LSE_BASE_E,
    })
}

fn raw_lse(lse: Option<&mut [f32]>, tokens: usize, heads: usize) -> Result<ffi::folio_lse_view> {
    let mut raw = ffi::folio_lse_view {
        data: ptr::null_mut(),
        token_stride: heads as i64,
        head_stride: 1,
        base: ffi::FOLIO_LSE_BASE_E,
    };
    if let Some(lse) = lse {
        check_lse(lse, tokens * heads, "lse")?;
        raw.data = lse.as_mut_ptr();
    }
    Ok(raw)
}

/// out, lse = a (+) b: as if the keys of both had been attended to at once.
pub fn merge_state(
    context: &Context,
    a: &StateView<'_>,
    b: &StateView<'_>,
    out: TensorMut<'_>,
    lse: Option<&mut [f32]>,
) -> Result<()> {
    let (raw_a, raw_b) = (raw_state(a, "a.lse")?, raw_state(b, "b.lse")?);
    let raw_lse = raw_lse(lse, size(&raw_a.out, 0, 3), size(&raw_a.out, 1, 3))?;
    // SAFETY: tensors and LSEs lie in borrowed slices; shapes are compared by the call.
    check(unsafe {
        ffi::folio_merge_state(
            context.as_ptr(),
            &raw_a,
            &raw_b,
            &out.raw,
            &raw_lse,
            ptr::null(),
            ptr::null_mut(),
        )
    })
}

/// Folds the states of each token in their order: states [tokens, num_states, heads, dim], lse [tokens, num_states,
/// heads].
pub fn merge_states(
    context: &Context,
    states: TensorRef<'_>,
    states_lse: &[f32],
    out: TensorMut<'_>,
    lse: Option<&mut [f32]>,
) -> Result<()> {
    let [tokens, count, heads] = [0, 1, 2].map(|dimension| size(&states.raw, dimension, 4));
    check_lse(states_lse, tokens * count * heads, "states_lse")?;
    let raw = ffi::folio_attention_states {
        out: states.raw,
        lse: states_lse.as_ptr(),
        lse_token_stride: (count * heads) as i64,
        lse_state_stride: heads as i64,
        lse_head_stride: 1,
        base: ffi::FOLIO_LSE_BASE_E,
    };
    let raw_lse = raw_lse(lse, tokens, heads)?;
    // SAFETY: as in merge_state.
    check(unsafe { ffi::folio_merge_states(context.as_ptr(), &raw, &out.raw, &raw_lse, ptr::null(), ptr::null_mut()) })
}

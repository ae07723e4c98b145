//! A decode step of three requests over a paged cache, beside a naive computation of the same.
//!
//!     cargo run --example decode

use folio::{
    AttentionArgs, AttentionConfig, Batch, Context, DType, KvCache, KvCacheShape, KvLayout, Op, PageTable, Plan,
    PlanBuffer, PrepareOptions, Result, Segment, SegmentArgs, TensorMut, TensorRef, Workspace,
};

const PAGE_SIZE: usize = 16;
const PAGES: usize = 8;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// Numbers in [-1, 1), alike in every run.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Softmax attention of one query head over keys and values [tokens, KV_HEADS, DIM], in float64.
fn naive(q: &[f32], k: &[f32], v: &[f32], kv_head: usize) -> Vec<f64> {
    let row = |data: &[f32], token: usize| {
        let begin = (token * KV_HEADS + kv_head) * DIM;
        data[begin..begin + DIM]
            .iter()
            .map(|&x| f64::from(x))
            .collect::<Vec<_>>()
    };
    let tokens = k.len() / (KV_HEADS * DIM);
    let logits: Vec<f64> = (0..tokens)
        .map(|t| q.iter().zip(row(k, t)).map(|(&a, b)| f64::from(a) * b).sum::<f64>() / (DIM as f64).sqrt())
        .collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|logit| (logit - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; DIM];
    for (t, weight) in weights.iter().enumerate() {
        for (o, x) in out.iter_mut().zip(row(v, t)) {
            *o += weight / sum * x;
        }
    }
    out
}

fn main() -> Result<()> {
    let kv_len = [5, 33, 18];
    // Request 1's tokens lie in pages 6, 1 and 3.
    let indices = [4, 6, 1, 3, 0, 7];
    let indptr = [0, 1, 4, 6];
    let cu_q = [0, 1, 2, 3];

    // Once per model.
    let context = Context::cpu(2)?;
    let config = AttentionConfig::new(Q_HEADS as i32, KV_HEADS as i32, DIM as i32, DType::Float32);
    let op = Op::prepare(&context, &config, &PrepareOptions::default())?;
    let mut cache = KvCache::<f32>::new(
        KvCacheShape {
            num_pages: PAGES as i64,
            page_size: PAGE_SIZE as i32,
            num_kv_heads: KV_HEADS as i32,
            head_dim_qk: DIM as i32,
            head_dim_v: DIM as i32,
        },
        KvLayout::Nhd,
    )?;

    // The tokens so far, request after request, written into their pages.
    let mut tokens = Vec::new();
    for (r, &len) in kv_len.iter().enumerate() {
        let count = len as usize * KV_HEADS * DIM;
        let (k, v) = (numbers(count, 10 + r as u32), numbers(count, 20 + r as u32));
        let slots: Vec<i64> = (0..len as usize)
            .map(|t| {
                let page = indices[indptr[r] as usize + t / PAGE_SIZE] as usize;
                (page * PAGE_SIZE + t % PAGE_SIZE) as i64
            })
            .collect();
        let shape = [len as usize, KV_HEADS, DIM];
        cache.write(
            &context,
            TensorRef::new(&k, &shape)?,
            TensorRef::new(&v, &shape)?,
            &slots,
            1.0,
            1.0,
        )?;
        tokens.push((k, v));
    }

    // Once per step.
    let mut buffer = PlanBuffer::new(&op)?;
    let segments = [Segment::paged(&kv_len)];
    let batch = Batch {
        cu_q: &cu_q,
        num_tokens: 3,
        segments: &segments,
        q_first_pos: None,
    };
    let plan: Plan<'_> = buffer.plan(&op, &batch)?;

    // Once per layer.
    let q = numbers(3 * Q_HEADS * DIM, 1);
    let mut out = vec![0.0f32; q.len()];
    let mut workspace = Workspace::new(&op);
    let shape = [3, Q_HEADS, DIM];
    let args = [SegmentArgs::paged(
        cache.view()?,
        PageTable::Csr {
            indices: &indices,
            indptr: &indptr,
        },
    )];
    plan.run(
        AttentionArgs::new(TensorRef::new(&q, &shape)?, TensorMut::new(&mut out, &shape)?, &args),
        &mut workspace,
    )?;

    let mut largest = 0.0f64;
    for (r, (k, v)) in tokens.iter().enumerate() {
        for head in 0..Q_HEADS {
            let begin = (r * Q_HEADS + head) * DIM;
            let expected = naive(&q[begin..begin + DIM], k, v, head / (Q_HEADS / KV_HEADS));
            for (x, y) in out[begin..begin + DIM].iter().zip(expected) {
                largest = largest.max((f64::from(*x) - y).abs());
            }
        }
    }
    println!(
        "folio {}, {}: largest difference {largest:.1e}",
        folio::version(),
        op.kernel_name()?
    );
    // float32 sums of 64 products of numbers below 1, then of 33 weighted values below 1.
    assert!(largest < 1e-5, "the results differ");
    Ok(())
}

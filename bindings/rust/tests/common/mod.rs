//! A decode of two requests (5 and 20 keys) over pages of 8, whose keys are alike: a row of the result is the mean of its
//! request's values, and a value is its slot.
#![allow(dead_code)]

use folio::*;

pub const PAGE_SIZE: usize = 8;
pub const PAGES: usize = 4;
pub const HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 16;
pub const KV_LEN: [i32; 2] = [5, 20];
pub const CU_Q: [i32; 3] = [0, 1, 2];
pub const PAGE_IDS: [i32; 4] = [3, 0, 2, 1];
pub const INDPTR: [i32; 3] = [0, 1, 4];

pub fn config() -> AttentionConfig {
    let mut config = AttentionConfig::new(HEADS as i32, KV_HEADS as i32, DIM as i32, DType::Float32);
    config.page_size = PAGE_SIZE as i32;
    config
}

pub fn prepare(context: &Context) -> Op {
    Op::prepare(context, &config(), &PrepareOptions::default()).unwrap()
}

pub fn shape() -> KvCacheShape {
    KvCacheShape {
        num_pages: PAGES as i64,
        page_size: PAGE_SIZE as i32,
        num_kv_heads: KV_HEADS as i32,
        head_dim_qk: DIM as i32,
        head_dim_v: DIM as i32,
    }
}

/// A value of every slot is its number.
pub fn filled_cache(context: &Context, layout: KvLayout) -> KvCache<f32> {
    let mut cache = KvCache::new(shape(), layout).unwrap();
    let tokens = PAGES * PAGE_SIZE;
    let k = vec![0.5f32; tokens * KV_HEADS * DIM];
    let v: Vec<f32> = (0..k.len()).map(|i| (i / (KV_HEADS * DIM)) as f32).collect();
    let slots: Vec<i64> = (0..tokens as i64).collect();
    let shape = [tokens, KV_HEADS, DIM];
    let (k, v) = (TensorRef::new(&k, &shape).unwrap(), TensorRef::new(&v, &shape).unwrap());
    cache.write(context, k, v, &slots, 1.0, 1.0).unwrap();
    cache
}

pub fn plan<'a>(buffer: &'a mut PlanBuffer, op: &Op) -> Plan<'a> {
    let segments = [Segment::paged(&KV_LEN)];
    let batch = Batch {
        cu_q: &CU_Q,
        num_tokens: 2,
        segments: &segments,
        q_first_pos: None,
    };
    buffer.plan(op, &batch).unwrap()
}

pub fn csr<'a>(indices: &'a [i32]) -> PageTable<'a> {
    PageTable::Csr {
        indices,
        indptr: &INDPTR,
    }
}

pub fn run(plan: &Plan<'_>, op: &Op, view: CacheView<'_>, table: PageTable<'_>) -> Result<Vec<f32>> {
    let q = vec![1.0f32; 2 * HEADS * DIM];
    let mut out = vec![-7.0f32; q.len()];
    let segments = [SegmentArgs::paged(view, table)];
    let shape = [2, HEADS, DIM];
    let args = AttentionArgs::new(
        TensorRef::new(&q, &shape)?,
        TensorMut::new(&mut out, &shape)?,
        &segments,
    );
    plan.run(args, &mut Workspace::new(op))?;
    Ok(out)
}

/// The mean slot of a request's tokens.
pub fn expected(request: usize) -> f32 {
    let first = INDPTR[request] as usize;
    let sum: usize = (0..KV_LEN[request] as usize)
        .map(|t| PAGE_IDS[first + t / PAGE_SIZE] as usize * PAGE_SIZE + t % PAGE_SIZE)
        .sum();
    sum as f32 / KV_LEN[request] as f32
}

pub fn assert_result(out: &[f32]) {
    for (i, value) in out.iter().enumerate() {
        let mean = expected(i / (HEADS * DIM));
        // Up to 20 equal weights and as many float32 additions of numbers below 32.
        assert!(
            (value - mean).abs() < 24.0 * 32.0 * f32::EPSILON,
            "{i}: {value}, not {mean}"
        );
    }
}

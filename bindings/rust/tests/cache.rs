mod common;

use common::*;
use folio::*;

#[test]
fn caches_are_written_and_copied() {
    let context = Context::cpu(1).unwrap();
    let mut cache = filled_cache(&context, KvLayout::Nhd);
    let page = PAGE_SIZE * KV_HEADS * DIM;
    assert_eq!(cache.v()[page], PAGE_SIZE as f32);
    cache.copy_pages(&context, &[1], &[3]).unwrap();
    assert_eq!(cache.v()[3 * page..], cache.v()[page..2 * page].to_vec()[..]);
    let before = cache.clone();
    for (from, to) in [
        (vec![0], vec![4]),
        (vec![-1], vec![0]),
        (vec![0, 1], vec![2]),
        (vec![0, 1], vec![2, 2]),
    ] {
        assert!(cache.copy_pages(&context, &from, &to).is_err(), "{from:?} {to:?}");
    }
    let token = vec![1.0f32; KV_HEADS * DIM];
    let tensor = TensorRef::new(&token, &[1, KV_HEADS, DIM]).unwrap();
    let beyond = cache.write(&context, tensor, tensor, &[32], 1.0, 1.0).unwrap_err();
    assert_eq!(beyond.status(), Status::InvalidArgument);
    assert!(
        cache.write(&context, tensor, tensor, &[0, 1], 1.0, 1.0).is_err(),
        "two slots for one token"
    );
    assert_eq!(cache.v(), before.v());
    cache.write(&context, tensor, tensor, &[-1], 1.0, 1.0).unwrap();
    assert_eq!(cache.k(), before.k());
}

#[test]
fn fp8_caches_have_scales() {
    let context = Context::cpu(1).unwrap();
    let mut cache = KvCache::<Fp8E4M3>::new(shape(), KvLayout::Hnd).unwrap();
    let token = vec![2.0f32; KV_HEADS * DIM];
    let tensor = TensorRef::new(&token, &[1, KV_HEADS, DIM]).unwrap();
    cache.write(&context, tensor, tensor, &[0], 2.0, 1.0).unwrap();
    assert_eq!(cache.k()[0], Fp8E4M3(0x38)); // 1
    assert_eq!(cache.v()[0], Fp8E4M3(0x40)); // 2
    let mut floats = KvCache::<f32>::new(shape(), KvLayout::Hnd).unwrap();
    assert!(floats.write(&context, tensor, tensor, &[0], 2.0, 1.0).is_err());
}

#[test]
fn shapes_that_no_cache_has() {
    let shape = KvCacheShape {
        num_pages: -1,
        ..shape()
    };
    assert!(KvCache::<f32>::new(shape, KvLayout::Nhd).is_err());
    let shape = KvCacheShape {
        num_pages: i64::MAX,
        ..shape
    };
    assert!(KvCache::<f32>::new(shape, KvLayout::Nhd).is_err());
}

/// An engine's step over slots: rows, slots, writes, then attention over the request table.
#[test]
fn pools_serve_a_decode() {
    let context = Context::cpu(2).unwrap();
    let mut pool = KvPool::new(&KvPoolConfig {
        num_slots: 32,
        page_size: 1,
        num_layers: 1,
        num_kv_heads: KV_HEADS as i32,
        head_dim_qk: DIM as i32,
        head_dim_v: DIM as i32,
        dtype: DType::Float32,
        layout: PoolLayout::TokenMajor,
    })
    .unwrap();
    let mut allocator = TokenAllocator::new(32, 1).unwrap();
    let mut requests = ReqToTokenPool::new(2, 16).unwrap();
    let mut kv_len = vec![0]; // row 0 is the dummy row
    for len in [5, 8] {
        let row = requests.alloc().unwrap().unwrap();
        let slots = allocator.alloc(len).unwrap().unwrap();
        requests.write(row, 0, &slots).unwrap();
        let k = vec![0.5f32; len * KV_HEADS * DIM];
        let v: Vec<f32> = (0..k.len())
            .map(|i| (row * 100) as f32 + (i / (KV_HEADS * DIM)) as f32)
            .collect();
        let slots: Vec<i64> = slots.into_iter().map(i64::from).collect();
        let shape = [len, KV_HEADS, DIM];
        pool.write(
            &context,
            0,
            TensorRef::new(&k, &shape).unwrap(),
            TensorRef::new(&v, &shape).unwrap(),
            &slots,
        )
        .unwrap();
        kv_len.push(len as i32);
    }
    assert_eq!(requests.alloc().unwrap(), None);
    assert_eq!(allocator.available().unwrap(), 32 - 13);
    assert_eq!(allocator.alloc(20).unwrap(), None);

    let mut config = config();
    config.page_size = 1;
    let op = Op::prepare(&context, &config, &PrepareOptions::default()).unwrap();
    let mut buffer = PlanBuffer::new(&op).unwrap();
    let segments = [Segment::paged(&kv_len)];
    let batch = Batch {
        cu_q: &[0, 0, 1, 2],
        num_tokens: 2,
        segments: &segments,
        q_first_pos: None,
    };
    let plan = buffer.plan(&op, &batch).unwrap();
    let out = run(&plan, &op, pool.view(0, 0).unwrap(), requests.table().unwrap()).unwrap();
    assert!((out[0] - 102.0).abs() < 1e-4, "{}", out[0]);
    assert!((out[HEADS * DIM] - 203.5).abs() < 1e-3, "{}", out[HEADS * DIM]);

    assert!(pool.view(1, 0).is_err());
    assert!(pool.set_scales(0, 2.0, 1.0).is_err(), "not an fp8 pool");
    assert!(allocator.free(&[0]).is_err(), "the dummy slot");
    assert!(requests.write(0, 0, &[1]).is_err(), "the dummy row");
    requests.free(1).unwrap();
    assert!(requests.free(1).is_err());
    let next = allocator.alloc_decode(&[9], &[13]).unwrap().unwrap();
    allocator.free(&next).unwrap();
    assert!(allocator.alloc_decode(&[9], &[]).is_err());
}

mod common;

use common::*;
use folio::*;

#[test]
fn decodes_over_every_layout() {
    let context = Context::cpu(2).unwrap();
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let op = prepare(&context);
        let mut buffer = PlanBuffer::new(&op).unwrap();
        let plan = plan(&mut buffer, &op);
        assert!(plan.workspace_size().unwrap() <= op.workspace_size().unwrap());
        let cache = filled_cache(&context, layout);
        assert_result(&run(&plan, &op, cache.view().unwrap(), csr(&PAGE_IDS)).unwrap());
    }
}

#[test]
fn dense_tables_and_lse() {
    let context = Context::cpu(1).unwrap();
    let op = prepare(&context);
    let mut buffer = PlanBuffer::new(&op).unwrap();
    let plan = plan(&mut buffer, &op);
    let cache = filled_cache(&context, KvLayout::Nhd);
    let entries = [3, 9, 9, 0, 2, 1];
    let q = vec![1.0f32; 2 * HEADS * DIM];
    let mut out = vec![-7.0f32; q.len()];
    let mut lse = vec![0.0f32; 2 * HEADS];
    let table = PageTable::Dense {
        entries: &entries,
        num_rows: 2,
        row_stride: 3,
    };
    let segments = [SegmentArgs::paged(cache.view().unwrap(), table)];
    let shape = [2, HEADS, DIM];
    let q = TensorRef::new(&q, &shape).unwrap();
    let mut args = AttentionArgs::new(q, TensorMut::new(&mut out, &shape).unwrap(), &segments);
    args.lse = Some(&mut lse);
    args.sm_scale = 0.25;
    plan.run(args, &mut Workspace::new(&op)).unwrap();
    assert_result(&out);
    // Every logit is 16 * 1.0 * 0.5 * 0.25.
    for (i, lse) in lse.iter().enumerate() {
        let expected = 2.0 + (KV_LEN[i / HEADS] as f32).ln();
        assert!((lse - expected).abs() < 1e-5, "{lse}, not {expected}");
    }
}

#[test]
fn ragged_keys() {
    let context = Context::cpu(1).unwrap();
    let op = prepare(&context);
    let mut buffer = PlanBuffer::new(&op).unwrap();
    let lens = [2, 3];
    let planned = [Segment::ragged(&lens)];
    let batch = Batch {
        cu_q: &CU_Q,
        num_tokens: 2,
        segments: &planned,
        q_first_pos: None,
    };
    let plan = buffer.plan(&op, &batch).unwrap();
    let k = vec![0.5f32; 5 * KV_HEADS * DIM];
    let v: Vec<f32> = (0..k.len()).map(|i| (i / (KV_HEADS * DIM)) as f32).collect();
    let shape = [5, KV_HEADS, DIM];
    let (k, v) = (TensorRef::new(&k, &shape).unwrap(), TensorRef::new(&v, &shape).unwrap());
    let q = vec![1.0f32; 2 * HEADS * DIM];
    let mut out = vec![-7.0f32; q.len()];
    let mut workspace = Workspace::new(&op);
    let mut attend = |indptr: &[i32]| {
        let segments = [SegmentArgs::Ragged { k, v, indptr }];
        let shape = [2, HEADS, DIM];
        let q = TensorRef::new(&q, &shape).unwrap();
        plan.run(
            AttentionArgs::new(q, TensorMut::new(&mut out, &shape).unwrap(), &segments),
            &mut workspace,
        )
    };
    let short = attend(&[0, 2]).unwrap_err();
    assert_eq!(
        short.message(),
        "indptr has 2 offsets; the segment has 2 rows, and one offset more"
    );
    assert_eq!(attend(&[0, 2, 6]).unwrap_err().status(), Status::InvalidArgument);
    attend(&[0, 2, 5]).unwrap();
    assert!((out[0] - 0.5).abs() < 1e-6);
    assert!((out[HEADS * DIM] - 3.0).abs() < 1e-6);
}

#[test]
fn refusals_say_why_and_write_nothing() {
    let context = Context::cpu(1).unwrap();
    let op = prepare(&context);
    let mut buffer = PlanBuffer::new(&op).unwrap();
    let cache = filled_cache(&context, KvLayout::Nhd);

    let error = buffer
        .plan(
            &op,
            &Batch {
                cu_q: &CU_Q,
                num_tokens: 2,
                segments: &[Segment::paged(&[5])],
                q_first_pos: None,
            },
        )
        .unwrap_err();
    assert_eq!(error.message(), "kv_len of segment 0 has 1 elements; it must have 2");
    assert_eq!(
        buffer.plan(&op, &Batch::default()).unwrap_err().status(),
        Status::InvalidArgument
    );
    let backwards = Batch {
        cu_q: &[0, 2, 1],
        num_tokens: 2,
        segments: &[Segment::paged(&KV_LEN)],
        q_first_pos: None,
    };
    assert_eq!(
        buffer.plan(&op, &backwards).unwrap_err().status(),
        Status::InvalidArgument
    );

    let plan = plan(&mut buffer, &op);
    let error = run(&plan, &op, cache.view().unwrap(), csr(&[3, 0, 4, 1])).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(
        error.to_string().contains("is page 4; the cache has 4 pages"),
        "{error}"
    );
    for bad in [i32::MIN, -1, i32::MAX] {
        assert!(run(&plan, &op, cache.view().unwrap(), csr(&[3, 0, bad, 1])).is_err());
    }
    let short = PageTable::Csr {
        indices: &PAGE_IDS,
        indptr: &[0, 1],
    };
    assert!(run(&plan, &op, cache.view().unwrap(), short).is_err());
    let outside = PageTable::Csr {
        indices: &PAGE_IDS,
        indptr: &[0, 1, 400],
    };
    assert!(run(&plan, &op, cache.view().unwrap(), outside).is_err());
    let empty = PageTable::Csr {
        indices: &PAGE_IDS,
        indptr: &[],
    };
    assert_eq!(
        run(&plan, &op, cache.view().unwrap(), empty).unwrap_err().message(),
        "the table's indptr is empty"
    );

    let q = vec![1.0f32; 2 * HEADS * DIM];
    let mut out = vec![-7.0f32; q.len()];
    let segments = [SegmentArgs::paged(cache.view().unwrap(), csr(&PAGE_IDS))];
    let shape = [2, HEADS, DIM];
    let mut args = AttentionArgs::new(
        TensorRef::new(&q, &shape).unwrap(),
        TensorMut::new(&mut out, &shape).unwrap(),
        &segments,
    );
    args.sinks = Some(&[0.0; 3]);
    let error = plan.run(args, &mut Workspace::new(&op)).unwrap_err();
    assert_eq!(error.message(), "sinks has 3 elements; the op has 4 heads");
    let mut args = AttentionArgs::new(
        TensorRef::new(&q, &shape).unwrap(),
        TensorMut::new(&mut out, &shape).unwrap(),
        &segments,
    );
    args.sinks = Some(&[0.0; HEADS]);
    assert!(
        plan.run(args, &mut Workspace::new(&op)).is_err(),
        "the config has no sinks"
    );
    let args = AttentionArgs::new(
        TensorRef::new(&q, &shape).unwrap(),
        TensorMut::new(&mut out, &shape).unwrap(),
        &[],
    );
    assert!(plan.run(args, &mut Workspace::new(&op)).is_err());
    assert!(out.iter().all(|&x| x == -7.0));
}

#[test]
fn tensors_lie_in_their_slices() {
    let data = [0.0f32; 12];
    assert!(TensorRef::new(&data, &[3, 4]).is_ok());
    assert!(TensorRef::new(&data, &[3, 5]).is_err());
    assert!(TensorRef::new(&data, &[1; 6]).is_err(), "six dimensions");
    assert!(TensorRef::new(&data, &[usize::MAX, 2]).is_err());
    assert!(TensorRef::strided(&data, &[3, 2], &[4, 2]).is_ok());
    assert!(
        TensorRef::strided(&data, &[3, 2], &[5, 2]).is_err(),
        "its last element is number 12"
    );
    assert!(TensorRef::strided(&data, &[3], &[usize::MAX]).is_err());
    assert!(TensorRef::strided(&data, &[0, 9], &[4, 2]).is_ok(), "no elements");
    assert!(TensorRef::strided(&data, &[3], &[1, 1]).is_err());
    let mut memory = [0.0f32; 4];
    assert!(TensorMut::new(&mut memory, &[2, 3]).is_err());
}

#[test]
fn kernels_are_explained_and_forced() {
    let context = Context::cpu(1).unwrap();
    let op = prepare(&context);
    let name = op.kernel_name().unwrap();
    let answers = Op::explain(&context, &config()).unwrap();
    let chosen = answers.iter().find(|answer| answer.name == name).unwrap();
    assert!(chosen.available && chosen.refusal.is_none());
    let options = PrepareOptions {
        force_kernel: name.clone(),
        ..Default::default()
    };
    assert_eq!(
        Op::prepare(&context, &config(), &options)
            .unwrap()
            .kernel_name()
            .unwrap(),
        name
    );
    let options = PrepareOptions {
        force_kernel: "no such kernel".into(),
        ..Default::default()
    };
    assert!(Op::prepare(&context, &config(), &options)
        .unwrap_err()
        .to_string()
        .contains("no such kernel"));
    let options = PrepareOptions {
        force_kernel: "a\0b".into(),
        ..Default::default()
    };
    assert!(Op::prepare(&context, &config(), &options).is_err());
    assert_eq!(Context::cpu(-1).unwrap_err().status(), Status::InvalidArgument);
    assert_eq!(Context::cpu(3).unwrap().concurrency().unwrap(), 3);
}

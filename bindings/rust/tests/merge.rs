use folio::*;

const SHAPE: [usize; 3] = [2, 1, 8];

#[test]
fn equal_weights_make_the_mean() {
    let context = Context::cpu(1).unwrap();
    let (a, b) = (vec![1.0f32; 16], vec![3.0f32; 16]);
    let a_lse = [0.0f32, f32::NEG_INFINITY];
    let b_lse = [0.0f32, 1.5];
    let mut out = vec![0.0f32; 16];
    let mut lse = vec![0.0f32; 2];
    let state = |out, lse| StateView {
        out: TensorRef::new(out, &SHAPE).unwrap(),
        lse,
    };
    let (a, b) = (state(&a[..], &a_lse[..]), state(&b[..], &b_lse[..]));
    merge_state(
        &context,
        &a,
        &b,
        TensorMut::new(&mut out, &SHAPE).unwrap(),
        Some(&mut lse),
    )
    .unwrap();
    assert_eq!(out[0], 2.0);
    assert!((lse[0] - 2.0f32.ln()).abs() < 1e-6);
    assert_eq!(out[8], 3.0, "an empty state contributes nothing");
    assert_eq!(lse[1], 1.5);

    let short = StateView { lse: &a_lse[..1], ..a };
    let error = merge_state(&context, &short, &b, TensorMut::new(&mut out, &SHAPE).unwrap(), None).unwrap_err();
    assert_eq!(error.message(), "a.lse has 1 elements; its outputs have 2 rows");
    let error = merge_state(
        &context,
        &a,
        &b,
        TensorMut::new(&mut out, &SHAPE).unwrap(),
        Some(&mut lse[..1]),
    )
    .unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument);
    let flat = TensorMut::new(&mut out, &[16]).unwrap();
    assert!(merge_state(&context, &a, &b, flat, None).is_err());
}

#[test]
fn many_states_are_folded() {
    let context = Context::cpu(1).unwrap();
    // Two tokens, three states, one head.
    let states: Vec<f32> = (0..48).map(|i| (i / 8 % 3) as f32).collect();
    let states_lse = [0.0f32; 6];
    let mut out = vec![0.0f32; 16];
    let tensor = TensorRef::new(&states, &[2, 3, 1, 8]).unwrap();
    merge_states(
        &context,
        tensor,
        &states_lse,
        TensorMut::new(&mut out, &SHAPE).unwrap(),
        None,
    )
    .unwrap();
    assert!(out.iter().all(|x| (x - 1.0).abs() < 1e-6), "{out:?}");
    assert!(merge_states(
        &context,
        tensor,
        &states_lse[1..],
        TensorMut::new(&mut out, &SHAPE).unwrap(),
        None
    )
    .is_err());
}

//! Weights that one backward uses more than once, and micro-batches.

use sessile_gtp::{ReduceScatter, Repeat};
use sessile_plan::{DType, Role, Strategy};

use crate::support::{Case, Values, both, modes};

const POLICIES: [Repeat; 3] = [Repeat::Distinct, Repeat::Drain, Repeat::ReduceOnce];

/// 1, 10, 100: each digit of the sum tells how often a use was added.
const DIGITS: Values = |_, number, _| 10f32.powi(number as i32);

#[test]
fn three_uses_of_one_ten_and_a_hundred_are_a_hundred_and_eleven() {
    for repeat in POLICIES {
        for kind in ReduceScatter::ALL {
            for mode in modes() {
                let case = Case {
                    repeat,
                    uses: 3,
                    mode,
                    rows: 64,
                    microbatches: vec![1, 1, 1],
                    ..Case::new(2, kind)
                };
                let (reduced, _) = both(&case, DIGITS);
                for step in 0..3 {
                    assert!(reduced.floats(step).iter().all(|x| *x == 111.0), "{case:?}, step {step}");
                }
            }
        }
    }
}

#[test]
fn micro_batches_add_up_and_the_next_step_begins_at_zero() {
    for repeat in POLICIES {
        for kind in ReduceScatter::ALL {
            let case =
                Case { repeat, uses: 3, rows: 64, microbatches: vec![4, 4, 1, 4], ..Case::new(2, kind) };
            let (reduced, _) = both(&case, DIGITS);
            for (step, times) in [4.0, 4.0, 1.0, 4.0].into_iter().enumerate() {
                assert!(reduced.floats(step).iter().all(|x| *x == 111.0 * times), "{case:?}, step {step}");
            }
            let once = if repeat == Repeat::ReduceOnce { 4 } else { 3 * 13 };
            assert_eq!(reduced.ready, once, "{case:?}");
        }
    }
}

#[test]
fn thirty_two_micro_batches_of_one_are_thirty_two() {
    for kind in ReduceScatter::ALL {
        let case = Case { rows: 64, microbatches: vec![32, 32], ..Case::new(2, kind) };
        let (reduced, _) = both(&case, |_, _, _| 1.0);
        assert!(reduced.floats(1).iter().all(|x| *x == 32.0), "{kind}");
        assert_eq!(reduced.ready, 64);
    }
}

#[test]
fn a_step_without_uses_leaves_zeros_and_reduces_nothing() {
    for repeat in POLICIES {
        let case = Case {
            repeat,
            uses: 2,
            rows: 64,
            microbatches: vec![1, 0, 1],
            ..Case::new(2, ReduceScatter::OneShot)
        };
        let (reduced, _) = both(&case, DIGITS);
        assert!(reduced.floats(1).iter().all(|x| *x == 0.0), "{repeat:?}");
        assert!(reduced.floats(2).iter().all(|x| *x == 11.0), "{repeat:?}");
        assert_eq!(reduced.ready, if repeat == Repeat::ReduceOnce { 2 } else { 4 }, "{repeat:?}");
    }
}

#[test]
fn distinct_has_buffers_for_each_use_drain_for_one_and_reduce_once_no_reduce_scatter() {
    let requests = |repeat, kind| {
        let case = Case { repeat, uses: 3, strategy: Strategy::PerRequest, ..Case::new(2, kind) };
        let (_, planned) = both(&case, DIGITS);
        let of = |role: Role| planned.trace.requests().filter(|(_, q)| q.spec.role == role).count();
        (of(Role::WgradInput), of(Role::RsOutput) + of(Role::Fp32Output), of(Role::A2aScratch))
    };
    use ReduceScatter::{Fp32A2a, OneShot, Ring, Symmetric};
    for kind in [Ring, Symmetric] {
        assert_eq!(requests(Repeat::Distinct, kind), (3, 3, 0));
        assert_eq!(requests(Repeat::Drain, kind), (1, 1, 0));
        // Gradients of single uses, added at once.
        assert_eq!(requests(Repeat::ReduceOnce, kind), (3, 0, 0));
    }
    assert_eq!(requests(Repeat::Distinct, Fp32A2a), (3, 3, 3));
    assert_eq!(requests(Repeat::Drain, Fp32A2a), (1, 1, 1));
    assert_eq!(requests(Repeat::Distinct, OneShot), (3, 0, 0));
    assert_eq!(requests(Repeat::Drain, OneShot), (1, 0, 0));
}

#[test]
fn policies_round_alike_where_sums_are_exact_and_reduce_once_adds_in_fp32() {
    // 256 and 1 are bf16 numbers, 257 is none: added up in FP32 and rounded once, it is 256.
    let values: Values = |_, number, _| [256.0, 1.0][number as usize];
    let whole = |repeat, wire| {
        let case = Case { repeat, wire, uses: 2, rows: 64, ..Case::new(2, ReduceScatter::OneShot) };
        both(&case, values).0.floats(0)[0]
    };
    for repeat in POLICIES {
        assert_eq!(whole(repeat, DType::F32), 257.0, "{repeat:?}");
    }
    assert_eq!(whole(Repeat::Distinct, DType::Bf16), 257.0);
    assert_eq!(whole(Repeat::ReduceOnce, DType::Bf16), 256.0);
}

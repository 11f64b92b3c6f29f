//! What each kind computes, to the bit.

use half::bf16;
use sessile_gtp::ReduceScatter;
use sessile_plan::{DType, Role};

use crate::support::{Case, Values, both, eager};

/// Numbers of many magnitudes, both signs.
fn mixed(rank: usize, number: u32, element: usize) -> f32 {
    let seed = (rank as u64 * 7919 + u64::from(number)) * 104_729 + element as u64;
    let mut rng = fastrand::Rng::with_seed(seed);
    (rng.f32() - 0.5) * 2.0f32.powi(rng.i32(-12..12))
}

/// As the wire has it.
fn wired(wire: DType, value: f32) -> f32 {
    if wire == DType::Bf16 { bf16::from_f32(value).to_f32() } else { value }
}

/// `main_grad` by the definition: FP32 sums in rank order from rank 0, then `0 + (scale * sum)`.
fn reference(case: &Case, values: Values) -> Vec<u32> {
    let scale = 1.0 / case.ranks.len() as f32;
    let sum = |element| {
        let mut ranks = (0..case.ranks.len()).map(|rank| wired(case.wire, values(rank, 0, element)));
        let first = ranks.next().expect("a rank");
        ranks.fold(first, |sum, x| sum + x)
    };
    (0..case.elements()).map(|element| (0.0 + scale * sum(element)).to_bits()).collect()
}

#[test]
fn fp32_kinds_equal_the_scalar_reference_and_each_other_to_the_bit() {
    for ranks in [1, 2, 3, 4, 8] {
        for wire in [DType::Bf16, DType::F32] {
            for kind in [ReduceScatter::Fp32A2a, ReduceScatter::OneShot] {
                let case = Case { wire, ..Case::new(ranks, kind) };
                let (reduced, _) = both(&case, mixed);
                let want = reference(&case, mixed);
                assert_eq!(reduced.steps[0][..case.elements()], want, "{kind}, {wire}, {ranks} ranks");
            }
        }
    }
}

#[test]
fn fp32_kinds_stay_within_the_bound_of_a_sum_in_double_precision() {
    // A power of two: scaling is exact.
    for ranks in [4usize, 8] {
        for kind in [ReduceScatter::Fp32A2a, ReduceScatter::OneShot] {
            let case = Case { rows: 64, cols: 8, ..Case::new(ranks as u32, kind) };
            let reduced = eager(&case, mixed).floats(0);
            for (element, got) in reduced[..case.elements()].iter().enumerate() {
                let exact = (0..ranks).map(|rank| f64::from(wired(case.wire, mixed(rank, 0, element))));
                let (sum, size) = exact.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                let error = (f64::from(*got) * ranks as f64 - sum).abs();
                let bound = (ranks - 1) as f64 * 2f64.powi(-23) * size;
                assert!(error <= bound, "{kind}: element {element} is off by {error}, more than {bound}");
            }
        }
    }
}

#[test]
fn sums_that_bf16_cannot_hold_are_exact_in_fp32_and_stuck_in_a_ring() {
    let trap: Values = |rank, _, _| if rank == 0 { 256.0 } else { 1.0 };
    let whole = |kind| {
        let case = Case { rows: 128, ..Case::new(8, kind) };
        both(&case, trap).0.floats(0).into_iter().map(|x| x * 8.0).collect::<Vec<_>>()
    };
    for kind in [ReduceScatter::Fp32A2a, ReduceScatter::OneShot] {
        assert!(whole(kind).iter().all(|sum| *sum == 263.0), "{kind}");
    }
    // One rounding to bf16, at the end.
    assert!(whole(ReduceScatter::Symmetric).iter().all(|sum| *sum == 264.0));
    // The ring of the last rank's block begins at rank 0: 256 + 1 is 256 in bf16, seven times.
    assert_eq!(whole(ReduceScatter::Ring).last(), Some(&256.0));
}

#[test]
fn the_mean_of_ones_is_exactly_one_in_groups_that_are_no_power_of_two() {
    for ranks in [3, 6] {
        for kind in ReduceScatter::ALL {
            let case = Case { rows: 96, ..Case::new(ranks, kind) };
            let (reduced, _) = both(&case, |_, _, _| 1.0);
            assert!(reduced.floats(0).iter().all(|x| *x == 1.0), "{kind}, {ranks} ranks");
        }
    }
}

#[test]
fn rows_below_the_matrix_are_zero_at_every_reduce_scatter_although_buffers_begin_as_nan() {
    for kind in ReduceScatter::ALL {
        let case = Case { rows: 1000, cols: 2, microbatches: vec![1, 1], ..Case::new(4, kind) };
        let (reduced, _) = both(&case, |_, _, _| 1.0);
        for step in [0, 1] {
            let floats = reduced.floats(step);
            assert_eq!(floats.len(), 1024 * 2);
            assert!(floats[..2000].iter().all(|x| *x == 1.0), "{kind}");
            assert!(floats[2000..].iter().all(|x| *x == 0.0), "{kind}: {:?}", &floats[2000..]);
        }
    }
}

#[test]
fn each_kind_asks_for_its_own_roles_in_its_own_domains() {
    let asked = |kind| -> Vec<(String, String)> {
        let (_, planned) = both(&Case::new(4, kind), mixed);
        let requests = planned.trace.requests();
        requests.map(|(_, q)| (q.spec.role.to_string(), q.spec.domain.to_string())).collect()
    };
    let pairs = |list: &[(Role, &str)]| -> Vec<(String, String)> {
        list.iter().map(|(role, domain)| (role.to_string(), (*domain).to_owned())).collect()
    };
    let window = "symmetric(g)";
    assert_eq!(
        asked(ReduceScatter::Ring),
        pairs(&[(Role::WgradInput, "default"), (Role::RsOutput, "default")])
    );
    assert_eq!(
        asked(ReduceScatter::Symmetric),
        pairs(&[(Role::WgradInput, window), (Role::RsOutput, window)])
    );
    let a2a = [(Role::WgradInput, "default"), (Role::A2aScratch, "default"), (Role::Fp32Output, "default")];
    assert_eq!(asked(ReduceScatter::Fp32A2a), pairs(&a2a));
    assert_eq!(asked(ReduceScatter::OneShot), pairs(&[(Role::WgradInput, window)]));
}

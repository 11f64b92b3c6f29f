//! The baselines, by hand.

use sessile_plan::{
    Baselines, DType, PlanError, PointKind, RequestId, Runner, StepCut, Strategy, baseline_bytes, plan,
    validate,
};

use crate::support::{backward, four, opaque, options, point, request, symmetric, trace};

const K: u64 = 256;

#[test]
fn four_runners_take_the_maximum_of_each_generation() {
    let bytes = baseline_bytes(&four(), StepCut::Barrier);
    // Sizes 4 2 4 2: one arena of 4; {4, 4} and {2, 2}; {4, 2}, {2}, {4}. Rings of two for each size.
    let expected =
        Baselines { per_request: 12 * K, ring2: Some(12 * K), generations: [4 * K, 6 * K, 10 * K] };
    assert_eq!(bytes, expected);
}

/// ```text
///  default, bf16   r0: 2 + 1   r2: 1        generation 0: 3
///  default, f32    r0: 2       r2: 4        generation 0: 4       dtypes do not share
///  symmetric(g)    r0: 1                    generation 0: 1
///  r1 needs nothing and is not counted; r3 is generation 1 with bf16 5
/// ```
#[test]
fn capacity_is_summed_by_dtype_and_domain_and_idle_runners_are_not_counted() {
    let f32_request = |id, units| {
        let mut made = request(id, units);
        made.spec.dtype = DType::F32;
        made.spec.shape = vec![units, 64];
        made
    };
    let given = trace(
        vec![
            opaque(
                "r0",
                vec![request(0, 2), f32_request(1, 2), request(2, 1), symmetric(request(3, 1), "g")],
            ),
            opaque("r1", vec![]),
            opaque("r2", vec![request(4, 5)]),
            opaque("r3", vec![request(5, 1), f32_request(6, 4)]),
        ],
        vec![0, 1, 2, 3],
    );
    let two = plan(&given, &options(Strategy::Generations(2), 2, StepCut::Barrier)).unwrap();
    assert_eq!(two.arenas.iter().map(|arena| arena.bytes / K).collect::<Vec<_>>(), [3 + 4 + 5, 1]);
    // Bump offsets in request order: bf16 of generation 0 from 0, its f32 from 3, generation 1 from 7.
    let offsets: Vec<u64> = two.views.iter().map(|view| view.offset / K).collect();
    assert_eq!(offsets, [0, 3, 2, 0, 7, 0, 3]);
    assert_eq!(validate(&given, &two), []);
}

#[test]
fn every_request_is_rounded_up_to_256_bytes_on_its_own() {
    let mut odd = request(0, 1);
    odd.spec.shape = vec![129];
    let given = trace(vec![opaque("r", vec![odd, request(1, 1)])], vec![0]);
    assert_eq!(baseline_bytes(&given, StepCut::Barrier).generations, [3 * K; 3]);
}

#[test]
fn a_request_that_outlives_its_runner_gets_its_own_bytes_in_every_baseline() {
    let spanning = |r: u32| Runner {
        name: format!("r{r}"),
        requests: vec![request(2 * r, 1), request(2 * r + 1, 2)],
        points: if r == 0 { vec![] } else { vec![point(0, PointKind::Release(RequestId(2 * r - 1)))] },
    };
    let given = trace(vec![spanning(0), spanning(1), spanning(2)], vec![0, 1, 2]);
    // Requests 1 and 3 outlive runners 0 and 1; request 5 does not.
    let bytes = baseline_bytes(&given, StepCut::Barrier);
    assert_eq!(bytes.per_request, 9 * K);
    assert_eq!(bytes.generations, [(3 + 4) * K, (3 + 1 + 4) * K, (1 + 1 + 3 + 4) * K]);
    assert_eq!(bytes.ring2, Some((2 + 2 + 4) * K));
}

/// ```text
///  one key, ring:2     r0: a b    r1: c    r2: d e       slots 0 1 | 0 | 1 0
/// ```
#[test]
fn ring_slots_go_round_in_capture_order() {
    let given = trace(
        vec![
            backward("r0", vec![request(0, 1), request(1, 1)]),
            backward("r2", vec![request(3, 1), request(4, 1)]),
            backward("r1", vec![request(2, 1)]),
        ],
        vec![0, 2, 1],
    );
    let made = plan(&given, &options(Strategy::Ring(2), 2, StepCut::Barrier)).unwrap();
    assert_eq!(made.views.iter().map(|view| view.offset / K).collect::<Vec<_>>(), [0, 1, 0, 1, 0]);
    assert_eq!(validate(&given, &made), []);
}

/// A ring of two is full after one runner of two writers, so the next runner waits: less than what depth 2 asks for.
#[test]
fn a_ring_that_reuses_nearer_than_the_depth_can_be_below_its_bound() {
    let runner = |at: u32| backward(&format!("r{at}"), vec![request(2 * at, 1), request(2 * at + 1, 1)]);
    let given = trace((0..12).map(runner).collect(), (0..12).collect());
    let bytes = |strategy| {
        let made = plan(&given, &options(strategy, 2, StepCut::Barrier)).unwrap();
        (made.bytes(), made.lower_bound_bytes())
    };
    let (own, bound) = bytes(Strategy::Sessile);
    assert_eq!(own, bound);
    assert!(bytes(Strategy::Ring(2)).0 < bound);
    assert!(bytes(Strategy::Ring(4)).0 >= own, "this ring keeps the depth");
}

#[test]
fn a_ring_shorter_than_the_writers_of_one_runner_is_refused_by_name() {
    let given = trace(vec![opaque("big", (0..3).map(|id| request(id, 1)).collect())], vec![0]);
    let refused = plan(&given, &options(Strategy::Ring(2), 2, StepCut::Barrier)).unwrap_err();
    let expected =
        PlanError::RingTooSmall { slots: 2, runner: "big".into(), writers: 3, first: RequestId(0) };
    assert_eq!(refused, expected);
    assert_eq!(baseline_bytes(&given, StepCut::Barrier).ring2, None);
    assert!(plan(&given, &options(Strategy::Ring(3), 2, StepCut::Barrier)).is_ok());
}

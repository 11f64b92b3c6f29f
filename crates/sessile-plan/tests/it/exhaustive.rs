//! All small plans: up to five requests of two sizes in two domains, in up to three runners, through the validator.
//!
//! Requests are enumerated as multisets of (runner, domain, size): the order of requests inside a runner only
//! permutes equal bump offsets.

use sessile_plan::{PlanError, StepCut, Strategy, Trace, plan, validate};

use crate::support::{backward, opaque, options, request, strategies, symmetric, trace};

const RUNNERS: usize = 3;
const KINDS: usize = RUNNERS * 2 * 2;

/// Launch orders: each runner once, one again, all again in reverse.
const LAUNCHES: [&[u32]; 3] = [&[0, 1, 2], &[0, 1, 2, 1], &[0, 1, 2, 2, 1, 0]];

#[derive(Default)]
struct Count {
    plans: u32,
    fenced: u32,
    refused: u32,
}

#[test]
fn all_small_plans_pass_the_validator_under_the_barrier() {
    all(StepCut::Barrier);
}

#[test]
fn all_small_plans_pass_the_validator_under_the_wrap() {
    all(StepCut::Wrap);
}

fn all(cut: StepCut) {
    let mut count = Count::default();
    multisets(0, 5, &mut Vec::new(), &mut |kinds| {
        for (number, launches) in LAUNCHES.iter().enumerate() {
            // Runners without recorded order only in the plainest launch order: they are never fenced.
            for recorded in if number == 0 { &[true, false][..] } else { &[true] } {
                check(&build(kinds, launches, *recorded), cut, &mut count);
            }
        }
    });
    let Count { plans, fenced, refused } = count;
    eprintln!("{cut:?}: {plans} plans validated, {fenced} of them with fences; {refused} rings refused");
    assert!(plans > 300_000 && fenced > 10_000 && refused > 10_000, "{plans} {fenced} {refused}");
}

fn multisets(from: usize, left: usize, kinds: &mut Vec<usize>, each: &mut impl FnMut(&[usize])) {
    each(kinds);
    if left > 0 {
        for kind in from..KINDS {
            kinds.push(kind);
            multisets(kind, left - 1, kinds, each);
            kinds.pop();
        }
    }
}

fn build(kinds: &[usize], launches: &[u32], recorded: bool) -> Trace {
    let mut requests = vec![Vec::new(); RUNNERS];
    for (id, kind) in kinds.iter().enumerate() {
        let made = request(id as u32, 1 + (kind / (2 * RUNNERS)) as u64);
        let made = if (kind / RUNNERS).is_multiple_of(2) { made } else { symmetric(made, "dense") };
        requests[kind % RUNNERS].push(made);
    }
    let runner = if recorded { backward } else { opaque };
    let runners =
        requests.into_iter().enumerate().map(|(r, requests)| runner(&format!("r{r}"), requests)).collect();
    trace(runners, launches.to_vec())
}

fn check(given: &Trace, cut: StepCut, count: &mut Count) {
    for strategy in strategies() {
        let mut bytes = Vec::new();
        // To a baseline, depth is only whether launches are serial.
        for depth in 1..=if strategy == Strategy::Sessile { 3 } else { 2 } {
            let made = match plan(given, &options(strategy, depth, cut)) {
                Ok(made) => made,
                Err(PlanError::RingTooSmall { .. }) => {
                    count.refused += 1;
                    continue;
                }
                Err(error) => panic!("{error}: {given:?}"),
            };
            let violations = validate(given, &made);
            assert!(violations.is_empty(), "{violations:?} in {made:?} of {given:?}");
            assert!(made.bytes() >= made.lower_bound_bytes());
            bytes.push(made.bytes());
            count.plans += 1;
            count.fenced += u32::from(!made.fences.is_empty());
        }
        if strategy == Strategy::Sessile {
            assert!(bytes.is_sorted(), "more depth took fewer bytes: {bytes:?} of {given:?}");
        } else {
            assert!(bytes.windows(2).all(|pair| pair[0] == pair[1]), "depth changed a baseline of {given:?}");
        }
    }
}

//! Sizes beyond today's models. Times are printed, not asserted: the machine is not ours.

use std::time::Instant;

use sessile_plan::{
    PlanOptions, Reason, RequestId, Runner, StepCut, Strategy, Trace, check_trace, plan, validate,
};

use crate::{
    models::quarter,
    support::{CUTS, backward, opaque, options, request, strategies, trace},
};

/// `runners` backwards of `each` requests, of sizes that vary without a pattern.
fn varied(runners: u32, each: u32) -> Trace {
    let size = |id: u32| u64::from(id.wrapping_mul(2_654_435_761) >> 20 & 63) + 1;
    let runners: Vec<Runner> = (0..runners)
        .map(|r| {
            backward(&format!("r{r}"), (r * each..(r + 1) * each).map(|id| request(id, size(id))).collect())
        })
        .collect();
    let launches = (0..runners.len() as u32).collect();
    trace(runners, launches)
}

#[test]
fn ten_thousand_requests_are_planned_in_one_go() {
    let given = varied(1000, 10);
    for depth in 1..=3 {
        for cut in CUTS {
            let begun = Instant::now();
            let made = plan(&given, &options(Strategy::Sessile, depth, cut)).unwrap();
            eprintln!(
                "10000 requests, depth {depth}, {cut:?}: {:?}; {} bytes, bound {}, {} fences",
                begun.elapsed(),
                made.bytes(),
                made.lower_bound_bytes(),
                made.fences.len()
            );
            assert!(made.bytes() >= made.lower_bound_bytes());
            // Greedy packing is not optimal, but it is not far off either.
            assert!(made.bytes() * 4 < made.lower_bound_bytes() * 5);
        }
    }
    for strategy in strategies() {
        let begun = Instant::now();
        if let Ok(made) = plan(&given, &options(strategy, 2, StepCut::Wrap)) {
            eprintln!("10000 requests, {strategy}: {:?}, {} fences", begun.elapsed(), made.fences.len());
            assert_eq!(made.views.len(), 10_000);
        }
    }
}

#[test]
fn two_thousand_requests_are_validated() {
    let given = varied(200, 10);
    for cut in CUTS {
        for strategy in strategies() {
            let Ok(made) = plan(&given, &options(strategy, 2, cut)) else { continue };
            let begun = Instant::now();
            assert_eq!(validate(&given, &made), []);
            eprintln!("2000 requests, {strategy}, {cut:?}: validated in {:?}", begun.elapsed());
        }
    }
}

#[test]
fn the_model_is_planned_and_validated() {
    let given = quarter(false);
    let begun = Instant::now();
    let made = plan(&given, &PlanOptions::default()).unwrap();
    let planned = begun.elapsed();
    assert_eq!(validate(&given, &made), []);
    eprintln!(
        "nemotron4-quarter by module: planned in {planned:?}, validated in {:?}",
        begun.elapsed() - planned
    );
}

/// All at once in one runner: nothing to search, and nothing quadratic.
#[test]
fn a_hundred_thousand_requests_of_one_runner_are_stacked() {
    let given = trace(vec![opaque("all", (0..100_000).map(|id| request(id, 1)).collect())], vec![0]);
    let made = plan(&given, &PlanOptions::default()).unwrap();
    assert_eq!(made.bytes(), made.lower_bound_bytes());
    assert_eq!(made.bytes(), 100_000 * 256);
}

/// The same requests in a step of many launches, as a hostile trace would have them: bounded work, a right plan.
#[test]
fn many_launches_of_spanning_requests_stay_within_the_budget() {
    let count = 2000;
    let release = |id| crate::support::point(0, sessile_plan::PointKind::Release(RequestId(id)));
    let mut runners: Vec<Runner> =
        (0..count).map(|r| opaque(&format!("r{r}"), vec![request(r, 1 + u64::from(r % 3))])).collect();
    // The last runner releases everything: all requests live to the end.
    runners.push(Runner { name: "last".into(), requests: vec![], points: (0..count).map(release).collect() });
    let given = trace(runners, (0..=count).collect());
    assert_eq!(check_trace(&given), Ok(()));
    let made = plan(&given, &PlanOptions::default()).unwrap();
    assert_eq!(made.bytes(), made.lower_bound_bytes());
    let reasons: Vec<Reason> = validate(&given, &made).iter().map(|violation| violation.reason).collect();
    assert_eq!(reasons, []);
}

/// A small trace whose last runner is launched over and over: the check grows with the launches, not with their square.
#[test]
fn many_launches_of_few_requests_are_validated() {
    let runners = (0..16).map(|r| backward(&format!("r{r}"), vec![request(2 * r, 2), request(2 * r + 1, 1)]));
    let mut given = trace(runners.collect(), (0..16).collect());
    given.steps[0].extend([11; 20_000]);
    for cut in CUTS {
        let made = plan(&given, &options(Strategy::Sessile, 2, cut)).unwrap();
        let begun = Instant::now();
        let found = validate(&given, &made);
        eprintln!("20000 launches, {cut:?}: validated in {:?}", begun.elapsed());
        // Within the limit of work, which a search of all launches for each would exceed by far.
        assert_eq!(found, []);
    }
}

//! Steps that launch a runner more than once, as micro-batches do.

use sessile_plan::{StepCut, Strategy, Trace, View, baseline_bytes, plan, validate};

use crate::support::{backward, options, request, trace};

fn twice(units: &[u64]) -> Trace {
    let count = units.len() as u32;
    let runners =
        (0..count).map(|r| backward(&format!("r{r}"), vec![request(r, units[r as usize])])).collect();
    trace(runners, (0..count).chain(0..count).collect())
}

fn apart(a: &View, b: &View) -> bool {
    a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset
}

/// ```text
///  launch        0   1   2   3   0   1   2   3
///  generation    0   1   0   1   0   1   0   1      two alternating arenas of one unit are enough
/// ```
#[test]
fn depth_counts_between_all_launches_where_that_costs_nothing() {
    let given = twice(&[1, 1, 1, 1]);
    let made = plan(&given, &options(Strategy::Sessile, 2, StepCut::Barrier)).unwrap();
    assert_eq!(made.bytes(), 2 * 256);
    assert!(apart(&made.views[3], &made.views[0]), "the seam between the micro-batches shares bytes");
    assert_eq!(validate(&given, &made), []);
}

/// ```text
///  launch        0   1   2   0   1   2
///  generation    0   1   0   0   1   0      at the seam, launches 2 and 3 share an arena
/// ```
/// Keeping the depth there too would take three units, more than the alternating arenas take.
#[test]
fn depth_gives_way_between_later_launches_rather_than_be_larger_than_alternating_arenas() {
    let given = twice(&[1, 1, 1]);
    let made = plan(&given, &options(Strategy::Sessile, 2, StepCut::Barrier)).unwrap();
    assert_eq!(made.bytes(), 2 * 256);
    assert_eq!(made.bytes(), baseline_bytes(&given, StepCut::Barrier).generations[1]);
    assert_eq!(made.lower_bound_bytes(), 2 * 256);
    assert_eq!(validate(&given, &made), []);
    // The circle makes no such exception: there the step cut is a seam like any other.
    let around = plan(&given, &options(Strategy::Sessile, 2, StepCut::Wrap)).unwrap();
    assert_eq!(around.bytes(), 3 * 256);
    assert_eq!(validate(&given, &around), []);
}

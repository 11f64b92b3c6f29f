//! Runners really overlap where the depth allows it, and do not where it does not.

use sessile_model::{TrainConfig, config::Overlap};

use crate::support::{graphs, scheduled, tiny};

const SCHEDULES: [&str; 4] = ["threads", "random", "writers-early", "readers-early"];

#[test]
fn runners_overlap_at_depth_two() {
    for schedule in SCHEDULES {
        let outcome = graphs(&scheduled(&TrainConfig { depth: 2, steps: 8, ..tiny() }, schedule, 3));
        assert!(outcome.overlap.cross_runner_pairs > 0, "{schedule}: no runner ran beside another");
    }
}

#[test]
fn runners_that_share_an_arena_do_not_overlap_at_depth_one() {
    for schedule in SCHEDULES {
        let outcome = graphs(&scheduled(&TrainConfig { depth: 1, steps: 8, ..tiny() }, schedule, 3));
        assert_eq!(outcome.overlap.sharing_arena, 0, "{schedule}");
        assert!(outcome.plan.fences.is_empty(), "{schedule}: the launch order implies every reuse");
    }
}

#[test]
fn overlap_off_makes_launches_serial() {
    let outcome = graphs(&TrainConfig { overlap: Overlap::Off, steps: 8, ..tiny() });
    assert_eq!(outcome.overlap.cross_runner_pairs, 0);
    assert!(outcome.plan.fences.is_empty());
}

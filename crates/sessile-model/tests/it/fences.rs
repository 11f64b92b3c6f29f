//! Every fence of a plan is necessary: without it the checker reports a race, and an adversarial order computes a
//! wrong value.

use std::collections::BTreeSet;

use sessile_model::{Execution, TrainConfig, config::GraphScope};
use sessile_plan::{DType, Fence, StepCut, Strategy};
use sessile_runtime::RuntimeError;

use crate::support::{Outcome, eager, graphs_with, scheduled, tiny};

fn without(config: &TrainConfig, omit: Option<Fence>) -> Outcome {
    graphs_with(config, &omit.into_iter().collect::<BTreeSet<_>>(), |trainer| {
        (1..config.steps)
            .map(|_| trainer.train_step(Execution::Replay))
            .collect::<Result<Vec<_>, RuntimeError>>()
    })
}

/// Takes away each fence in turn; gives how many there were.
fn each_fence_is_necessary(name: &str, config: &TrainConfig) -> usize {
    let want = eager(config);
    let whole = without(config, None);
    assert_eq!(whole.steps, want, "{name}: with all fences");
    for fence in &whole.plan.fences {
        let mut wrong = Vec::new();
        for schedule in ["writers-early", "readers-early"] {
            let outcome = without(&scheduled(config, schedule, 5), Some(*fence));
            let races: Vec<String> = outcome.report.violations.iter().map(ToString::to_string).collect();
            assert!(!races.is_empty(), "{name}: {fence:?} is missing and the checker reports nothing");
            if outcome.steps != want {
                wrong.push(schedule);
            }
        }
        assert!(
            !wrong.is_empty(),
            "{name}: {fence:?} is missing and both adversarial orders compute the same"
        );
    }
    whole.plan.fences.len()
}

#[test]
fn each_fence_of_module_runners_is_necessary() {
    let fences = each_fence_is_necessary("module", &TrainConfig { layers: 3, ..tiny() });
    assert!(fences > 0, "depth 2 needs fences");
}

#[test]
fn each_fence_of_layer_runners_is_necessary() {
    let config = TrainConfig { layers: 4, graph_scope: GraphScope::Layer, ..tiny() };
    assert!(each_fence_is_necessary("layer", &config) > 0);
}

#[test]
fn each_fence_of_alternating_arenas_is_necessary() {
    for generations in [1, 2] {
        let config = TrainConfig { layers: 3, strategy: Strategy::Generations(generations), ..tiny() };
        assert!(each_fence_is_necessary(&format!("generations:{generations}"), &config) > 0);
    }
}

#[test]
fn each_fence_of_a_ring_is_necessary() {
    let config = TrainConfig { layers: 4, strategy: Strategy::Ring(1), ..tiny() };
    each_fence_is_necessary("ring:1", &config);
}

#[test]
fn each_fence_of_microbatches_in_flight_is_necessary() {
    // Two slots add into one main_grad: their order needs fences even where no bytes are shared.
    for strategy in [Strategy::Sessile, Strategy::PerRequest] {
        // Four: the first two additions to a zeroed gradient commute. F32: sums of a few bf16 values are exact.
        let config = TrainConfig {
            microbatches: 4,
            microbatches_in_flight: 2,
            strategy,
            wgrad_dtype: DType::F32,
            ..tiny()
        };
        let fences = each_fence_is_necessary(&format!("1F1B, {strategy}"), &config);
        assert!(fences > 0, "{strategy}");
    }
}

#[test]
fn each_fence_at_the_wrapped_step_cut_is_necessary() {
    let config =
        TrainConfig { layers: 1, microbatches: 2, step_cut: StepCut::Wrap, depth: 3, steps: 4, ..tiny() };
    each_fence_is_necessary("wrap", &config);
}

#[test]
fn each_fence_at_depth_three_is_necessary() {
    let config = TrainConfig { layers: 3, depth: 3, ..tiny() };
    each_fence_is_necessary("depth 3", &config);
}

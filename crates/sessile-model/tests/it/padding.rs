//! Sizes that do not divide work through padding.

use sessile_model::TrainConfig;

use crate::support::{assert_clean, assert_equal, eager, graphs, tiny};

#[test]
fn sizes_that_no_group_divides_train_alike_in_both_executions() {
    for (hidden, heads, ffn, gtp) in [(22, 2, 37, 3), (9, 3, 17, 4), (25, 5, 11, 2)] {
        let config = TrainConfig { hidden, heads, ffn, gtp, ranks: gtp, steps: 5, ..tiny() };
        let context = format!("hidden {hidden}, ffn {ffn}, gtp {gtp}");
        let outcome = graphs(&config);
        assert_equal(&context, &eager(&config), &outcome.steps);
        assert_clean(&context, &outcome.report);
    }
}

#[test]
fn the_loss_does_not_depend_on_how_weights_are_sharded_beyond_rounding() {
    let losses: Vec<f64> = [1, 2, 4]
        .into_iter()
        .map(|gtp| {
            let config = TrainConfig { gtp, ranks: 4, hidden: 22, heads: 2, ffn: 37, steps: 6, ..tiny() };
            eager(&config).last().expect("six steps").loss
        })
        .collect();
    for loss in &losses[1..] {
        assert!((loss - losses[0]).abs() < 0.02, "{losses:?}");
    }
}

#[test]
fn padding_stays_out_of_the_gradient() {
    // 20 rows over 4 ranks: the last two shards are padding alone, and nothing of it may be NaN or move the loss.
    let config = TrainConfig { hidden: 20, heads: 2, ffn: 20, gtp: 4, ranks: 4, steps: 12, ..tiny() };
    let steps = eager(&config);
    assert!(steps.iter().all(|step| step.loss.is_finite()), "{steps:?}");
    assert!(steps.last().expect("steps").loss < steps[0].loss);
}

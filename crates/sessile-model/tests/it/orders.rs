//! Launches in another order than the sealed one stay right to the bit, and are counted.

use std::collections::BTreeSet;

use sessile_hal::Device;
use sessile_model::{Execution, Pass, StepResult, TrainConfig, Trainer};
use sessile_plan::Strategy;
use sessile_runtime::RuntimeError;

use crate::support::{Outcome, assert_clean, assert_equal, eager_with, graphs_with, scheduled, tiny};

/// A program that runs eagerly or from graphs.
trait Program: Sync {
    fn run<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        execution: Execution,
    ) -> Result<Vec<StepResult>, RuntimeError>;
}

fn check(name: &str, config: &TrainConfig, program: &impl Program) -> Outcome {
    let eager = eager_with(config, |trainer| {
        let mut steps = vec![trainer.train_step(Execution::Eager)?];
        steps.extend(program.run(trainer, Execution::Eager)?);
        Ok(steps)
    });
    let outcome = graphs_with(config, &BTreeSet::new(), |trainer| program.run(trainer, Execution::Replay));
    assert_equal(name, &eager, &outcome.steps);
    assert_clean(name, &outcome.report);
    outcome
}

/// Every schedule, the strategies that reuse most, depths that overlap.
fn everywhere(name: &str, program: &impl Program) {
    for strategy in [Strategy::Sessile, Strategy::Generations(1), Strategy::Ring(2)] {
        for depth in [1, 2, 3] {
            for (at, schedule) in ["threads", "random", "writers-early", "readers-early"].iter().enumerate() {
                let config = scheduled(&TrainConfig { strategy, depth, ..tiny() }, schedule, at as u64);
                let context = format!("{name}, {strategy}, depth {depth}, {schedule}");
                let outcome = check(&context, &config, program);
                assert!(outcome.deviations > 0, "{context}: no deviation was counted");
            }
        }
    }
}

/// Steps whose backward goes through units in an order of its own.
struct Backwards(fn(Vec<usize>) -> Vec<usize>);

impl Program for Backwards {
    fn run<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        execution: Execution,
    ) -> Result<Vec<StepResult>, RuntimeError> {
        let mut steps = Vec::new();
        for changed in [true, false, true] {
            trainer.begin_step()?;
            trainer.forward(0, execution)?;
            let order = trainer.unit_order(Pass::Backward);
            let order = if changed { (self.0)(order) } else { order };
            trainer.backward_through(0, &order, execution)?;
            steps.push(trainer.finish_step()?);
        }
        Ok(steps)
    }
}

#[test]
fn a_skipped_runner_stays_right() {
    everywhere(
        "skipped",
        &Backwards(|order| {
            order.into_iter().enumerate().filter(|(at, _)| *at != 1).map(|(_, u)| u).collect()
        }),
    );
}

#[test]
fn a_repeated_runner_stays_right() {
    everywhere("repeated", &Backwards(|order| order.into_iter().flat_map(|unit| [unit, unit]).collect()));
}

#[test]
fn runners_in_reverse_stay_right() {
    everywhere("reversed", &Backwards(|order| order.into_iter().rev().collect()));
}

#[test]
fn a_runner_again_at_the_end_stays_right() {
    everywhere(
        "first again at the end",
        &Backwards(|order| {
            let first = order[0];
            order.into_iter().chain([first, first]).collect()
        }),
    );
}

/// Backward stops half-way; the step begins anew with the next tokens.
struct Aborted;

impl Program for Aborted {
    fn run<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        execution: Execution,
    ) -> Result<Vec<StepResult>, RuntimeError> {
        let mut steps = Vec::new();
        for done in 0..3 {
            trainer.begin_step()?;
            trainer.forward(0, execution)?;
            let order = trainer.unit_order(Pass::Backward);
            trainer.backward_through(0, &order[..done], execution)?;
            trainer.abort_step()?;
            steps.push(trainer.train_step(execution)?);
        }
        Ok(steps)
    }
}

#[test]
fn a_step_aborted_in_the_middle_and_begun_anew_stays_right() {
    everywhere("aborted", &Aborted);
}

/// Backward stops half-way, everything is joined, and it goes on where it stopped.
struct Resumed;

impl Program for Resumed {
    fn run<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        execution: Execution,
    ) -> Result<Vec<StepResult>, RuntimeError> {
        let mut steps = Vec::new();
        for _ in 0..3 {
            trainer.begin_step()?;
            trainer.forward(0, execution)?;
            trainer.abort_step()?;
            trainer.backward(0, execution)?;
            steps.push(trainer.finish_step()?);
        }
        Ok(steps)
    }
}

#[test]
fn a_step_that_pauses_and_goes_on_needs_no_deviation() {
    for schedule in ["threads", "writers-early"] {
        let outcome = check(schedule, &scheduled(&tiny(), schedule, 1), &Resumed);
        assert_eq!(outcome.deviations, 0);
    }
}

/// A forward alone between the steps, as an evaluation does.
struct Evaluated;

impl Program for Evaluated {
    fn run<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        execution: Execution,
    ) -> Result<Vec<StepResult>, RuntimeError> {
        let mut steps = Vec::new();
        for _ in 0..3 {
            trainer.begin_step()?;
            trainer.forward(0, execution)?;
            trainer.forward(0, execution)?;
            trainer.backward(0, execution)?;
            steps.push(trainer.finish_step()?);
        }
        Ok(steps)
    }
}

#[test]
fn an_evaluation_between_stays_right() {
    everywhere("evaluated", &Evaluated);
}

/// A forward stops after its first unit, which has prefetched for the second; the optimizer steps; the next forward
/// goes on with the second.
struct Overtaken;

impl Program for Overtaken {
    fn run<D: Device>(
        &self,
        trainer: &mut Trainer<'_, D>,
        execution: Execution,
    ) -> Result<Vec<StepResult>, RuntimeError> {
        trainer.begin_step()?;
        trainer.forward_through(0, &[0], execution)?;
        let mut steps = vec![trainer.finish_step()?];
        trainer.begin_step()?;
        let rest = trainer.unit_order(Pass::Forward).split_off(1);
        trainer.forward_through(0, &rest, execution)?;
        trainer.backward(0, execution)?;
        steps.push(trainer.finish_step()?);
        Ok(steps)
    }
}

#[test]
fn a_weight_prefetched_before_an_optimizer_step_is_not_used_after_it() {
    for schedule in ["threads", "random"] {
        check(schedule, &scheduled(&tiny(), schedule, 1), &Overtaken);
    }
}

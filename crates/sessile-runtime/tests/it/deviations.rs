//! Launches in another order than the sealed one stay right to the bit, are counted, and race with nothing.

use sessile_host::{Mode, Order};
use sessile_plan::{DType, PlanOptions, StepCut, Strategy};
use sessile_runtime::check::check;

use crate::support::job_log;
use crate::support::program::{Grad, Module, Program, Run, run};

/// Five runners of different sizes and dtypes; the second hands a buffer to the third; two share an accumulator.
fn program() -> Program {
    let grad = |elements, accumulator, dtype| Grad { dtype, ..Grad::reduce_scatter(elements, accumulator) };
    let module = |grads, carries| Module { grads, carries, completes: true };
    Program {
        ranks: 2,
        modules: vec![
            module(vec![grad(64, 1, DType::F32), grad(16, 2, DType::Bf16)], false),
            module(vec![grad(128, 2, DType::Bf16)], true),
            module(vec![grad(48, 3, DType::F32), grad(48, 1, DType::F32)], false),
            module(vec![], false),
            module(vec![grad(100, 3, DType::F32)], false),
        ],
        launches: vec![4, 3, 1, 2, 0],
        accumulators: 4,
    }
}

/// Steps of launches, and how many of them are not the next one of `4 3 1 2 0`.
fn scenarios() -> Vec<(&'static str, Vec<Vec<usize>>, u64)> {
    let sealed = vec![4, 3, 1, 2, 0];
    vec![
        ("as sealed", vec![sealed.clone(); 3], 0),
        ("one skipped", vec![vec![4, 3, 2, 0], sealed.clone()], 1),
        ("one repeated", vec![vec![4, 3, 1, 1, 2, 2, 0], sealed.clone()], 2),
        ("reversed", vec![vec![0, 2, 1, 3, 4], sealed.clone()], 6),
        ("aborted and resumed", vec![vec![4, 3, 1], sealed.clone()], 1),
        ("aborted, and resumed in the middle", vec![vec![4, 3, 1, 2], vec![1, 2, 0], sealed.clone()], 1),
        ("the last alone", vec![vec![0], vec![0], sealed], 2),
    ]
}

fn all_options() -> Vec<PlanOptions> {
    let strategies = [
        Strategy::Sessile,
        Strategy::Generations(2),
        Strategy::Generations(1),
        Strategy::Ring(2),
        Strategy::PerRequest,
    ];
    let mut all = Vec::new();
    for strategy in strategies {
        for depth in 1..=3 {
            for step_cut in [StepCut::Barrier, StepCut::Wrap] {
                all.push(PlanOptions { strategy, depth, step_cut, ..PlanOptions::default() });
            }
        }
    }
    all
}

#[test]
fn any_launch_order_gives_the_eager_bits_without_a_race_under_every_strategy_depth_and_cut() {
    let program = program();
    for (scenario, (what, steps, deviations)) in scenarios().into_iter().enumerate() {
        let right = run(&program, Mode::Threads { workers: 2 }, &Run::Eager, &steps);
        for (at, options) in all_options().into_iter().enumerate() {
            // One mode each, so that every scenario meets every mode.
            let mode = match (at + scenario) % 4 {
                0 => Mode::Threads { workers: 2 },
                1 => Mode::Scheduled { seed: at as u64, order: Order::Random },
                2 => Mode::Scheduled { seed: 0, order: Order::WritersEarly },
                _ => Mode::Scheduled { seed: 0, order: Order::ReadersEarly },
            };
            let ended = run(&program, mode, &Run::Replayed(options.clone(), vec![]), &steps);
            let context = format!("{what}, {options:?}, {mode:?}");
            for (rank, right) in ended.iter().zip(&right) {
                assert_eq!(rank.bits, right.bits, "{context}");
                assert_eq!(rank.counters.order_deviations, deviations, "{context}");
                let launches: usize = steps.iter().map(Vec::len).sum();
                assert_eq!(rank.counters.replays, launches as u64, "{context}");
            }
            let report = check(&job_log(ended.into_iter().map(|rank| rank.log).collect()));
            assert!(report.is_clean(), "{context}: {report}");
            assert!(report.launches > 0, "{context}");
        }
    }
}

#[test]
fn fifty_steps_as_sealed_give_the_bits_of_fifty_eager_steps() {
    let program = program();
    let steps = vec![program.launches.clone(); 50];
    let right = run(&program, Mode::Threads { workers: 2 }, &Run::Eager, &steps);
    let how = Run::Replayed(PlanOptions { step_cut: StepCut::Wrap, ..PlanOptions::default() }, vec![]);
    let ended = run(&program, Mode::Threads { workers: 2 }, &how, &steps);
    for (rank, right) in ended.iter().zip(&right) {
        assert_eq!(rank.bits, right.bits);
        assert_eq!(rank.counters.order_deviations, 0);
    }
}

//! Eager and captured training agree to the bit, at the first and the fiftieth replay.

use std::collections::BTreeMap;

use sessile_model::{
    StepResult, TrainConfig,
    config::{GraphScope, ModuleKind, Overlap},
};
use sessile_plan::{DType, StepCut, Strategy};

use crate::{
    cover::pairwise,
    support::{assert_clean, assert_equal, eager, graphs, scheduled, tiny},
};

const GTP: [u32; 4] = [1, 2, 3, 4];
const SCOPES: [GraphScope; 2] = [GraphScope::Module, GraphScope::Layer];
const MODULES: [&[ModuleKind]; 3] =
    [&[ModuleKind::Attention, ModuleKind::Mlp], &[ModuleKind::Attention], &[ModuleKind::Mlp]];
const STRATEGIES: [Strategy; 5] = [
    Strategy::Sessile,
    Strategy::Generations(1),
    Strategy::Generations(2),
    Strategy::Ring(2),
    Strategy::PerRequest,
];
const DEPTHS: [u32; 3] = [1, 2, 3];
const CUTS: [StepCut; 2] = [StepCut::Barrier, StepCut::Wrap];
/// Micro-batches, and how many of them in flight.
const MICROBATCHES: [(u32, u32); 3] = [(1, 1), (3, 1), (3, 2)];
const SCHEDULES: [&str; 4] = ["threads", "random", "writers-early", "readers-early"];
const OVERLAPS: [Overlap; 2] = [Overlap::On, Overlap::Off];
const DTYPES: [DType; 2] = [DType::Bf16, DType::F32];

/// The discovery, and fifty replays of every runner.
const STEPS: u32 = 51;

fn config(row: &[usize]) -> TrainConfig {
    let gtp = GTP[row[0]];
    let (microbatches, microbatches_in_flight) = MICROBATCHES[row[6]];
    let config = TrainConfig {
        ranks: if gtp == 3 { 3 } else { 4 },
        gtp,
        graph_scope: SCOPES[row[1]],
        graph_modules: MODULES[row[2]].to_vec(),
        strategy: STRATEGIES[row[3]],
        depth: DEPTHS[row[4]],
        step_cut: CUTS[row[5]],
        microbatches,
        microbatches_in_flight,
        overlap: OVERLAPS[row[8]],
        wgrad_dtype: DTYPES[row[9]],
        steps: STEPS.div_ceil(microbatches),
        ..tiny()
    };
    let seed = row.iter().fold(1, |seed, &value| seed * 7 + value as u64);
    scheduled(&config, SCHEDULES[row[7]], seed)
}

/// Eager steps do not depend on how graphs are made, so they are run once.
#[derive(Default)]
struct References(BTreeMap<(u32, u32, u32, bool), Vec<StepResult>>);

impl References {
    fn get(&mut self, config: &TrainConfig) -> &[StepResult] {
        let key = (
            config.gtp,
            config.microbatches,
            config.microbatches_in_flight,
            config.wgrad_dtype == DType::F32,
        );
        self.0.entry(key).or_insert_with(|| eager(config))
    }
}

fn compare(references: &mut References, row: &[usize]) {
    let config = config(row);
    let context = format!("row {row:?}: {config:?}");
    let outcome = graphs(&config);
    assert_equal(&context, references.get(&config), &outcome.steps);
    assert_clean(&context, &outcome.report);
    let violations = sessile_plan::validate(&outcome.trace, &outcome.plan);
    assert!(violations.is_empty(), "{context}: {}", violations[0]);
    assert_eq!(outcome.deviations, 0, "{context}");
    let uses = u64::from(config.steps) * u64::from(config.microbatches);
    assert!(outcome.ready.iter().all(|&ready| ready == uses), "{context}: grad-ready {:?}", outcome.ready);
}

#[test]
fn eager_and_replayed_steps_agree_for_every_pair_of_options() {
    let sizes = [
        GTP.len(),
        SCOPES.len(),
        MODULES.len(),
        STRATEGIES.len(),
        DEPTHS.len(),
        CUTS.len(),
        MICROBATCHES.len(),
        SCHEDULES.len(),
        OVERLAPS.len(),
        DTYPES.len(),
    ];
    let rows = pairwise(&sizes, |_| true);
    let mut references = References::default();
    for row in &rows {
        compare(&mut references, row);
    }
    println!("{} configurations, {STEPS} steps each over all micro-batches", rows.len());
}

/// Every combination. Runs for long, so it only runs when `SESSILE_FULL` is set; `cargo xtask test --full` sets it.
#[test]
fn eager_and_replayed_steps_agree_for_all_options() {
    if std::env::var_os("SESSILE_FULL").is_none() {
        println!("skipped: SESSILE_FULL is not set");
        return;
    }
    let mut references = References::default();
    let mut count = 0;
    // Overlap off and f32 gradients are covered pairwise; the rest in full.
    for gtp in 0..GTP.len() {
        for scope in 0..SCOPES.len() {
            for modules in 0..MODULES.len() {
                for strategy in 0..STRATEGIES.len() {
                    for depth in 0..DEPTHS.len() {
                        for cut in 0..CUTS.len() {
                            for microbatches in 0..2 {
                                for schedule in 0..SCHEDULES.len() {
                                    let row = [
                                        gtp,
                                        scope,
                                        modules,
                                        strategy,
                                        depth,
                                        cut,
                                        microbatches,
                                        schedule,
                                        0,
                                        0,
                                    ];
                                    compare(&mut references, &row);
                                    count += 1;
                                    if count % 100 == 0 {
                                        println!("{count} configurations agree");
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    println!("{count} configurations agree");
}

//! Eager and captured training agree to the bit, at the first and the fiftieth replay.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

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
struct References(Mutex<BTreeMap<Key, Vec<StepResult>>>);

/// What eager steps depend on: group size, micro-batches, those in flight, gradients in f32.
type Key = (u32, u32, u32, bool);

impl References {
    fn get(&self, config: &TrainConfig) -> Vec<StepResult> {
        let key = (
            config.gtp,
            config.microbatches,
            config.microbatches_in_flight,
            config.wgrad_dtype == DType::F32,
        );
        let mut known = self.0.lock().expect("no reference panicked");
        known.entry(key).or_insert_with(|| eager(config)).clone()
    }
}

fn compare(references: &References, row: &[usize]) {
    let config = config(row);
    let context = format!("row {row:?}: {config:?}");
    let outcome = graphs(&config);
    assert_equal(&context, &references.get(&config), &outcome.steps);
    assert_clean(&context, &outcome.report);
    let violations = sessile_plan::validate(&outcome.trace, &outcome.plan);
    assert!(violations.is_empty(), "{context}: {}", violations[0]);
    assert_eq!(outcome.deviations, 0, "{context}");
    let uses = u64::from(config.steps) * u64::from(config.microbatches);
    assert!(outcome.ready.iter().all(|&ready| ready == uses), "{context}: grad-ready {:?}", outcome.ready);
}

/// Compares all rows, two at a time, and says how far it is.
fn compare_all(rows: &[Vec<usize>]) {
    let (references, next) = (References::default(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compare(&references, row);
                    let done = next.load(Ordering::Relaxed);
                    if done.is_multiple_of(200) {
                        println!("{done} of {} configurations", rows.len());
                    }
                }
            });
        }
    });
    println!("{} configurations agree, {STEPS} steps each over all micro-batches", rows.len());
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
    compare_all(&pairwise(&sizes, |_| true));
}

/// Every combination. Runs for long, so it only runs when `SESSILE_FULL` is set; `cargo xtask test --full` sets it.
#[test]
fn eager_and_replayed_steps_agree_for_all_options() {
    if std::env::var_os("SESSILE_FULL").is_none() {
        println!("skipped: SESSILE_FULL is not set");
        return;
    }
    // One micro-batch in flight, overlap on, bf16 gradients: the others are covered pairwise.
    let sizes = [
        GTP.len(),
        SCOPES.len(),
        MODULES.len(),
        STRATEGIES.len(),
        DEPTHS.len(),
        CUTS.len(),
        2,
        SCHEDULES.len(),
        1,
        1,
    ];
    let mut rows = vec![vec![]];
    for size in sizes {
        rows = rows.iter().flat_map(|row| (0..size).map(move |at| [&row[..], &[at]].concat())).collect();
    }
    compare_all(&rows);
}

//! Kinds of reduce-scatter, experts, repeated weights and captured heads: eager, discovered and replayed steps agree.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use sessile_model::{
    Execution, ReduceScatter, Repeat, StepResult, TrainConfig, Wanted,
    config::{GraphScope, ModuleKind},
};
use sessile_plan::{DType, Fence, StepCut, Strategy};
use sessile_runtime::RuntimeError;

use crate::{
    cover::pairwise,
    support::{
        Outcome, assert_clean, assert_equal, eager, eager_counted, graphs, graphs_with, scheduled, tiny,
    },
};

const GTP: [u32; 3] = [1, 2, 4];
const EGTP: [u32; 3] = [4, 2, 1];
const KINDS: [Wanted; 5] = [
    Wanted::Auto,
    Wanted::Exactly(ReduceScatter::Ring),
    Wanted::Exactly(ReduceScatter::Symmetric),
    Wanted::Exactly(ReduceScatter::Fp32A2a),
    Wanted::Exactly(ReduceScatter::OneShot),
];
const MTP: [u32; 3] = [0, 1, 2];
const REPEATS: [Repeat; 3] = [Repeat::Drain, Repeat::Distinct, Repeat::ReduceOnce];
const SEQ: [&[u64]; 2] = [&[8], &[8, 5]];
const MODULES: [&[ModuleKind]; 3] = [
    &[ModuleKind::Attention, ModuleKind::Mlp, ModuleKind::Moe],
    &[ModuleKind::Moe],
    &[ModuleKind::Attention, ModuleKind::Mlp],
];
/// Micro-batches, and how many of them in flight.
const MICROBATCHES: [(u32, u32); 3] = [(1, 1), (3, 1), (3, 2)];
const STRATEGIES: [Strategy; 5] = [
    Strategy::Sessile,
    Strategy::Generations(1),
    Strategy::Generations(2),
    Strategy::Ring(3),
    Strategy::PerRequest,
];
const DEPTHS: [u32; 3] = [2, 1, 3];
const CUTS: [StepCut; 2] = [StepCut::Barrier, StepCut::Wrap];
const SCOPES: [GraphScope; 2] = [GraphScope::Module, GraphScope::Layer];
const SCHEDULES: [&str; 4] = ["threads", "random", "writers-early", "readers-early"];
const DTYPES: [DType; 2] = [DType::Bf16, DType::F32];

const STEPS: u32 = 7;

fn config(row: &[usize]) -> TrainConfig {
    let (microbatches, microbatches_in_flight) = MICROBATCHES[row[8]];
    let config = TrainConfig {
        experts: 3,
        ranks: 4,
        gtp: GTP[row[0]],
        egtp: Some(EGTP[row[1]]),
        reduce_scatter: KINDS[row[2]],
        expert_reduce_scatter: Some(KINDS[row[3]]),
        mtp: MTP[row[4]],
        graph_heads: row[5] == 1,
        repeat: REPEATS[row[6]],
        seq: SEQ[row[7]].to_vec(),
        microbatches,
        microbatches_in_flight,
        strategy: STRATEGIES[row[9]],
        depth: DEPTHS[row[10]],
        graph_scope: SCOPES[row[12]],
        wgrad_dtype: DTYPES[row[13]],
        step_cut: CUTS[row[14]],
        graph_modules: MODULES[row[15]].to_vec(),
        steps: STEPS,
        ..tiny()
    };
    let seed = row.iter().fold(1, |seed: u64, &value| seed.wrapping_mul(7) + value as u64);
    scheduled(&config, SCHEDULES[row[11]], seed)
}

/// What eager steps depend on, as text.
fn key(config: &TrainConfig) -> String {
    let TrainConfig { gtp, egtp, reduce_scatter, expert_reduce_scatter, mtp, repeat, seq, .. } = config;
    format!(
        "{gtp} {egtp:?} {reduce_scatter} {expert_reduce_scatter:?} {mtp} {repeat:?} {seq:?} {} {} {}",
        config.microbatches, config.microbatches_in_flight, config.wgrad_dtype
    )
}

type References = Mutex<BTreeMap<String, (Vec<StepResult>, Vec<u64>)>>;

fn compare(references: &References, row: &[usize]) {
    let config = config(row);
    config.check().expect("allowed");
    let context = format!("row {row:?}: {config:?}");
    let known = references.lock().expect("no reference panicked").get(&key(&config)).cloned();
    let (steps, ready) = known.unwrap_or_else(|| {
        let made = eager_counted(&config);
        references.lock().expect("no reference panicked").insert(key(&config), made.clone());
        made
    });
    let outcome = graphs(&config);
    assert_equal(&context, &steps, &outcome.steps);
    assert_eq!(ready, outcome.ready, "{context}: grad-ready");
    assert_clean(&context, &outcome.report);
    let violations = sessile_plan::validate(&outcome.trace, &outcome.plan);
    assert!(violations.is_empty(), "{context}: {}", violations[0]);
    // Without a barrier between steps, another sequence length is a deviation.
    if config.step_cut == StepCut::Barrier || config.seq.len() == 1 {
        assert_eq!(outcome.deviations, 0, "{context}");
    }
}

#[test]
fn eager_and_replayed_steps_agree_for_every_pair_of_kinds_experts_and_repeats() {
    let sizes = [
        GTP.len(),
        EGTP.len(),
        KINDS.len(),
        KINDS.len(),
        MTP.len(),
        2,
        REPEATS.len(),
        SEQ.len(),
        MICROBATCHES.len(),
        STRATEGIES.len(),
        DEPTHS.len(),
        SCHEDULES.len(),
        SCOPES.len(),
        DTYPES.len(),
        CUTS.len(),
        MODULES.len(),
    ];
    let rows = pairwise(&sizes, |_| true);
    let (references, next) = (References::default(), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compare(&references, row);
                }
            });
        }
    });
    println!("{} configurations agree, {STEPS} steps each", rows.len());
}

/// Everything at once, small.
fn all(dense: ReduceScatter, expert: ReduceScatter) -> TrainConfig {
    TrainConfig {
        experts: 4,
        ranks: 4,
        gtp: 4,
        egtp: Some(2),
        mtp: 2,
        graph_heads: true,
        reduce_scatter: Wanted::Exactly(dense),
        expert_reduce_scatter: Some(Wanted::Exactly(expert)),
        ..tiny()
    }
}

#[test]
fn a_use_with_buffers_of_its_own_adds_the_same_bits_as_one_that_waits() {
    for kind in ReduceScatter::ALL {
        let drain = eager(&all(kind, kind));
        assert_eq!(eager(&TrainConfig { repeat: Repeat::Distinct, ..all(kind, kind) }), drain, "{kind}");
    }
}

#[test]
fn kinds_that_sum_in_fp32_train_to_the_same_bits() {
    let a2a = eager(&all(ReduceScatter::Fp32A2a, ReduceScatter::Fp32A2a));
    assert_eq!(eager(&all(ReduceScatter::OneShot, ReduceScatter::OneShot)), a2a);
    assert_eq!(eager(&all(ReduceScatter::Fp32A2a, ReduceScatter::OneShot)), a2a);
    assert_ne!(eager(&all(ReduceScatter::Ring, ReduceScatter::Ring)), a2a, "a ring rounds at every hop");
}

#[test]
fn an_output_layer_used_three_times_in_one_graph_asks_for_one_input_unless_uses_are_distinct() {
    for (repeat, inputs) in [(Repeat::Drain, 1), (Repeat::Distinct, 3)] {
        let outcome = graphs(&TrainConfig { repeat, ..all(ReduceScatter::Ring, ReduceScatter::Ring) });
        let head = outcome.trace.runners.iter().find(|runner| runner.name == "head.backward");
        let head = head.expect("heads are captured");
        let of = |role: &str| {
            let all = head.requests.iter().filter(|q| q.spec.weight == "output");
            all.filter(|q| q.spec.role.to_string() == role).count()
        };
        assert_eq!((of("wgrad_input"), of("rs_output")), (inputs, inputs), "{repeat:?}");
    }
}

/// Takes away some fences, one at a time.
fn sampled_fences_are_necessary(name: &str, config: &TrainConfig, sample: usize) -> usize {
    let without = |config: &TrainConfig, omit: Option<Fence>| -> Outcome {
        graphs_with(config, &omit.into_iter().collect::<BTreeSet<_>>(), |trainer| {
            let replayed = config.seq.len() as u32..config.steps;
            replayed.map(|_| trainer.train_step(Execution::Replay)).collect::<Result<Vec<_>, RuntimeError>>()
        })
    };
    let want = eager(config);
    let whole = without(config, None);
    assert_eq!(whole.steps, want, "{name}: with all fences");
    let fences = &whole.plan.fences;
    let stride = fences.len().div_ceil(sample).max(1);
    for fence in fences.iter().step_by(stride) {
        let mut wrong = false;
        for schedule in ["writers-early", "readers-early"] {
            let outcome = without(&scheduled(config, schedule, 5), Some(*fence));
            assert!(
                !outcome.report.violations.is_empty(),
                "{name}: {fence:?} is missing and nothing is reported"
            );
            wrong |= outcome.steps != want;
        }
        assert!(wrong, "{name}: {fence:?} is missing and both adversarial orders compute the same");
    }
    fences.len()
}

#[test]
fn sampled_fences_of_every_kind_are_necessary() {
    use ReduceScatter::{Fp32A2a, OneShot, Ring, Symmetric};
    let mut total = 0;
    for (dense, expert) in [(Ring, Ring), (Symmetric, Fp32A2a), (Fp32A2a, Symmetric), (OneShot, OneShot)] {
        for repeat in [Repeat::Drain, Repeat::Distinct] {
            // Two micro-batches: the first two additions to a zeroed gradient commute.
            let config = TrainConfig {
                repeat,
                wgrad_dtype: DType::F32,
                microbatches: 2,
                steps: 3,
                ..all(dense, expert)
            };
            total += sampled_fences_are_necessary(&format!("{dense}, {expert}, {repeat:?}"), &config, 3);
        }
    }
    assert!(total > 0, "none of the configurations needs a fence");
}

#[test]
fn sampled_fences_of_shared_layers_and_micro_batches_are_necessary() {
    // Micro-batches in flight and depths of prediction add into one main_grad from graphs of their own.
    let config = TrainConfig {
        microbatches: 4,
        microbatches_in_flight: 2,
        strategy: Strategy::PerRequest,
        wgrad_dtype: DType::F32,
        steps: 3,
        ..all(ReduceScatter::Fp32A2a, ReduceScatter::Ring)
    };
    assert!(sampled_fences_are_necessary("1F1B", &config, 4) > 0);
}

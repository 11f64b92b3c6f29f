//! The simulator: the same runtime as a training run, on a clock of its own.

use std::collections::BTreeMap;

use sessile_gtp::{ReduceScatter, Wanted};
use sessile_host::Contention;
use sessile_model::{
    TrainConfig,
    bench::Apart,
    config::{GraphScope, Mode},
    simulate::{
        Candidate, GroupShape, KindSet, LayerShape, ModelShape, ModuleShape, PhaseTimes, SimulateConfig,
        Simulated, Speeds, WeightShape, auto_depth, built_in, depth_of_trace, depth_text, replay, simulate,
        simulate_proxy,
    },
    train,
};
use sessile_plan::{DType, Domain, PlanOptions, Role, Trace, trace_digest, validate};
use sessile_runtime::check::check;

use crate::support::{TEXT, tiny};

fn weight(name: &str, rows: u64, cols: u64) -> WeightShape {
    WeightShape {
        name: name.to_owned(),
        rows,
        cols,
        group: None,
        experts: None,
        tokens: None,
        uses: 1,
        fp32: false,
    }
}

/// `layers` alike, of modules with these weights, over a dense group of 16 and an expert group of 4, 16 apart.
fn model(layers: u32, modules: &[(&str, Vec<WeightShape>)]) -> ModelShape {
    let group = |name: &str, size, stride| GroupShape { name: name.to_owned(), size, stride };
    let module = |(name, weights): &(&str, Vec<WeightShape>)| ModuleShape {
        name: (*name).to_owned(),
        weights: weights.clone(),
    };
    ModelShape {
        name: "test".to_owned(),
        tokens: 512,
        groups: vec![group("dense", 16, 1), group("expert", 4, 16)],
        layers: vec![LayerShape { name: None, count: layers, modules: modules.iter().map(module).collect() }],
    }
}

fn mixed(layers: u32) -> ModelShape {
    let expert = |name: &str| WeightShape {
        group: Some("expert".to_owned()),
        experts: Some(2),
        tokens: Some(64),
        ..weight(name, 250, 96)
    };
    model(
        layers,
        &[
            ("experts", vec![expert("fc2"), expert("fc1")]),
            ("attention", vec![weight("proj", 256, 256), weight("qkv", 700, 256)]),
        ],
    )
}

fn run(config: &SimulateConfig) -> Simulated {
    simulate(config).unwrap_or_else(|error| panic!("{error}"))
}

fn times(simulated: &Simulated, rank: usize) -> Vec<(u64, u64)> {
    simulated.spans[rank].iter().map(|span| (span.begin, span.end)).collect()
}

#[test]
fn one_rank_stands_for_64_in_trace_plan_and_times() {
    for with_gathered in [false, true] {
        let folded = SimulateConfig { with_gathered, ..SimulateConfig::new(mixed(3)) };
        assert_eq!(folded.ranks, 64);
        let unfolded = SimulateConfig { folded: false, ..folded.clone() };
        let (one, all) = (run(&folded), run(&unfolded));
        assert_eq!((one.ran, all.ran), (1, 64));
        assert_eq!(one.trace, all.trace);
        assert_eq!(one.plan, all.plan);
        assert_eq!((one.backward, one.sync, one.optimizer), (all.backward, all.sync, all.optimizer));
        let expected = times(&one, 0);
        assert!(expected.len() > 40, "{}", expected.len());
        for rank in 0..64 {
            assert_eq!(times(&all, rank), expected, "rank {rank}");
        }
        let report = check(&all.log);
        assert_eq!(report.violations.len(), 0, "{:?}", report.violations.first());
    }
}

#[test]
fn simulation_and_training_agree_on_requests_and_plan() {
    let kinds = [Wanted::Exactly(ReduceScatter::Ring), Wanted::Auto, Wanted::Exactly(ReduceScatter::Fp32A2a)];
    for (reduce_scatter, graph_scope) in
        kinds.into_iter().zip([GraphScope::Module, GraphScope::Layer, GraphScope::Module])
    {
        let config = TrainConfig { mode: Mode::Graphs, steps: 2, reduce_scatter, graph_scope, ..tiny() };
        let trained = train(&config, TEXT, &|_| ()).expect("trains").graphs.expect("has graphs");
        let simulation = SimulateConfig::new(mixed(1));
        let simulated = simulate_proxy(&config, &simulation).expect("simulates");
        assert_eq!(simulated.ran, 1, "one rank stands for all");
        // All but the durations, which one measured and the other modelled.
        let bare = |trace: &Trace| Trace { durations_ns: Vec::new(), ..trace.clone() };
        assert_eq!(bare(&simulated.trace), bare(&trained.trace));
        assert_eq!(simulated.trace.durations_ns.len(), simulated.trace.runners.len());
        assert_eq!(simulated.plan.digest(), trained.plan.digest());
        assert!(simulated.backward.total_ns > 0);
    }
}

/// Only GEMMs and links take time.
fn ideal() -> Speeds {
    Speeds { memory_gbs: 0, kernel_us: 0, launch_us: 0, graph_launch_us: 0, ..Speeds::default() }
}

#[test]
fn serial_launches_expose_their_last_reduce_scatter_to_the_nanosecond() {
    // One weight a runner: 4·rows·cols·tokens flop, then rows·cols·2·15/16 bytes and 20 us.
    let shape = model(5, &[("only", vec![weight("w", 1024, 512)])]);
    let mut config = SimulateConfig { speeds: ideal(), ..SimulateConfig::new(shape) };
    let gemm = (2 * 1024 * 512 * 512_u64 * 1_000_000_000).div_ceil(1_200_000_000_000_000);
    let reduce = 20_000 + (1024 * 512 * 2 * 15 / 16_u64).div_ceil(500);
    config.plan.depth = 1;
    let serial = run(&config).backward;
    assert_eq!((serial.compute_ns, serial.exposed_ns), (5 * 2 * gemm, 5 * reduce));
    assert_eq!((serial.total_ns, serial.idle_ns), (5 * (2 * gemm + reduce), 0));
    config.plan.depth = 3;
    let overlapped = run(&config).backward;
    assert_eq!(overlapped.compute_ns, serial.compute_ns);
    assert!(overlapped.exposed_ns < serial.exposed_ns, "{overlapped:?}");
}

fn contention(fraction: f64) -> Contention {
    Contention::from_fraction(fraction).expect("a fraction")
}

/// What `bench graphs` predicts from measured times is what the clock says of a stack of equal layers, whether reduce-scatters
/// are shorter than the compute beside them or longer.
#[test]
fn the_prediction_of_a_stack_is_that_of_the_virtual_clock() {
    let layers = 6;
    for tokens in [512, 65_536] {
        let shape = ModelShape { tokens, ..model(layers, &[("only", vec![weight("w", 1024, 512)])]) };
        let mut config = SimulateConfig { speeds: ideal(), ..SimulateConfig::new(shape) };
        config.plan.depth = 1;
        let serial = run(&config).backward;
        let apart = Apart {
            layers,
            compute_ns: serial.compute_ns,
            no_reduce_ns: serial.compute_ns,
            reduce_ns: serial.exposed_ns,
        };
        assert_eq!(apart.reduce_ns > apart.compute_ns, tokens == 512, "{apart:?}");
        for (depth, overlapped) in [(1, false), (2, true)] {
            for fraction in [0.0, 0.1, 0.5, 1.0] {
                config.plan.depth = depth;
                config.speeds.contention = contention(fraction);
                let backward = run(&config).backward;
                let what = format!("{tokens} tokens, depth {depth}, contention {fraction}: {backward:?}");
                assert_eq!((backward.compute_ns, backward.idle_ns), (serial.compute_ns, 0), "{what}");
                let exposed = apart.exposed_ns(overlapped, config.speeds.contention);
                // Each kernel ends at a whole nanosecond.
                assert!(
                    (backward.exposed_ns as f64 - exposed).abs() <= f64::from(layers),
                    "{what} {exposed}"
                );
            }
        }
    }
}

#[test]
fn contention_exposes_more_until_overlap_gains_nothing() {
    for name in ["nemotron4-quarter", "dsv3"] {
        let model = built_in(name, 0, false).expect("known");
        let at = |fraction, depth| {
            let mut config = SimulateConfig::new(model.clone());
            config.plan.depth = depth;
            config.speeds.contention = contention(fraction);
            run(&config).backward
        };
        let times = [0.0, 0.25, 0.5, 0.75, 1.0].map(|fraction| at(fraction, 2));
        for pair in times.windows(2) {
            assert!(
                pair[0].total_ns < pair[1].total_ns && pair[0].exposed_ns < pair[1].exposed_ns,
                "{pair:?}"
            );
            assert_eq!(pair[0].compute_ns, pair[1].compute_ns, "{name}");
        }
        for backward in times {
            let PhaseTimes { total_ns, compute_ns, exposed_ns, idle_ns, .. } = backward;
            assert_eq!(compute_ns + exposed_ns + idle_ns, total_ns, "{name}");
        }
        let (serial, nothing) = (at(1.0, 1), times[4]);
        assert_eq!(
            nothing.total_ns,
            nothing.compute_ns + nothing.communication_ns + nothing.idle_ns,
            "{name}"
        );
        assert_eq!((nothing.total_ns, nothing.exposed_ns), (serial.total_ns, serial.exposed_ns), "{name}");
        assert_eq!(times[0], run(&SimulateConfig::new(model)).backward, "{name}: none is the default");
    }
}

#[test]
fn what_a_large_model_asks_for_is_what_its_shapes_say() {
    let config = SimulateConfig {
        scope: GraphScope::Layer,
        ..SimulateConfig::new(built_in("nemotron4-quarter", 0, false).expect("known"))
    };
    let simulated = run(&config);
    assert_eq!((simulated.trace.runners.len(), simulated.trace.requests().count()), (96, 96 * 4 * 2));
    let baselines = sessile_plan::baseline_bytes(&simulated.trace, config.plan.step_cut);
    let gib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 30));
    assert_eq!(baselines.generations.map(gib), ["0.43", "0.87", "1.30"]);
    assert_eq!(validate(&simulated.trace, &simulated.plan), []);
    let again = run(&config);
    assert_eq!(trace_digest(&again.trace), trace_digest(&simulated.trace));
    assert_eq!(times(&again, 0), times(&simulated, 0));
}

#[test]
fn every_built_in_model_runs_in_both_scopes_with_and_without_gathers() {
    for (name, mtp, heads) in
        [("nemotron4-340b", 0, false), ("hybrid-mamba-moe", 0, false), ("dsv3", 2, true)]
    {
        for scope in [GraphScope::Module, GraphScope::Layer] {
            for with_gathered in [false, true] {
                let model = built_in(name, mtp, heads).expect("known");
                let simulated = run(&SimulateConfig { scope, with_gathered, ..SimulateConfig::new(model) });
                let gathers = simulated.trace.requests().filter(|(_, r)| r.spec.role == Role::GatheredWeight);
                assert_eq!(gathers.count() > 0, with_gathered, "{name}");
                assert!(simulated.backward.total_ns > 0 && simulated.optimizer.total_ns > 0);
            }
        }
    }
}

#[test]
fn replicas_are_summed_and_cost_more_the_more_there_are() {
    let sync = |ranks| run(&SimulateConfig { ranks, ..SimulateConfig::new(mixed(2)) }).sync.total_ns;
    let times = [64, 128, 256, 4096].map(sync);
    assert!(times[0] > 0 && times.is_sorted_by(|a, b| a < b), "{times:?}");
    let alone = SimulateConfig::new(built_in("nemotron4-quarter", 0, false).expect("known"));
    assert_eq!(run(&alone).sync.total_ns, 0, "no replicas");
}

#[test]
fn deeper_is_never_more_exposed_and_the_table_decides() {
    let config = SimulateConfig { speeds: ideal(), ..SimulateConfig::new(mixed(6)) };
    let auto = auto_depth(&config, None, &|_| ()).expect("chooses");
    let at = |dense, expert| {
        let depth = BTreeMap::from([("dense".to_owned(), dense), ("expert".to_owned(), expert)]);
        auto.candidates.iter().find(|tried| tried.by_group && tried.depth == depth).expect("tried")
    };
    assert_eq!(auto.candidates.len(), 9 + 3);
    for dense in 1..=3 {
        for expert in 1..=3 {
            let here = at(dense, expert);
            if dense < 3 {
                assert!(at(dense + 1, expert).backward_ns <= here.backward_ns, "{here:?}");
            }
            if expert < 3 {
                assert!(at(dense, expert + 1).backward_ns <= here.backward_ns, "{here:?}");
            }
        }
    }
    let chosen = &auto.candidates[auto.chosen];
    let least = auto.candidates.iter().map(|c| c.exposed_fraction).fold(f64::MAX, f64::min);
    assert!(chosen.exposed_fraction <= least + 0.005 + 1e-9);
    assert_eq!(auto.simulated.plan.bytes(), chosen.bytes);
    let smallest = auto.candidates.iter().map(|c| c.bytes).min().expect("nine");
    let tight = auto_depth(&config, Some(smallest), &|_| ()).expect("fits");
    assert_eq!(tight.candidates[tight.chosen].bytes, smallest);
    let error = auto_depth(&config, Some(smallest - 1), &|_| ()).expect_err("nothing fits").to_string();
    assert!(error.contains("--memory-limit") && error.contains("qkv wgrad_input"), "{error}");
}

#[test]
fn the_other_kind_set_asks_for_other_buffers() {
    let mut config = SimulateConfig::new(mixed(1));
    let roles = |simulated: &Simulated, set: KindSet| {
        let trace = set.apply(simulated.trace.clone());
        let mut roles: Vec<String> = trace
            .requests()
            .filter(|(_, request)| request.spec.group.as_deref() != Some("expert"))
            .filter(|(_, request)| request.spec.weight.ends_with("qkv"))
            .map(|(_, request)| {
                format!("{} {} {}", request.spec.role, request.spec.dtype, request.spec.domain)
            })
            .collect();
        roles.sort();
        roles.join(", ")
    };
    config.reduce_scatter = Wanted::Exactly(ReduceScatter::Fp32A2a);
    let fp32 = run(&config);
    assert_eq!(
        roles(&fp32, KindSet::Own),
        "a2a_scratch bf16 default, fp32_output f32 default, wgrad_input bf16 default"
    );
    assert_eq!(
        roles(&fp32, KindSet::Upstream),
        "a2a_scratch bf16 default, rs_output bf16 default, wgrad_input bf16 default"
    );
    config.reduce_scatter = Wanted::Exactly(ReduceScatter::Symmetric);
    let registered = run(&config);
    let dense = Domain::Symmetric("dense".to_owned());
    assert_eq!(roles(&registered, KindSet::Own), format!("rs_output bf16 {dense}, wgrad_input bf16 {dense}"));
    assert_eq!(
        roles(&registered, KindSet::Upstream),
        format!("rs_output bf16 default, wgrad_input bf16 {dense}")
    );
    assert!(!KindSet::Upstream.has(ReduceScatter::OneShot) && KindSet::Own.has(ReduceScatter::OneShot));
}

#[test]
fn shapes_that_cannot_run_are_refused() {
    let refused = |change: &dyn Fn(&mut SimulateConfig)| {
        let mut config = SimulateConfig::new(mixed(1));
        change(&mut config);
        simulate(&config).expect_err("refused").to_string()
    };
    assert!(refused(&|c| c.ranks = 63).contains("multiple of 64"));
    assert!(refused(&|c| c.ranks = 0).contains("--ranks"));
    assert!(refused(&|c| c.model.layers.clear()).contains("one layer"));
    assert!(refused(&|c| c.model.groups[0].size = 0).contains("size of group"));
    assert!(refused(&|c| c.model.layers[0].modules[0].weights[0].rows = 1 << 40).contains("rows of `fc2`"));
    assert!(
        refused(&|c| c.model.layers[0].modules[0].weights[1].name = "fc2".into()).contains("appears twice")
    );
    assert!(
        refused(&|c| c.model.layers[0].modules[0].weights[0].group = Some("x".into()))
            .contains("dense or expert")
    );
    assert!(refused(&|c| c.wgrad_dtype = DType::U32).contains("bf16 or f32"));
    assert!(
        refused(&|c| {
            c.plan.depth_by_group.insert("tp".into(), 2);
        })
        .contains("--depth-group")
    );
}

/// A trace with the durations of its discovery takes as long as the program that it was recorded from.
#[test]
fn a_replayed_trace_takes_as_long_as_the_program_it_is_of() {
    let mut equal = 0;
    for (name, mtp) in [("nemotron4-quarter", 0), ("dsv3", 1)] {
        let model = built_in(name, mtp, false).unwrap();
        for scope in [GraphScope::Module, GraphScope::Layer] {
            for depth in 1..=3 {
                let mut config = SimulateConfig { scope, ..SimulateConfig::new(model.clone()) };
                config.plan.depth = depth;
                let simulated = simulate(&config).unwrap();
                assert!(!simulated.trace.durations_ns.is_empty());
                let (a, b) = (simulated.backward, replay(&simulated.trace, &simulated.plan).unwrap());
                let near = |x: u64, y: u64| x.abs_diff(y) * 100 <= a.total_ns;
                let what = format!("{name} {scope:?} depth {depth}: {a:?} {b:?}");
                assert!(near(a.total_ns, b.total_ns) && near(a.exposed_ns, b.exposed_ns), "{what}");
                equal += u32::from(a == b);
            }
        }
    }
    // Points stand for all their kernels, so turns between streams can differ.
    assert!(equal >= 10, "{equal} of 12 are equal to the nanosecond");
}

/// Depths are chosen for a trace as they are for the program that it is of.
#[test]
fn the_depths_of_a_trace_are_those_of_the_simulation() {
    // A link for each group, as the replay has it.
    let config = SimulateConfig { gpus_per_node: 16, ..SimulateConfig::new(mixed(4)) };
    let whole = auto_depth(&config, None, &|_| {}).unwrap();
    let of_trace = depth_of_trace(&whole.simulated.trace, &config.plan, None).unwrap();
    let names = |table: &[Candidate]| table.iter().map(depth_text).collect::<Vec<_>>();
    assert_eq!(names(&whole.candidates), names(&of_trace.candidates));
    assert_eq!(whole.candidates.len(), 12, "nine vectors, three depths for all launches");
    for (a, b) in whole.candidates.iter().zip(&of_trace.candidates) {
        assert_eq!((a.bytes, a.fences), (b.bytes, b.fences));
        assert!(a.backward_ns.abs_diff(b.backward_ns) * 50 <= a.backward_ns, "{a:?} {b:?}");
    }
    assert_eq!(of_trace.candidates[of_trace.chosen].bytes, of_trace.plan.bytes());
    let fixed = PlanOptions { depth_by_group: BTreeMap::from([("expert".into(), 1)]), ..config.plan.clone() };
    let fewer = depth_of_trace(&whole.simulated.trace, &fixed, None).unwrap();
    assert!(fewer.candidates.len() == 3 && fewer.candidates.iter().all(|c| c.depth["expert"] == 1));
    let least = of_trace.candidates.iter().map(|c| c.bytes).min().unwrap();
    let tight = depth_of_trace(&whole.simulated.trace, &config.plan, Some(least)).unwrap();
    assert_eq!(tight.plan.bytes(), least);
    let error = depth_of_trace(&whole.simulated.trace, &config.plan, Some(least - 1)).unwrap_err();
    assert!(error.to_string().contains("in the way are"), "{error}");
}

//! Published models: the traces' figures are those published for the baselines, and the plans are small.

use sessile_plan::{
    DType, PlanOptions, Role, StepCut, Strategy, Trace, baseline_bytes, check_trace,
    models::{
        CATALOG, KindSet, Kinds, Model, ModelError, Scope, TraceOptions, model, model_trace, read_model,
    },
    plan, read_trace, validate, write_trace,
};

use crate::support::{CUTS, options};

/// Megatron-LM's buffers of nemotron4-quarter.
pub(crate) fn quarter(by_layer: bool) -> Trace {
    let scope = if by_layer { Scope::Layer } else { Scope::Module };
    let options = TraceOptions { scope, set: KindSet::Upstream, ..TraceOptions::default() };
    model_trace(&model("nemotron4-quarter", 0, false).unwrap(), &options)
}

/// All models of the catalog.
pub(crate) fn all_models() -> Vec<Model> {
    let mut all: Vec<Model> = CATALOG[..3].iter().map(|name| model(name, 0, false).unwrap()).collect();
    for mtp in 0..=2 {
        all.extend([false, true].map(|heads| model("dsv3", mtp, heads).unwrap()));
    }
    all
}

/// GiB with two decimals, as the figures are published.
fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

#[test]
fn the_published_figures_of_nemotron4_quarter_by_layer() {
    let bytes = baseline_bytes(&quarter(true), StepCut::Barrier);
    assert_eq!(bytes.generations.map(gib), ["0.43", "0.87", "1.30"]);
    assert_eq!(format!("{:.1}", bytes.per_request as f64 / f64::from(1 << 30)), "41.7");
}

#[test]
fn the_published_figures_of_nemotron4_quarter_by_module() {
    let bytes = baseline_bytes(&quarter(false), StepCut::Barrier);
    assert_eq!(bytes.generations.map(gib), ["0.34", "0.43", "1.01"]);
    assert_eq!(format!("{:.1}", bytes.per_request as f64 / f64::from(1 << 30)), "41.7");
}

#[test]
fn the_published_figures_of_the_whole_model_and_of_mtp() {
    let upstream =
        |kinds, scope| TraceOptions { scope, kinds, set: KindSet::Upstream, ..TraceOptions::default() };
    let bytes = |name, mtp, options| {
        baseline_bytes(&model_trace(&model(name, mtp, false).unwrap(), &options), StepCut::Barrier)
    };
    let layer = bytes("nemotron4-340b", 0, upstream(Kinds::Plain, Scope::Layer));
    assert_eq!(layer.generations.map(gib), ["1.71", "3.42", "5.13"]);
    let fp32 = bytes("nemotron4-340b", 0, upstream(Kinds::Fp32, Scope::Layer));
    assert_eq!(fp32.generations.map(gib), ["3.32", "6.63", "9.95"]);
    let mtp = bytes("dsv3", 2, upstream(Kinds::Plain, Scope::Module));
    assert_eq!(mtp.generations.map(gib), ["0.78", "1.19", "2.35"]);
    assert_eq!(format!("{:.1}", mtp.per_request as f64 / f64::from(1 << 30)), "54.0");
    let registered = bytes("dsv3", 2, upstream(Kinds::Registered, Scope::Module));
    assert_eq!(registered.generations.map(gib), ["1.15", "1.88", "3.45"]);
}

#[test]
fn a_ring_of_two_holds_two_inputs_of_each_shape() {
    let mut inputs = quarter(false);
    for runner in &mut inputs.runners {
        runner.requests.retain(|request| request.spec.role == Role::WgradInput);
        runner.points.clear();
    }
    assert_eq!(baseline_bytes(&inputs, StepCut::Barrier).ring2.map(gib).as_deref(), Some("0.50"));
}

#[test]
fn every_variant_of_every_model_is_a_trace_whose_plan_is_right() {
    for model in all_models() {
        for (number, scope) in [Scope::Module, Scope::Layer].into_iter().enumerate() {
            for kinds in [Kinds::Plain, Kinds::Fp32, Kinds::Registered] {
                for set in [KindSet::Upstream, KindSet::Own] {
                    let options =
                        TraceOptions { scope, kinds, set, gathered: number == 1, ..TraceOptions::default() };
                    let trace = model_trace(&model, &options);
                    assert_eq!(check_trace(&trace), Ok(()));
                    let made = plan(&trace, &PlanOptions::default()).unwrap();
                    let alternating = baseline_bytes(&trace, StepCut::Barrier).generations[1];
                    assert!(made.bytes() <= alternating, "{} {options:?}", model.name);
                    assert_eq!(validate(&trace, &made), [], "{} {options:?}", model.name);
                }
            }
        }
    }
}

/// Fewer bytes do not exist, at any of the depths, for any variant of any model.
#[test]
fn every_variant_of_every_model_is_planned_at_the_lower_bound() {
    let mut plans = 0;
    for model in all_models() {
        for scope in [Scope::Module, Scope::Layer] {
            for (wgrad_dtype, kinds) in [
                (DType::Bf16, Kinds::Plain),
                (DType::Bf16, Kinds::Fp32),
                (DType::Bf16, Kinds::Registered),
                (DType::F32, Kinds::Plain),
                (DType::F32, Kinds::Registered),
            ] {
                for set in [KindSet::Upstream, KindSet::Own] {
                    let options = TraceOptions { scope, wgrad_dtype, kinds, set, gathered: false };
                    let trace = model_trace(&model, &options);
                    let generations = baseline_bytes(&trace, StepCut::Barrier).generations;
                    for depth in 1..=3u32 {
                        let made = plan(&trace, &PlanOptions { depth, ..PlanOptions::default() }).unwrap();
                        let what = format!("{} {options:?} depth {depth}", model.name);
                        assert_eq!(made.bytes(), made.lower_bound_bytes(), "{what}");
                        assert!(made.bytes() <= generations[depth as usize - 1], "{what}");
                        if depth == 3 && set == KindSet::Own {
                            assert_eq!(validate(&trace, &made), [], "{what}");
                        }
                        plans += 1;
                    }
                }
            }
        }
    }
    assert_eq!(plans, 9 * 2 * 5 * 2 * 3);
}

#[test]
fn sessile_plans_the_model_well_under_both_cuts() {
    for by_layer in [true, false] {
        let given = quarter(by_layer);
        for cut in CUTS {
            for depth in 1..=2 {
                let made = plan(&given, &options(Strategy::Sessile, depth, cut)).unwrap();
                assert!(
                    made.bytes() * 50 <= made.lower_bound_bytes() * 51,
                    "depth {depth} {cut:?} {by_layer}"
                );
                assert_eq!(validate(&given, &made), []);
            }
        }
    }
}

#[test]
fn a_model_reads_back_from_the_words_it_is_described_in() {
    let text = r#"
        name = "two"
        groups = { dense = 4, expert = 2 }
        [[blocks]]
        name = "layer"
        repeat = 2
        [[blocks.modules]]
        name = "mlp"
        weights = [{ name = "fc2", rows = 64, cols = 256 }, { name = "fc1", rows = 250, cols = 64 }]
        [[blocks.modules]]
        name = "experts"
        weights = [{ name = "fc", rows = 8, cols = 8, group = "expert", experts = 3, wgrad_dtype = "f32" }]
    "#;
    let two = read_model(text).unwrap();
    let trace = model_trace(&two, &TraceOptions::default());
    let names: Vec<&str> = trace.runners.iter().map(|runner| runner.name.as_str()).collect();
    assert_eq!(names, ["layer1.mlp", "layer1.experts", "layer0.mlp", "layer0.experts"]);
    let first: Vec<String> =
        trace.runners[0].requests.iter().map(|request| request.spec.to_string()).collect();
    insta::assert_snapshot!(first.join("\n"), @r"
    layer1.mlp.fc2 wgrad_input bf16[64, 256] in default
    layer1.mlp.fc2 rs_output bf16[16, 256] in default
    layer1.mlp.fc1 wgrad_input bf16[256, 64] in default
    layer1.mlp.fc1 rs_output bf16[64, 64] in default
    ");
    assert_eq!(trace.runners[1].requests.len(), 6);
    assert!(trace.runners[1].requests.iter().all(|request| request.spec.dtype == DType::F32));
    assert_eq!(read_trace(write_trace(&trace).as_bytes()), Ok(trace));
}

#[test]
fn models_that_mean_nothing_are_refused() {
    let text = |weight: &str| {
        let head = "name = \"m\"\ngroups = { dense = 4 }\n[[blocks]]\nname = \"b\"\n[[blocks.modules]]\nname = \"m\"\n";
        read_model(&format!("{head}weights = [{weight}]")).unwrap_err().to_string()
    };
    let mut words = vec![
        text("{ name = \"w\", rows = 0, cols = 1 }"),
        text("{ name = \"w\", rows = 1, cols = 1, group = \"other\" }"),
        text("{ name = \"\", rows = 1, cols = 1 }"),
        text("{ name = \"w\", rows = -1, cols = 1 }"),
        text("{ name = \"w\", rows = 1, cols = 1, uses = 2000 }"),
        text(""),
        read_model("nonsense").unwrap_err().to_string(),
    ];
    words.push(model("gpt", 0, false).unwrap_err().to_string());
    assert!(matches!(model("dsv3", 3, false), Err(ModelError::OutOfRange { .. })));
    assert!(matches!(model("nemotron4-340b", 1, false), Err(ModelError::OutOfRange { .. })));
    insta::assert_snapshot!(words.join("\n"));
}

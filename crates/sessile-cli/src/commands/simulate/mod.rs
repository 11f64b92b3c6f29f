//! `sessile simulate`.

mod document;
mod print;

use std::path::Path;

use sessile_model::{
    TrainConfig, TrainError,
    config::Overlap,
    simulate::{
        AutoDepth, AutoError, BUILT_IN, Candidate, ModelShape, SimulateConfig, Simulated, auto_depth,
        built_in, depth_text, simulate, simulate_proxy,
    },
};
use sessile_plan::{LaunchOrder, Plan, Trace, plan, write_trace};
use sessile_runtime::timeline::{Ticks, write_timeline};

use self::document::Document;
use super::json;
use crate::{
    args::{Depth, SimulateArgs},
    failure::{Failure, Verdict},
    input, output,
    ui::{Progress, count},
};

/// What the name of a model stands for.
enum Subject {
    /// What `sessile train` trains.
    Proxy(Box<TrainConfig>),
    /// A backward by its weights.
    Shapes(ModelShape),
}

/// One number of ranks.
struct Run {
    ranks: u32,
    simulated: Simulated,
    /// Of the kind set that was asked for.
    trace: Trace,
    plan: Plan,
}

/// Simulates, writes the files that were asked for and prints the tables.
pub(super) fn run(args: &SimulateArgs) -> Result<Verdict, Failure> {
    let subject = subject(args)?;
    let configs = configs(args, &subject)?;
    let wanted = [
        ("--json", args.common.json.as_deref()),
        ("--trace-out", args.trace_out.as_deref()),
        ("--timeline", args.timeline.as_deref()),
    ];
    let is_file = args.model.model.exists();
    let inputs: Vec<&Path> = is_file.then_some(args.model.model.as_path()).into_iter().collect();
    let [json_out, trace_out, timeline_out] = output::prepare(wanted, &inputs)?;

    let progress = Progress::new(args.common.quiet, 0);
    let mut runs = Vec::new();
    let mut candidates: Option<(Vec<Candidate>, usize)> = None;
    for config in &configs {
        progress.phase(&format!("{} on {} ranks", config.model.name, count(config.ranks)));
        let simulated = match (&subject, args.choices.depth, &candidates) {
            (Subject::Proxy(train), ..) => {
                simulate_proxy(&proxy_config(train, config), config).map_err(failure)?
            }
            (Subject::Shapes(_), Depth::Fixed(_), _) => simulate(config).map_err(failure)?,
            (Subject::Shapes(_), Depth::Auto, Some((table, chosen))) => {
                // Depths are chosen once, for the first number of ranks.
                simulate(&at_depth(config, &table[*chosen])).map_err(failure)?
            }
            (Subject::Shapes(_), Depth::Auto, None) => {
                let note = |candidate: &Candidate| progress.message(depth_text(candidate));
                let found = auto_depth(config, args.choices.memory_limit, &note).map_err(auto_failure)?;
                let AutoDepth { candidates: table, chosen, simulated } = found;
                candidates = Some((table, chosen));
                simulated
            }
        };
        let trace = args.model.kind_set.apply(simulated.trace.clone());
        let plan =
            plan(&trace, &simulated.plan.options).map_err(|error| Failure::Input(error.to_string()))?;
        runs.push(Run { ranks: config.ranks, simulated, trace, plan });
    }
    progress.end();

    let document = Document::new(args, &configs[0], &subject, &runs, candidates);
    let mut files = Vec::new();
    if let Some(file) = json_out {
        files.push((file, json(&document)?));
    }
    let Some(first) = runs.first() else { return Ok(Verdict::Good) };
    if let Some(file) = trace_out {
        files.push((file, write_trace(&first.trace).into_bytes()));
    }
    if let Some(file) = timeline_out {
        let mut bytes = Vec::new();
        let spans: Vec<_> = first.simulated.spans.iter().map(Vec::as_slice).collect();
        write_timeline(&first.simulated.log, &spans, Ticks::Nanoseconds, &mut bytes)
            .map_err(|error| Failure::Run(format!("the timeline could not be written: {error}")))?;
        files.push((file, bytes));
    }
    output::write_all(files)?;
    print::print(&document, args.common.quiet)?;
    Ok(Verdict::Good)
}

fn at_depth(config: &SimulateConfig, candidate: &Candidate) -> SimulateConfig {
    let mut config = config.clone();
    config.plan.depth = candidate.depth.values().copied().max().unwrap_or(1);
    config.plan.depth_by_group =
        if candidate.by_group { candidate.depth.clone() } else { Default::default() };
    config
}

fn failure(error: TrainError) -> Failure {
    match error {
        TrainError::Config(_) => Failure::Input(error.to_string()),
        TrainError::Plan(why) => Failure::Input(format!("--strategy: {why}")),
        _ => Failure::Run(error.to_string()),
    }
}

fn auto_failure(error: AutoError) -> Failure {
    match error {
        AutoError::Simulation(error) => failure(error),
        error => super::depth::failure(error),
    }
}

fn subject(args: &SimulateArgs) -> Result<Subject, Failure> {
    let path = args.model.model.as_path();
    let name = path.to_str().unwrap_or_default();
    if name != "dsv3" && (args.model.mtp > 0 || args.model.heads) {
        let shown = path.display();
        return Err(Failure::Input(format!("--mtp and --heads: {shown} has neither; use --model dsv3")));
    }
    // Layers are built for each depth, so the bound comes first.
    if args.model.mtp > 16 {
        return Err(Failure::Input(format!("--mtp {}: use 0 to 16", args.model.mtp)));
    }
    if name == "proxy" {
        return Ok(Subject::Proxy(Box::default()));
    }
    if let Some(model) = built_in(name, args.model.mtp, args.model.heads) {
        return Ok(Subject::Shapes(model));
    }
    if !path.exists() {
        return Err(Failure::Input(format!(
            "--model {} is neither a file nor a model: use {}, proxy, or a TOML file",
            path.display(),
            BUILT_IN.join(", ")
        )));
    }
    let bytes = input::document(path, "a TOML file with a model's layers")?;
    let text = String::from_utf8(bytes).map_err(|error| input::about(path, error))?;
    let model: ModelShape = toml::from_str(&text).map_err(|error| {
        let place = error.span().map_or(0, |span| text[..span.start].lines().count().max(1));
        input::about(path, format!("line {place}: {}", error.message()))
    })?;
    model.check().map_err(|error| input::about(path, format!("{}: {}", error.value, error.remedy)))?;
    Ok(Subject::Shapes(model))
}

/// A configuration for each number of ranks, checked.
fn configs(args: &SimulateArgs, subject: &Subject) -> Result<Vec<SimulateConfig>, Failure> {
    let bad = |error: sessile_model::ConfigError| Failure::Input(error.to_string());
    let model = match subject {
        Subject::Shapes(model) => model.clone(),
        Subject::Proxy(train) => proxy_shape(train),
    };
    model.check().map_err(bad)?;
    if args.choices.depth == Depth::Fixed(0) {
        return Err(Failure::Input("--depth 0: use 1 or more, or auto".to_owned()));
    }
    if args.choices.memory_limit.is_some() && args.choices.depth != Depth::Auto {
        return Err(Failure::Input(
            "--memory-limit chooses among depths: use it with --depth auto".to_owned(),
        ));
    }
    if let (Subject::Proxy(_), Depth::Auto) = (subject, args.choices.depth) {
        return Err(Failure::Input("--depth auto: proxy takes a number; use another --model".to_owned()));
    }
    let base = SimulateConfig {
        scope: args.model.scope,
        wgrad_dtype: args.model.wgrad_dtype,
        reduce_scatter: args.model.reduce_scatter,
        expert_reduce_scatter: args.model.expert_reduce_scatter,
        with_gathered: args.model.with_gathered,
        gpus_per_node: args.job.gpus_per_node,
        folded: args.job.fold,
        plan: args.choices.options(),
        speeds: args.speeds(),
        ..SimulateConfig::new(model)
    };
    let least = match subject {
        Subject::Proxy(train) => train.ranks,
        Subject::Shapes(_) => base.ranks,
    };
    let ranks = if args.job.ranks.is_empty() { vec![least] } else { args.job.ranks.clone() };
    let configs: Vec<_> = ranks.into_iter().map(|ranks| SimulateConfig { ranks, ..base.clone() }).collect();
    for config in &configs {
        config.check().map_err(bad)?;
        for group in &config.model.groups {
            let kind = config.kind(group).map_err(bad)?.kind;
            if !args.model.kind_set.has(kind) {
                return Err(Failure::Input(format!(
                    "--kind-set upstream has no {kind} (group `{}`): use ring, symmetric or fp32_a2a",
                    group.name
                )));
            }
        }
    }
    Ok(configs)
}

/// The training run that the options ask for.
fn proxy_config(train: &TrainConfig, config: &SimulateConfig) -> TrainConfig {
    TrainConfig {
        ranks: config.ranks,
        graph_scope: config.scope,
        wgrad_dtype: config.wgrad_dtype,
        reduce_scatter: config.reduce_scatter,
        expert_reduce_scatter: config.expert_reduce_scatter,
        strategy: config.plan.strategy,
        depth: config.plan.depth,
        depth_by_group: config.plan.depth_by_group.clone(),
        step_cut: config.plan.step_cut,
        overlap: match config.plan.launch_order {
            LaunchOrder::Overlapped => Overlap::On,
            LaunchOrder::Serial => Overlap::Off,
        },
        ..train.clone()
    }
}

/// The groups of the proxy; its weights are made by the training code.
fn proxy_shape(train: &TrainConfig) -> ModelShape {
    use sessile_model::simulate::{GroupShape, LayerShape, ModuleShape, WeightShape};
    let weight = WeightShape {
        name: "up".to_owned(),
        rows: train.ffn,
        cols: train.hidden,
        group: None,
        experts: None,
        tokens: None,
        uses: 1,
        fp32: false,
    };
    let module = ModuleShape { name: "mlp".to_owned(), weights: vec![weight] };
    ModelShape {
        name: "proxy".to_owned(),
        tokens: train.longest() * train.batch,
        groups: vec![GroupShape { name: "dense".to_owned(), size: train.gtp, stride: 1 }],
        layers: vec![LayerShape { name: None, count: train.layers, modules: vec![module] }],
    }
}

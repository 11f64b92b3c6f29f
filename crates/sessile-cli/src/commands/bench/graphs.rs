//! `sessile bench graphs`.

use serde::Serialize;
use sessile_hal::Device;
use sessile_host::{World, WorldOptions};
use sessile_model::{
    RankLayout, ReduceScatter,
    bench::{
        Apart, Comms, FITS, HostCosts, Prediction, StackConfig, Timing, Variant, bench_stack, host_costs,
    },
};
use sessile_plan::DType;
use sessile_runtime::RuntimeError;

use crate::{
    args::{GraphsArgs, Sms},
    commands::{
        json, launch,
        place::{self, Part},
    },
    failure::{Failure, Verdict},
    output,
    ui::{Lines, Progress, count, table},
};

/// The document of `--json`.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    version: u32,
    device: &'static str,
    /// Name of the GPU; `null` on the host.
    gpu: Option<String>,
    ranks: u32,
    /// Ranks that share a weight of a dense layer.
    gtp: u32,
    /// Of every second layer, if it is an expert's; `null` if all are dense.
    egtp: Option<u32>,
    layers: u32,
    wgrad_dtype: DType,
    /// Multiprocessors that a one-shot reduce-scatter may take; `null` if all, and on the host.
    one_shot_sms: Option<u32>,
    steps: u32,
    rounds: u32,
    /// Of the cost model that predicts.
    contention: f64,
    /// Of rank 0.
    host_costs: HostCosts,
    stacks: Vec<Measured>,
}

/// One size and one kind.
#[derive(Serialize)]
struct Measured {
    hidden: u64,
    tokens: u64,
    reduce_scatter: &'static str,
    /// Whether gradients of all variants that have them are equal to the bit.
    equal_bits: bool,
    variants: Vec<Row>,
}

/// One variant, with what it says beside the others.
#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    timing: Timing,
    /// Time of `eager` over this one.
    over_eager: f64,
    /// Time beyond `no_reduce`, as a fraction of this one: reduce-scatters that nothing hides. `null` for those without, and
    /// where the spreads overlap.
    exposed_reduce_fraction: Option<f64>,
    /// What the cost model says of that; `null` for what it does not predict.
    predicted: Option<Prediction>,
    /// Time beyond `compute`, as a fraction of this one: all collectives. `null` for `reduce`, which has no compute.
    exposed_fraction: Option<f64>,
}

/// Measures and tells.
pub(super) fn run(args: &GraphsArgs) -> Result<Verdict, Failure> {
    let sizes = sizes(args)?;
    place::bounds_something(&args.place, args.reduce_scatter.contains(&ReduceScatter::OneShot))?;
    if args.place.share_gpus {
        return Err(Failure::Input(
            "--share-gpus: ranks that take turns on a GPU are nothing to measure; leave it out, or try `sessile train`"
                .to_owned(),
        ));
    }
    let part = Part::find(&args.place)?;
    let prepare = || {
        let ranks = part.ranks(args.ranks, 2)?;
        if !(1..=64).contains(&ranks) {
            return Err(Failure::Input(format!("--ranks {ranks}: use 1 to 64")));
        }
        let layouts = layouts(args, ranks)?;
        let [file] = output::prepare([("--json", args.common.json.as_deref())], &[])?;
        Ok((ranks, layouts, file))
    };
    let (ranks, layouts, file) = part.or_tell(&args.place, prepare())?;
    match part {
        Part::Launch(ranks) => launch::launch(ranks),
        Part::Host => {
            let world = World::new(WorldOptions::threads(ranks, ranks as usize));
            let results = world.run(|device| measure(args, &sizes, &layouts, &device));
            let mut all = results.into_iter().collect::<Result<Vec<_>, _>>();
            let first = all
                .as_mut()
                .map(|all| all.swap_remove(0))
                .map_err(|error| Failure::Run(error.to_string()))?;
            tell(args, file, document(args, ranks, None, first))
        }
        Part::Rank(job) => {
            let (name, measured) = place::on_gpu(&args.place, &job, false, |device| {
                let measured = measure(args, &sizes, &layouts, device)
                    .map_err(|error| Failure::Run(error.to_string()))?;
                Ok((device.gpu().name.clone(), measured))
            })?;
            if job.rank > 0 {
                return Ok(Verdict::from_good(equal(&measured.1)));
            }
            tell(args, file, document(args, ranks, Some(name), measured))
        }
    }
}

/// Which ranks share the weights of dense layers, and of those of experts if there are any.
fn layouts(args: &GraphsArgs, ranks: u32) -> Result<Vec<RankLayout>, Failure> {
    let layout = |option: &str, size: u32| {
        RankLayout::new(ranks, size).ok_or_else(|| {
            Failure::Input(format!(
                "{option} {size}: the job has {ranks} ranks, which must be a multiple of it"
            ))
        })
    };
    let dense = layout("--gtp", args.gtp.unwrap_or(ranks))?;
    let expert = args.egtp.map(|size| layout("--egtp", size)).transpose()?;
    Ok(std::iter::once(dense).chain(expert).collect())
}

/// Pairs of hidden size and tokens.
fn sizes(args: &GraphsArgs) -> Result<Vec<(u64, u64)>, Failure> {
    let refuse = |option: &str, value: u64, least: u64, most: u64| {
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(Failure::Input(format!("{option} {value}: use {least} to {most}")))
    };
    refuse("--layers", args.layers.into(), 2, 24)?;
    refuse("--steps", args.steps.into(), 1, 10_000)?;
    refuse("--rounds", args.rounds.into(), 1, 1000)?;
    args.hidden.iter().try_for_each(|&hidden| refuse("--hidden", hidden, 8, 32_768))?;
    args.tokens.iter().try_for_each(|&tokens| refuse("--tokens", tokens, 1, 65_536))?;
    let tokens = |at: usize| match args.tokens.as_slice() {
        [all] => Ok(*all),
        each => each.get(at).copied().ok_or_else(|| {
            let (tokens, hidden) = (each.len(), args.hidden.len());
            Failure::Input(format!(
                "--tokens has {tokens} values and --hidden {hidden}: give one, or as many"
            ))
        }),
    };
    args.hidden.iter().enumerate().map(|(at, &hidden)| Ok((hidden, tokens(at)?))).collect()
}

type Raw = (HostCosts, Vec<(u64, u64, ReduceScatter, Vec<Timing>)>);

fn measure<D: Device>(
    args: &GraphsArgs,
    sizes: &[(u64, u64)],
    layouts: &[RankLayout],
    device: &D,
) -> Result<Raw, RuntimeError> {
    let variants = Variant::ALL.len() as u64;
    let total = sizes.len() as u64 * args.reduce_scatter.len() as u64 * variants;
    let progress = Progress::new(args.common.quiet || device.rank() > 0, total);
    let comms = Comms::make(device, layouts)?;
    let costs = host_costs(device, comms.world())?;
    let mut stacks = Vec::new();
    for (&(hidden, tokens), at) in sizes.iter().zip(0u64..) {
        for (&kind, kind_at) in args.reduce_scatter.iter().zip(0u64..) {
            let config = StackConfig {
                layers: args.layers,
                hidden,
                tokens,
                wgrad_dtype: args.wgrad_dtype,
                steps: args.steps,
                rounds: args.rounds,
            };
            let done = (at * args.reduce_scatter.len() as u64 + kind_at) * variants;
            let observe = |variant: Variant| {
                let number = Variant::ALL.iter().position(|other| *other == variant).unwrap_or(0) as u64;
                progress.step("variant", done + number + 1, format!("{hidden} {kind} {}", variant.name()));
            };
            let timings = bench_stack(device, &comms, &config, kind, &Variant::ALL, &observe)?;
            let took = |timing: &Timing| format!("{} {} µs", timing.variant.name(), timing.step_ns / 1000);
            let took: Vec<String> = timings.iter().map(took).collect();
            progress.message(format!("{hidden}, {tokens} tokens, {kind}: {}", took.join(", ")));
            stacks.push((hidden, tokens, kind, timings));
        }
    }
    progress.end();
    Ok((costs, stacks))
}

/// Whether gradients are equal within each stack.
fn equal(stacks: &[(u64, u64, ReduceScatter, Vec<Timing>)]) -> bool {
    stacks.iter().all(|(.., timings)| equal_bits(timings))
}

fn equal_bits(timings: &[Timing]) -> bool {
    let mut digests = timings.iter().map(|timing| &timing.digest).filter(|digest| !digest.is_empty());
    let first = digests.next();
    digests.all(|digest| Some(digest) == first)
}

/// Time of one beyond that of another, as a fraction of its own; `None` where their spreads overlap.
fn beyond(own: &Timing, base: &Timing) -> Option<f64> {
    let apart = own.least_ns > base.most_ns || own.most_ns < base.least_ns;
    apart.then(|| (own.step_ns as f64 - base.step_ns as f64) / own.step_ns.max(1) as f64)
}

fn document(args: &GraphsArgs, ranks: u32, gpu: Option<String>, (host_costs, stacks): Raw) -> Document {
    let stacks = stacks
        .into_iter()
        .map(|(hidden, tokens, kind, timings)| {
            let equal_bits = equal_bits(&timings);
            let find = |variant| timings.iter().find(|timing| timing.variant == variant);
            let (eager, gathers, compute) =
                (find(Variant::Eager), find(Variant::NoReduce), find(Variant::Compute));
            let reduce = find(Variant::Reduce);
            let apart = compute.zip(gathers).zip(reduce).map(|((compute, gathers), reduce)| Apart {
                layers: args.layers,
                compute_ns: compute.step_ns,
                no_reduce_ns: gathers.step_ns,
                reduce_ns: reduce.step_ns,
            });
            let predicted = |variant| {
                let overlapped = match variant {
                    Variant::Depth1 => false,
                    Variant::Depth2 => true,
                    _ => return None,
                };
                Some(apart?.predict(overlapped, args.contention))
            };
            let row = |timing: &Timing| Row {
                over_eager: eager.map_or(1.0, |eager| eager.step_ns as f64 / timing.step_ns.max(1) as f64),
                exposed_reduce_fraction: gathers
                    .filter(|_| !timing.digest.is_empty())
                    .and_then(|gathers| beyond(timing, gathers)),
                predicted: predicted(timing.variant),
                exposed_fraction: compute
                    .filter(|_| timing.variant != Variant::Reduce)
                    .and_then(|compute| beyond(timing, compute)),
                timing: timing.clone(),
            };
            let variants = timings.iter().map(row).collect();
            Measured { hidden, tokens, reduce_scatter: kind.name(), equal_bits, variants }
        })
        .collect();
    Document {
        schema: "sessile.bench-graphs",
        version: 2,
        device: args.place.device.name(),
        gpu,
        ranks,
        gtp: args.gtp.unwrap_or(ranks),
        egtp: args.egtp,
        layers: args.layers,
        wgrad_dtype: args.wgrad_dtype,
        one_shot_sms: args.place.sms().and_then(Sms::budget),
        steps: args.steps,
        rounds: args.rounds,
        contention: args.contention.fraction(),
        host_costs,
        stacks,
    }
}

fn tell(args: &GraphsArgs, file: Option<output::Output>, document: Document) -> Result<Verdict, Failure> {
    if let Some(file) = file {
        output::write_all(vec![(file, json(&document)?)])?;
    }
    let mut lines = Lines::new(args.common.quiet);
    let microseconds = |ns: u64| format!("{:.1}", ns as f64 / 1e3);
    let percent = |part: Option<f64>| part.map_or_else(String::new, |part| format!("{:.1} %", part * 100.0));
    for stack in &document.stacks {
        let equal = if stack.equal_bits { "compared gradients equal to the bit" } else { "GRADIENTS DIFFER" };
        lines.line(format_args!(
            "{} ranks, gtp {}{}, {} layers of {}², {} tokens, {}: {equal}",
            document.ranks,
            document.gtp,
            document.egtp.map_or_else(String::new, |egtp| format!(" and {egtp} in turns")),
            document.layers,
            stack.hidden,
            stack.tokens,
            stack.reduce_scatter
        ))?;
        let row = |row: &Row| {
            let timing = &row.timing;
            vec![
                timing.variant.name().to_owned(),
                microseconds(timing.step_ns),
                format!("{}..{}", microseconds(timing.least_ns), microseconds(timing.most_ns)),
                format!("{:.2}x", row.over_eager),
                percent(row.exposed_reduce_fraction),
                percent(row.predicted.map(|predicted| predicted.exposed_reduce_fraction)),
                row.predicted.map_or("", |predicted| if predicted.fits { "yes" } else { "no" }).to_owned(),
                percent(row.exposed_fraction),
                microseconds(timing.host_ns),
                count(timing.buffer_bytes),
                timing.fences.to_string(),
            ]
        };
        let heads = [
            "variant",
            "µs a step",
            "spread",
            "to eager",
            "reduce exposed",
            "by the model",
            "fits",
            "all exposed",
            "host µs a layer",
            "bytes",
            "fences",
        ];
        lines.line(table(&heads, 1, stack.variants.iter().map(row).collect()))?;
        lines.line("")?;
    }
    let HostCosts { view_request_ns, bare_launch_ns, replay_ns } = document.host_costs;
    lines.line(format_args!(
        "by the model: from compute, reduce and no_reduce, with contention {}; fits: at most {:.0} % are exposed",
        document.contention,
        FITS * 100.0
    ))?;
    lines.line(format_args!(
        "host: {view_request_ns} ns a planned view, {bare_launch_ns} ns a bare launch, {replay_ns} ns a replay with fences"
    ))?;
    Ok(Verdict::from_good(document.stacks.iter().all(|stack| stack.equal_bits)))
}

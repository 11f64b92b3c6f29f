//! `sessile train`.

mod cuda;
mod examine;
mod print;
mod size;

use sessile_model::{Executing, TrainConfig, TrainError, TrainEvent, TrainOutcome, config::Mode, train};
use sessile_plan::write_trace;
use sessile_runtime::{
    Footprint,
    log::write_log,
    timeline::{Ticks, write_timeline},
};

use self::examine::Examined;
use super::{
    json, launch,
    place::{Part, bounds_something},
};
use crate::{
    args::{DeviceName, HOST_RANKS, TrainArgs},
    failure::{Failure, Verdict},
    input,
    output::{self, Output},
    run::{Cuda, Options},
    text,
    ui::{Progress, count},
};

/// Trains, examines what the run left, writes the files that were asked for and prints the tables.
pub(super) fn run(args: &TrainArgs) -> Result<Verdict, Failure> {
    if args.job.place.device == DeviceName::Cuda && args.job.schedule_seed.is_some() {
        return Err(Failure::Input(
            "--schedule-seed draws the order of the host device: a GPU has its own; leave it out, or use --device host"
                .to_owned(),
        ));
    }
    bounds_something(&args.job.place, args.may_reduce_in_one_shot())?;
    let part = Part::find(&args.job.place)?;
    let Prepared { config, data, files } = part.or_tell(&args.job.place, prepare(args, &part))?;
    match part {
        Part::Host => report(args, &config, files, |observe| {
            Ok((train(&config, &data, observe).map_err(failure)?, None))
        }),
        // Only once all options are known to be good: each rank would say the same.
        Part::Launch(ranks) => launch::launch(ranks),
        Part::Rank(job) if job.rank == 0 => report(args, &config, files, |observe| {
            cuda::run(args, &job, &config, &data, observe).map(|(outcome, about)| (outcome, Some(about)))
        }),
        Part::Rank(job) => {
            let (outcome, _) = cuda::run(args, &job, &config, &data, &|_| {})?;
            let equal = outcome.steps.iter().all(|step| step.equal() != Some(false));
            Ok(Verdict::from_good(equal && outcome.grad_ready.equal() != Some(false)))
        }
    }
}

/// What a run needs beside a device.
struct Prepared {
    config: TrainConfig,
    data: Vec<u8>,
    /// Of who reports; empty on other ranks.
    files: Files,
}

/// Finds all that can be wrong before anything runs.
fn prepare(args: &TrainArgs, part: &Part) -> Result<Prepared, Failure> {
    let config = args.config(part.ranks(args.job.ranks, HOST_RANKS)?);
    config.check().map_err(|error| Failure::Input(error.to_string()))?;
    only_with_graphs(args, &config)?;
    if args.job.place.device == DeviceName::Cuda {
        size::check_shapes(&config)?;
    }
    let data = match &args.files.data {
        Some(path) => input::data(path, config.longest(), config.window() + 1)?,
        None => text::built_in(config.longest(), config.window() + 1)?,
    };
    let files = match part {
        Part::Host => {
            size::check(&config)?;
            Files::prepare(args)?
        }
        Part::Rank(job) if job.rank > 0 => Files::default(),
        Part::Launch(_) | Part::Rank(_) => {
            size::check_log(&config)?;
            Files::prepare(args)?
        }
    };
    Ok(Prepared { config, data, files })
}

/// Runs, and tells of it: progress, files, tables.
fn report(
    args: &TrainArgs,
    config: &TrainConfig,
    files: Files,
    run: impl FnOnce(&(dyn Fn(&TrainEvent) + Sync)) -> Result<(TrainOutcome, Option<Cuda>), Failure>,
) -> Result<Verdict, Failure> {
    let progress = Progress::new(args.common.quiet, config.steps.into());
    let outcome = run(&|event: &TrainEvent| observe(&progress, event));
    progress.end();
    let (outcome, about) = outcome?;
    let examined = examine::examine(&outcome, options(args, outcome.config.clone()), about)?;
    files.write(&outcome, &examined)?;
    print::print(&examined, args.common.quiet)?;
    Ok(Verdict::from_good(examined.good()))
}

/// Whose fault it is that there is no result.
fn failure(error: TrainError) -> Failure {
    match error {
        TrainError::Config(_) | TrainError::TextTooShort { .. } | TrainError::Depth { .. } => {
            Failure::Input(error.to_string())
        }
        // The strategy that was asked for cannot hold these requests.
        TrainError::Plan(why) => Failure::Input(format!("--strategy: {why}")),
        _ => Failure::Run(error.to_string()),
    }
}

fn observe(progress: &Progress, event: &TrainEvent) {
    let name = |executing: &Executing| match executing {
        Executing::Eager => "eager",
        Executing::Graphs => "graphs",
    };
    match event {
        TrainEvent::Begin(executing) => progress.phase(name(executing)),
        TrainEvent::Planned(Footprint { planned, allocated, registered, free }) => {
            let free = free.map_or_else(String::new, |free| format!(", {} free", count(free)));
            progress.message(format!(
                "arenas: {} bytes planned, {} to allocate, {} of them registered{free}",
                count(*planned),
                count(*allocated),
                count(*registered)
            ));
        }
        TrainEvent::Captured { runners, arena_bytes } => {
            progress.message(format!("{runners} runners captured, arenas of {} bytes", count(*arena_bytes)));
        }
        TrainEvent::Step { executing, step, loss } => {
            progress.step(name(executing), (*step).into(), format!("loss {loss:.4}"));
        }
    }
}

/// Refuses files that only graphs fill.
fn only_with_graphs(args: &TrainArgs, config: &TrainConfig) -> Result<(), Failure> {
    let files = &args.files;
    let given =
        [("--trace-out", &files.trace_out), ("--timeline", &files.timeline), ("--log-out", &files.log_out)];
    match given.into_iter().find_map(|(option, path)| Some((option, path.as_ref()?))) {
        Some((option, path)) if config.mode == Mode::Eager => Err(Failure::Input(format!(
            "{option} {}: --mode eager captures no graphs, so there is nothing to write; use --mode graphs or \
             --mode both",
            path.display()
        ))),
        _ => Ok(()),
    }
}

fn options(args: &TrainArgs, train: TrainConfig) -> Options {
    let files = &args.files;
    Options {
        device: args.job.place.device.name().to_owned(),
        train,
        data: files.data.clone(),
        json: args.common.json.clone(),
        trace_out: files.trace_out.clone(),
        timeline: files.timeline.clone(),
        log_out: files.log_out.clone(),
    }
}

/// What a span's numbers count: a schedule has steps and no clock.
fn ticks(config: &TrainConfig) -> Ticks {
    if config.schedule_seed.is_some() { Ticks::Steps } else { Ticks::Nanoseconds }
}

/// The files that were asked for.
#[derive(Default)]
struct Files {
    json: Option<Output>,
    trace: Option<Output>,
    timeline: Option<Output>,
    log: Option<Output>,
}

impl Files {
    fn prepare(args: &TrainArgs) -> Result<Files, Failure> {
        let files = &args.files;
        let wanted = [
            ("--json", args.common.json.as_deref()),
            ("--trace-out", files.trace_out.as_deref()),
            ("--timeline", files.timeline.as_deref()),
            ("--log-out", files.log_out.as_deref()),
        ];
        let inputs: Vec<_> = files.data.as_deref().into_iter().collect();
        let [json, trace, timeline, log] = output::prepare(wanted, &inputs)?;
        Ok(Files { json, trace, timeline, log })
    }

    fn write(self, outcome: &TrainOutcome, examined: &Examined) -> Result<(), Failure> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Failure::Run(format!("the {what} could not be written: {error}"))
        };
        let mut files = Vec::new();
        if let Some(file) = self.json {
            files.push((file, json(&examined.run)?));
        }
        if let Some(graphs) = &outcome.graphs {
            if let Some(file) = self.trace {
                files.push((file, write_trace(&graphs.trace).into_bytes()));
            }
            if let Some(file) = self.timeline {
                let mut bytes = Vec::new();
                let spans: Vec<_> = graphs.spans.iter().map(Vec::as_slice).collect();
                write_timeline(&graphs.log, &spans, ticks(&outcome.config), &mut bytes)
                    .map_err(|error| failed("timeline", &error))?;
                files.push((file, bytes));
            }
            if let Some(file) = self.log {
                let mut bytes = Vec::new();
                write_log(&graphs.log, &mut bytes).map_err(|error| failed("event log", &error))?;
                files.push((file, bytes));
            }
        }
        output::write_all(files)
    }
}

//! The command line.

mod bench;
mod doctor;
mod graphs;
mod parse;
mod place;
mod plan;
mod reduce_scatter;
mod report;
mod simulate;
mod train;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub(crate) use bench::{BenchArgs, Measure};
pub(crate) use doctor::DoctorArgs;
pub(crate) use graphs::GraphsArgs;
pub(crate) use parse::Depth;
pub(crate) use place::{DeviceName, Place, Sms};
pub(crate) use plan::{CheckArgs, CompareArgs, GroupDepths, PlanArgs, PlanChoices};
pub(crate) use reduce_scatter::ReduceScatterArgs;
pub(crate) use report::ReportArgs;
pub(crate) use simulate::SimulateArgs;
pub(crate) use train::{HOST_RANKS, TrainArgs};

/// Plans, owns, fences and proves the fixed-address communication buffers of training with captured graphs.
#[derive(Debug, Parser)]
#[command(name = "sessile", version, max_term_width = 110, after_help = AFTER)]
pub(crate) struct Program {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER: &str = "Exit status: 0 good, 1 the verdict is bad (bits differ, a violation), 2 bad input.";

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a small transformer eagerly and as captured graphs, and compare them to the bit
    Train(Box<TrainArgs>),
    /// Plan the buffers of a recorded trace
    Plan(PlanArgs),
    /// Compare all strategies on recorded traces
    Compare(CompareArgs),
    /// Check a trace, a saved run or an event log with code that shares nothing with the planner
    Check(CheckArgs),
    /// Simulate a step of a large model on a virtual clock: buffers, times, overlap
    Simulate(Box<SimulateArgs>),
    /// Measure on this machine, each against its peers in one run
    Bench(Box<BenchArgs>),
    /// See what this machine has for --device cuda, what each thing enables, and how to get what is missing
    Doctor(DoctorArgs),
    /// Write one HTML file: arena map, timeline, losses, memory, depth, checks
    Report(ReportArgs),
}

/// Options that every command has.
#[derive(Args, Debug)]
pub(crate) struct Common {
    /// Also write the result as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Print errors only
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

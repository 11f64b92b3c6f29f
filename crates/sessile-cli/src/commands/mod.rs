//! The commands.

mod bench;
mod check;
mod compare;
mod depth;
mod doctor;
mod explain;
mod findings;
mod launch;
mod packing;
mod place;
mod plan;
mod report;
mod self_test;
mod simulate;
mod train;

use serde::Serialize;

use crate::{
    args::{Command, Program},
    failure::{Failure, Verdict},
};

/// Runs the command that was asked for.
///
/// # Errors
/// Bad input, or a run that could not end.
pub(crate) fn run(program: Program) -> Result<Verdict, Failure> {
    match program.command {
        Command::Train(args) => train::run(&args),
        Command::Plan(args) if packing::is_packing(&args) => packing::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Check(args) if args.self_test => self_test::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Simulate(args) => simulate::run(&args),
    }
}

/// A document as indented JSON with a newline at its end.
fn json(document: &impl Serialize) -> Result<Vec<u8>, Failure> {
    let mut bytes = serde_json::to_vec_pretty(document)
        .map_err(|error| Failure::Run(format!("the result could not be written as JSON: {error}")))?;
    bytes.push(b'\n');
    Ok(bytes)
}

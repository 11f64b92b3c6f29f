//! The program `sessile`: plans, trains with, compares and checks fixed-address communication buffers.
//!
//! Data go to stdout; progress, notes and errors go to stderr. Exit status: 0 good, 1 the verdict is bad, 2 bad
//! input.
#![forbid(unsafe_code)]

mod args;
mod auto;
mod commands;
mod failure;
mod input;
mod museum;
mod output;
mod run;
mod special;
mod text;
mod ui;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let program = args::Program::parse();
    match commands::run(program) {
        Ok(verdict) => verdict.into(),
        Err(failure) => {
            ui::error(&failure);
            failure.exit_code()
        }
    }
}

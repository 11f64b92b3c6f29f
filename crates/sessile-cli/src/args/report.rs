//! Options of `sessile report`.

use std::path::PathBuf;

use clap::Args;

use super::plan::PlanChoices;

/// Options of `sessile report`.
#[derive(Args, Debug)]
pub(crate) struct ReportArgs {
    /// A saved run (`train --json`), a plan (`plan --out` or `plan --json`) or a trace, which is planned
    #[arg(value_name = "RUN-OR-PLAN")]
    pub(crate) file: PathBuf,
    /// Write the report here
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// The trace of a plan: names, lifetimes, timeline
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// What `simulate --depth auto --json` wrote: exposed communication by depth
    #[arg(long, value_name = "FILE")]
    pub(crate) simulation: Option<PathBuf>,
    /// Print errors only
    #[arg(long, short)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) choices: PlanChoices,
}

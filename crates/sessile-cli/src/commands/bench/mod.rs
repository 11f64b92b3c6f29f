//! `sessile bench`.

mod graphs;
mod reduce_scatter;

use crate::{
    args::{BenchArgs, Measure},
    failure::{Failure, Verdict},
};

/// Runs the measurement that was asked for.
pub(super) fn run(args: &BenchArgs) -> Result<Verdict, Failure> {
    match &args.what {
        Measure::Graphs(args) => graphs::run(args),
        Measure::ReduceScatter(args) => reduce_scatter::run(args),
    }
}

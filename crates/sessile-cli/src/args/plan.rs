//! Options of `sessile plan`, `compare` and `check`.

use std::{collections::BTreeMap, path::PathBuf};

use clap::Args;
use sessile_model::config::Overlap;
use sessile_plan::{LaunchOrder, PlanOptions, StepCut, Strategy};

use super::{Common, parse};

/// Depths of single groups.
#[derive(Args, Debug)]
pub(crate) struct GroupDepths {
    /// Depth of the group `expert`, counted in launches that use it; the same as --depth-group expert=N
    #[arg(long, value_name = "N", value_parser = parse::whole::<u32>)]
    depth_expert: Option<u32>,
    /// Depth of a group, counted in launches that use it; may be given again for other groups
    #[arg(long, value_name = "GROUP=N", value_parser = parse::group_depth)]
    depth_group: Vec<(String, u32)>,
}

impl GroupDepths {
    /// By group; of a group that is named again, the last.
    pub(crate) fn by_group(&self) -> BTreeMap<String, u32> {
        let expert = self.depth_expert.map(|depth| ("expert".to_owned(), depth));
        expert.into_iter().chain(self.depth_group.iter().cloned()).collect()
    }
}

/// What shapes a plan.
#[derive(Args, Debug)]
#[command(next_help_heading = "Plan", allow_negative_numbers = true)]
pub(crate) struct PlanChoices {
    /// How bytes are given to buffers: sessile, generations:N, ring:N or per-request [default: sessile]
    #[arg(long, value_name = "NAME")]
    strategy: Option<Strategy>,
    /// Launches apart before bytes are reused; 1 makes launches serial; auto replays 1 to 3 for every group and chooses [default: 2]
    #[arg(long, value_name = "N|auto", value_parser = parse::depth_or_auto)]
    depth: Option<parse::Depth>,
    #[command(flatten)]
    groups: GroupDepths,
    /// With --depth auto: the least exposed communication whose arenas fit so many bytes
    #[arg(long, value_name = "BYTES", value_parser = parse::whole::<u64>)]
    pub(crate) memory_limit: Option<u64>,
    /// What happens between two steps [default: barrier]
    #[arg(long, value_name = "CUT", value_parser = parse::word(parse::CUTS))]
    step_cut: Option<StepCut>,
    /// Whether reduce-scatters may run on into the next graphs [default: on]
    #[arg(long, value_name = "ON|OFF", value_parser = parse::word(parse::OVERLAPS))]
    overlap: Option<Overlap>,
}

impl PlanChoices {
    /// The depth, or that it is to be chosen.
    pub(crate) fn depth(&self) -> parse::Depth {
        self.depth.unwrap_or(parse::Depth::Fixed(PlanOptions::default().depth))
    }

    /// As the planner takes them.
    pub(crate) fn options(&self) -> PlanOptions {
        let default = PlanOptions::default();
        PlanOptions {
            strategy: self.strategy.unwrap_or(default.strategy),
            depth: match self.depth() {
                parse::Depth::Fixed(depth) => depth,
                parse::Depth::Auto => default.depth,
            },
            depth_by_group: self.groups.by_group(),
            step_cut: self.step_cut.unwrap_or(default.step_cut),
            launch_order: match self.overlap {
                Some(Overlap::On) | None => LaunchOrder::Overlapped,
                Some(Overlap::Off) => LaunchOrder::Serial,
            },
        }
    }

    /// The first option that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--strategy", self.strategy.is_some()),
            ("--depth", self.depth.is_some()),
            ("--depth-expert", self.groups.depth_expert.is_some()),
            ("--depth-group", !self.groups.depth_group.is_empty()),
            ("--memory-limit", self.memory_limit.is_some()),
            ("--step-cut", self.step_cut.is_some()),
            ("--overlap", self.overlap.is_some()),
        ];
        given.into_iter().find_map(|(option, given)| given.then_some(option))
    }
}

/// Options of `sessile plan`.
#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    /// A trace, as `sessile train --trace-out FILE` writes it, or a packing file in CSV
    #[arg(value_name = "TRACE-OR-CSV")]
    pub(crate) trace: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) choices: PlanChoices,
    /// Of a packing file: bytes that it should fit; the search stops once it does, and exit status 1 says that it does not
    #[arg(long, value_name = "BYTES", value_parser = parse::whole::<u64>)]
    pub(crate) capacity: Option<u64>,
    /// Write the plan as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Write what lives when, and where it lies, as a packing file
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Write a timeline that opens in Perfetto: the trace under the plan, replayed on the virtual clock
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
    /// Print all views and fences, not only the first
    #[arg(long)]
    pub(crate) all: bool,
    /// Also print why the plan needs its bytes, what would need fewer, and how each group reduces
    #[arg(long)]
    pub(crate) explain: bool,
}

/// Options of `sessile compare`.
#[derive(Args, Debug)]
pub(crate) struct CompareArgs {
    /// Traces, as `sessile train --trace-out FILE` writes them
    #[arg(required = true, value_name = "TRACE")]
    pub(crate) traces: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) common: Common,
    /// Also draw the comparison
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// Options of `sessile check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    /// A trace, a saved run (`train --json`) or an event log (`train --log-out`)
    #[arg(value_name = "TRACE-OR-RUN", required_unless_present = "self_test")]
    pub(crate) file: Option<PathBuf>,
    /// Show every known fault in small, without sessile's rule and with it
    #[arg(long, conflicts_with = "file")]
    pub(crate) self_test: bool,
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(flatten)]
    pub(crate) choices: PlanChoices,
}

//! Depths that are chosen, and the table of what they were chosen from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sessile_model::{
    TrainError,
    simulate::{AutoError, Candidate, TraceDepth, WORTH, depth_of_trace, depth_text},
};
use sessile_plan::{Plan, Trace, plan};

use crate::{
    args::{Depth, PlanChoices},
    failure::Failure,
    ui::{count, table},
};

/// How the depth was chosen.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Auto {
    worth: f64,
    pub(super) memory_limit: Option<u64>,
    pub(super) candidates: Vec<Row>,
}

/// One vector of depths.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    /// The depths, as people read them.
    pub(super) text: String,
    pub(super) depth: BTreeMap<String, u32>,
    /// Whether depths count the launches that use the group, or all launches.
    pub(super) by_group: bool,
    pub(super) bytes: u64,
    pub(super) lower_bound_bytes: u64,
    pub(super) fences: u64,
    pub(super) backward_ns: u64,
    pub(super) exposed_ns: u64,
    pub(super) exposed_fraction: f64,
    pub(super) chosen: bool,
}

impl Auto {
    pub(super) fn new(candidates: Vec<Candidate>, chosen: usize, memory_limit: Option<u64>) -> Auto {
        let row = |(at, candidate): (usize, Candidate)| Row {
            text: depth_text(&candidate),
            depth: candidate.depth,
            by_group: candidate.by_group,
            bytes: candidate.bytes,
            lower_bound_bytes: candidate.lower_bound_bytes,
            fences: candidate.fences,
            backward_ns: candidate.backward_ns,
            exposed_ns: candidate.exposed_ns,
            exposed_fraction: candidate.exposed_fraction,
            chosen: at == chosen,
        };
        Auto { worth: WORTH, memory_limit, candidates: candidates.into_iter().enumerate().map(row).collect() }
    }

    /// The table, as people read it. `phase` is what the times are of.
    pub(super) fn table(&self, phase: &str) -> String {
        let row = |row: &Row| {
            vec![
                row.text.clone(),
                if row.chosen { "chosen".to_owned() } else { String::new() },
                count(row.bytes),
                count(row.lower_bound_bytes),
                count(row.fences),
                format!("{:.3}", row.backward_ns as f64 / 1e6),
                format!("{:.2}", 100.0 * row.exposed_fraction),
            ]
        };
        let time = format!("{phase} ms");
        let head = ["depth", "", "bytes", "lower bound", "fences", &time, "exposed %"];
        table(&head, 2, self.candidates.iter().map(row).collect())
    }
}

/// Plans a trace as the options say, choosing depths if they ask for it.
pub(super) fn planned(choices: &PlanChoices, trace: &Trace) -> Result<(Plan, Option<Auto>), Failure> {
    let options = choices.options();
    match (choices.depth, choices.memory_limit) {
        (Depth::Fixed(_), Some(_)) => {
            Err(Failure::Input("--memory-limit chooses among depths: use it with --depth auto".to_owned()))
        }
        (Depth::Fixed(_), None) => {
            let made = plan(trace, &options).map_err(|error| Failure::Input(error.to_string()))?;
            Ok((made, None))
        }
        (Depth::Auto, limit) => {
            let TraceDepth { candidates, chosen, plan } =
                depth_of_trace(trace, &options, limit).map_err(failure)?;
            Ok((plan, Some(Auto::new(candidates, chosen, limit))))
        }
    }
}

/// Whose fault it is that there is no choice.
pub(super) fn failure(error: AutoError) -> Failure {
    match error {
        AutoError::Simulation(TrainError::Plan(why)) => Failure::Input(why.to_string()),
        AutoError::Simulation(error) => Failure::Run(error.to_string()),
        AutoError::OverLimit(error) => Failure::Input(error.to_string()),
    }
}

//! The table of depths that one was chosen from, in documents and on the terminal.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sessile_model::simulate::{Candidate, DepthTable, WORTH, depth_text};
use sessile_plan::Plan;

use crate::ui::{count, table};

/// How the depth was chosen.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Auto {
    worth: f64,
    #[serde(deserialize_with = "Option::deserialize")]
    pub(crate) memory_limit: Option<u64>,
    pub(crate) candidates: Vec<Row>,
}

/// One vector of depths.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// The depths, as people read them.
    pub(crate) text: String,
    pub(crate) depth: BTreeMap<String, u32>,
    /// Whether depths count the launches that use the group, or all launches.
    pub(crate) by_group: bool,
    pub(crate) bytes: u64,
    pub(crate) lower_bound_bytes: u64,
    pub(crate) fences: u64,
    pub(crate) backward_ns: u64,
    pub(crate) exposed_ns: u64,
    pub(crate) exposed_fraction: f64,
    pub(crate) chosen: bool,
}

impl Auto {
    pub(crate) fn new((candidates, chosen): DepthTable, memory_limit: Option<u64>) -> Auto {
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
    pub(crate) fn table(&self, phase: &str) -> String {
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

impl Row {
    /// Whether a plan is the one of this row.
    pub(crate) fn is_of(&self, plan: &Plan) -> bool {
        let options = &plan.options;
        let depths = if options.depth_by_group.is_empty() {
            // One group: where bytes and fences agree, so do both counts of launches.
            (!self.by_group || self.depth.len() == 1)
                && self.depth.values().all(|&depth| depth == options.depth)
        } else {
            self.by_group && self.depth == options.depth_by_group
        };
        depths && self.bytes == plan.bytes() && self.fences == plan.fences.len() as u64
    }
}

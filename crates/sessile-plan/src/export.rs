//! A plan as a packing file: what lives when in one total order, and where it lies.
//!
//! ```text
//!  id,lower,upper,size,alignment,offset,domain
//!  0,3,9,1024,256,0,default                         written first at node 3, read last at node 8
//! ```
//!
//! The order is that of the program: launches one after the other, the points of each as they were enqueued. Everything
//! that a plan orders is enqueued in that order, so no two rows of a domain overlap in both time and bytes; but what runs at
//! once on a device looks apart here, so packing such a file anew may give less than a plan can take.
//! [`read_packing`](crate::read_packing) reads it: an arena a domain, the offsets passed over.

use std::fmt::Write as _;

use crate::{
    packing::quoted,
    plan::Plan,
    request::VIEW_ALIGN,
    roster::{Entry, Roster},
    trace::Trace,
};

/// Rows of all requests, one for each launch that makes one: a request made again has the rows `id`, `id.1`, `id.2`.
/// `trace` passes [`check_trace`](crate::check_trace), and `plan` is of it.
pub fn write_plan_csv(trace: &Trace, plan: &Plan) -> String {
    let roster = Roster::new(trace);
    // Nodes of all launches before each, and of all.
    let mut base = vec![0u64];
    for &runner in &roster.launched {
        base.push(base[base.len() - 1] + trace.runners[runner].points.len() as u64 + 2);
    }
    let mut text = "id,lower,upper,size,alignment,offset,domain\n".to_owned();
    for entry in &roster.entries {
        let Some(view) = plan.view(entry.id) else { continue };
        let domain = plan.arenas.get(view.arena as usize).map(|arena| &arena.domain);
        for (nth, (lower, upper)) in lives(&roster, entry, &base).into_iter().enumerate() {
            let again = if nth == 0 { String::new() } else { format!(".{nth}") };
            let domain = domain.map(ToString::to_string).unwrap_or_default();
            // A string takes whatever is written.
            let _ = writeln!(
                text,
                "{}{again},{lower},{upper},{},{VIEW_ALIGN},{},{}",
                entry.id.0,
                view.bytes,
                view.offset,
                quoted(&domain)
            );
        }
    }
    text
}

/// From the first write up to, not including, the node after the last read, for each launch of the owner.
fn lives(roster: &Roster<'_>, entry: &Entry<'_>, base: &[u64]) -> Vec<(u64, u64)> {
    let mut all = Vec::new();
    for step in &roster.steps {
        let releases = roster.positions_in(step, entry.release_runner);
        for &at in roster.positions_in(step, entry.runner) {
            let lower = base[at as usize] + u64::from(entry.acquire);
            // What nothing releases later in the step lives to its end.
            let upper = match releases[releases.partition_point(|&other| other < at)..].first() {
                Some(&release) => base[release as usize] + u64::from(entry.release) + 1,
                None => base[step.end as usize],
            };
            all.push((lower, upper.max(lower + 1)));
        }
    }
    all
}

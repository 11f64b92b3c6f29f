//! Where the time of a phase went.
//!
//! ```text
//!  kernels        ██████  ██████████    ████          compute
//!  collectives      ▒▒▒▒▒▒▒▒▒      ▒▒▒▒▒▒▒▒▒
//!                         ^^            ^^            exposed: a collective is in flight, no kernel runs
//!                                               ^^    idle: neither
//! ```
//!
//! A kernel that collectives beside it delay takes longer by that much, which is exposed time, too, and no compute.

use std::collections::HashMap;

use sessile_hal::Span;
use sessile_runtime::log::{Entry, RankLog, Work};

/// Times of one rank, in nanoseconds. `compute_ns + exposed_ns + idle_ns` is `total_ns`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseTimes {
    /// From the first begin to the last end.
    pub total_ns: u64,
    /// While a kernel runs, without its delay.
    pub compute_ns: u64,
    /// While a collective is in flight: from when this rank's part could begin to its end.
    pub communication_ns: u64,
    /// While a collective is in flight and no kernel runs, and by how much collectives delay kernels.
    pub exposed_ns: u64,
    /// While neither.
    pub idle_ns: u64,
}

impl PhaseTimes {
    /// Exposed time as a fraction of the whole.
    pub fn exposed_fraction(&self) -> f64 {
        if self.total_ns == 0 { 0.0 } else { self.exposed_ns as f64 / self.total_ns as f64 }
    }
}

/// Which spans are collectives.
pub(super) struct Kinds<'a> {
    log: &'a RankLog,
    by_ticket: HashMap<u64, &'a Entry>,
}

impl<'a> Kinds<'a> {
    pub(super) fn new(log: &'a RankLog) -> Self {
        let by_ticket = log
            .entries
            .iter()
            .filter_map(|entry| match entry {
                Entry::Enqueue { ticket, .. } | Entry::Launch { ticket, .. } => Some((*ticket, entry)),
                _ => None,
            })
            .collect();
        Kinds { log, by_ticket }
    }

    fn is_collective(&self, span: &Span) -> bool {
        let work = match (self.by_ticket.get(&span.ticket.0), span.node) {
            (Some(Entry::Enqueue { work, .. }), _) => Some(work),
            (Some(Entry::Launch { graph, .. }), Some(node)) => {
                let graph = self.log.graphs.get(*graph as usize);
                graph.and_then(|graph| graph.nodes.get(node as usize)).map(|node| &node.work)
            }
            _ => None,
        };
        matches!(work, Some(Work::Collective { .. }))
    }

    /// The times of a phase whose spans these are, and whose kernels were delayed by so much.
    pub(super) fn times(&self, spans: &[Span], delay_ns: u64) -> PhaseTimes {
        let of = |collective| {
            let of_kind = spans.iter().filter(move |span| self.is_collective(span) == collective);
            merged(of_kind.map(|span| (span.begin, span.end)).collect())
        };
        times(&of(false), &of(true), delay_ns)
    }
}

/// Intervals in order, none touching the next.
fn merged(mut intervals: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    intervals.sort_unstable();
    let mut all: Vec<(u64, u64)> = Vec::with_capacity(intervals.len());
    for (begin, end) in intervals {
        match all.last_mut() {
            Some(last) if begin <= last.1 => last.1 = last.1.max(end),
            _ => all.push((begin, end)),
        }
    }
    all
}

fn length(intervals: &[(u64, u64)]) -> u64 {
    intervals.iter().map(|(begin, end)| end - begin).sum()
}

fn times(kernels: &[(u64, u64)], collectives: &[(u64, u64)], delay_ns: u64) -> PhaseTimes {
    let either = merged([kernels, collectives].concat());
    let (Some(first), Some(last)) = (either.first(), either.last()) else { return PhaseTimes::default() };
    let total_ns = last.1 - first.0;
    let (compute_ns, busy) = (length(kernels) - delay_ns, length(&either));
    PhaseTimes {
        total_ns,
        compute_ns,
        communication_ns: length(collectives),
        exposed_ns: busy - compute_ns,
        idle_ns: total_ns - busy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exposed_is_a_collective_without_a_kernel() {
        let kernels = merged(vec![(10, 20), (15, 30), (50, 60)]);
        let collectives = merged(vec![(25, 40), (35, 45), (58, 70), (80, 90)]);
        let expected = PhaseTimes {
            total_ns: 80,
            compute_ns: 30,
            communication_ns: 42,
            exposed_ns: 15 + 10 + 10,
            idle_ns: 5 + 10,
        };
        assert_eq!(times(&kernels, &collectives, 0), expected);
        assert_eq!(times(&[], &[], 0), PhaseTimes::default());
        let delayed = PhaseTimes { compute_ns: 30 - 7, exposed_ns: 35 + 7, ..expected };
        assert_eq!(times(&kernels, &collectives, 7), delayed);
    }
}

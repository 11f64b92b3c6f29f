//! The lower bound: the most bytes of requests that conflict pairwise, and which they are.
//!
//! The earlier uses that conflict with one use, and that use, hold every set of pairwise conflicting uses of which it is
//! the last. Where conflicts come from one order, the heaviest such set is found exactly in each of these small windows;
//! windows that cannot beat the best so far are left out.

use std::collections::BTreeSet;

use crate::{
    conflicts::Conflicts,
    error::PlanError,
    flow::heaviest_antichain,
    limits::WINDOW_MAX,
    options::{PlanOptions, StepCut, Strategy},
    precedence::Conflicting,
    roster::Roster,
    trace::Trace,
};

/// A lower bound and its witness.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bound {
    pub(crate) bytes: u64,
    /// Requests that conflict pairwise, as roster indices.
    pub(crate) requests: Vec<usize>,
}

/// The most bytes that must be live at once under the options, over all domains: a heaviest set of requests that
/// conflict pairwise. For the strategies that sessile is measured against, `depth` is no promise, and only what is live
/// at once conflicts.
///
/// Where a step launches a runner again under the barrier, depth counts between first launches only, as the plan may.
///
/// # Errors
/// [`PlanError::Trace`] for a trace that [`check_trace`](crate::check_trace) rejects, [`PlanError::OrderTooCostly`].
pub fn lower_bound(trace: &Trace, options: &PlanOptions) -> Result<u64, PlanError> {
    crate::check::check_trace(trace)?;
    let roster = Roster::new(trace);
    let conflicts = Conflicts::new(&roster, options)?;
    Ok(lower_bounds(&roster, options, &conflicts).iter().map(|bound| bound.bytes).sum())
}

/// The bound of each domain, in roster order.
pub(crate) fn lower_bounds(roster: &Roster<'_>, options: &PlanOptions, conflicts: &Conflicts) -> Vec<Bound> {
    let own = options.strategy == Strategy::Sessile;
    (0..roster.domains.len())
        .map(|domain| {
            let mut search = Search::new(roster, conflicts, domain);
            let held = conflicts.held.iter();
            match options.step_cut {
                _ if conflicts.plain && own => held.for_each(|found| search.all(found, |_| true)),
                StepCut::Wrap if own => held.for_each(|found| search.all(found, |_| true)),
                StepCut::Barrier if own => {
                    held.enumerate()
                        .for_each(|(step, found)| search.all(found, |at| conflicts.is_first(step, at)));
                    conflicts.live.iter().for_each(|found| search.all(found, |_| true));
                }
                _ => conflicts.live.iter().for_each(|found| search.all(found, |_| true)),
            }
            search.finish()
        })
        .collect()
}

struct Search {
    /// Bytes of each class in the domain.
    weights: Vec<u64>,
    members: Vec<Vec<usize>>,
    bytes: u64,
    /// Classes of the best set.
    best: Vec<usize>,
    /// Windows seen: weights, and which pairs conflict.
    seen: BTreeSet<(Vec<u64>, Vec<u64>)>,
}

impl Search {
    fn new(roster: &Roster<'_>, conflicts: &Conflicts, domain: usize) -> Search {
        let in_domain = |&&member: &&usize| roster.entries[member].domain == domain;
        let members: Vec<Vec<usize>> = conflicts
            .classes
            .iter()
            .map(|class| class.members.iter().filter(in_domain).copied().collect())
            .collect();
        let bytes = |of: &Vec<usize>| of.iter().map(|&member| roster.entries[member].bytes).sum();
        let weights = members.iter().map(bytes).collect();
        Search { weights, members, bytes: 0, best: Vec::new(), seen: BTreeSet::new() }
    }

    /// Looks at the windows of all uses that count.
    fn all(&mut self, found: &Conflicting, counts: impl Fn(usize) -> bool) {
        let weight = |weights: &[u64], at: usize| weights[found.uses[at].class];
        let mut windows: Vec<(u64, usize)> = Vec::new();
        for at in 0..found.uses.len() {
            if weight(&self.weights, at) > 0 && counts(at) {
                let earlier = found.earlier(at).iter().filter(|&&other| counts(other as usize));
                let sum: u64 = earlier.map(|&other| weight(&self.weights, other as usize)).sum();
                windows.push((sum + weight(&self.weights, at), at));
            }
        }
        windows.sort_unstable_by_key(|&(sum, at)| (u64::MAX - sum, at));
        for (sum, at) in windows {
            if sum <= self.bytes {
                break;
            }
            self.window(found, at, &counts);
        }
    }

    fn window(&mut self, found: &Conflicting, last: usize, counts: &impl Fn(usize) -> bool) {
        let class = |at: usize| found.uses[at].class;
        // Of each class, the latest use.
        let mut items: Vec<usize> = Vec::new();
        let mut classes = vec![class(last)];
        for &at in found.earlier(last).iter().rev() {
            let at = at as usize;
            if self.weights[class(at)] > 0 && counts(at) && !classes.contains(&class(at)) {
                classes.push(class(at));
                items.push(at);
                if items.len() == WINDOW_MAX {
                    break;
                }
            }
        }
        items.reverse();
        let weights: Vec<u64> = items.iter().map(|&at| self.weights[class(at)]).collect();
        let mut pairs = vec![0u64; (items.len() * items.len()).div_ceil(64)];
        let mut clique = true;
        for b in 0..items.len() {
            for a in 0..b {
                if found.conflict(items[a], items[b]) {
                    let bit = b * items.len() + a;
                    pairs[bit / 64] |= 1 << (bit % 64);
                } else {
                    clique = false;
                }
            }
        }
        let conflict = |a: usize, b: usize| {
            let bit = b * items.len() + a;
            pairs[bit / 64] >> (bit % 64) & 1 == 1
        };
        let of_last = self.weights[class(last)];
        let chosen: Vec<usize> = if clique {
            (0..items.len()).collect()
        } else {
            let mut signature = weights.clone();
            signature.push(of_last);
            if !self.seen.insert((signature, pairs.clone())) {
                return;
            }
            heaviest_antichain(&weights, |a, b| !conflict(a, b))
        };
        let bytes = chosen.iter().map(|&item| weights[item]).sum::<u64>() + of_last;
        if bytes > self.bytes {
            self.bytes = bytes;
            self.best = chosen.into_iter().map(|item| class(items[item])).chain([class(last)]).collect();
        }
    }

    fn finish(self) -> Bound {
        let mut requests: Vec<usize> =
            self.best.iter().flat_map(|&class| self.members[class].iter().copied()).collect();
        requests.sort_unstable();
        Bound { bytes: self.bytes, requests }
    }
}

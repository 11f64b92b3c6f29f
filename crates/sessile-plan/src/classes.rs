//! Classes: requests of one runner with one lifetime. They conflict alike, so order is found class by class.
//!
//! ```text
//!  runner      stream 0   acquire a  acquire b  work  acquire c  work          a and b are one class,
//!              stream 1   wait       collective  release a, b    ...           c is another
//! ```
//!
//! A request whose first write is not proven to precede its last read lives as long as its runner.

use std::{collections::BTreeMap, ops::Range};

use crate::{
    options::{PlanOptions, StepCut},
    order::RunnerOrder,
    roster::{LocalNode, Roster},
};

/// Requests that live from one node to another.
pub(crate) struct Class {
    pub(crate) runner: usize,
    pub(crate) acquire: LocalNode,
    pub(crate) release_runner: usize,
    pub(crate) release: LocalNode,
    /// Index into `options.depth_by_group`, in order of name, where the group has a depth of its own.
    group: Option<usize>,
    /// Roster indices, ascending.
    pub(crate) members: Vec<usize>,
}

/// All classes, in order of runner and acquiring node.
pub(crate) fn classes(roster: &Roster<'_>, options: &PlanOptions, orders: &[RunnerOrder]) -> Vec<Class> {
    let groups: BTreeMap<&str, usize> =
        options.depth_by_group.keys().enumerate().map(|(at, group)| (group.as_str(), at)).collect();
    let mut by_key: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for (index, entry) in roster.entries.iter().enumerate() {
        let within = &orders[entry.runner];
        let (acquire, release) = if entry.spans() || within.precedes(entry.acquire, entry.release) {
            (entry.acquire, entry.release)
        } else {
            (0, within.end())
        };
        let group = entry.spec.group.as_deref().and_then(|group| groups.get(group)).copied();
        let key = (entry.runner, acquire, entry.release_runner, release, group);
        by_key.entry(key).or_default().push(index);
    }
    by_key
        .into_iter()
        .map(|((runner, acquire, release_runner, release, group), members)| Class {
            runner,
            acquire,
            release_runner,
            release,
            group,
            members,
        })
        .collect()
}

/// One use of a class: first and last launch, counted through the rounds of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) class: usize,
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// The launch from which depth lets others reuse the bytes.
    pub(crate) held: u32,
}

/// Whether depth counts, or only what is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// As the options say.
    Counts,
    /// Bytes may be reused by the next launch.
    None,
}

/// Uses of all classes in one step, counted from its first launch, in order of launch and acquiring node. Under the
/// wrap-around cut through `rounds` rounds.
pub(crate) fn uses(
    roster: &Roster<'_>,
    options: &PlanOptions,
    classes: &[Class],
    step: &Range<u32>,
    rounds: u32,
    depth: Depth,
) -> Vec<Use> {
    let launches = step.end - step.start;
    let reach = Reach::new(roster, options, step);
    let mut all = Vec::new();
    for (number, class) in classes.iter().enumerate() {
        for (from, to) in occurrences(roster, class, step, options.step_cut) {
            let held = match depth {
                Depth::Counts => reach.end(class, to),
                Depth::None => to.saturating_add(1),
            };
            for round in 0..rounds {
                let shift = round * launches;
                let held = held.saturating_add(shift);
                all.push(Use { class: number, from: from + shift, to: to.saturating_add(shift), held });
            }
        }
    }
    all.sort_unstable_by_key(|used| (used.from, classes[used.class].acquire, used.class));
    all
}

/// The launch that releases what nothing releases in a step.
const NEVER: u32 = u32::MAX;

/// First and last launch of each lifetime of a class in one step. The last may lie in the next round under `Wrap`.
fn occurrences(roster: &Roster<'_>, class: &Class, step: &Range<u32>, cut: StepCut) -> Vec<(u32, u32)> {
    let local = |positions: &[u32]| positions.iter().map(|at| at - step.start).collect::<Vec<u32>>();
    let own = local(roster.positions_in(step, class.runner));
    if class.release_runner == class.runner {
        return own.into_iter().map(|at| (at, at)).collect();
    }
    let launches = step.end - step.start;
    let releases = local(roster.positions_in(step, class.release_runner));
    // Launches of the releasing runner in this round and, under wrap, the next.
    let release = |k: usize| match releases.get(k) {
        Some(&at) => Some(at),
        None if cut == StepCut::Wrap => releases.get(k - releases.len()).map(|&at| at + launches),
        None => None,
    };
    let mut live = Vec::with_capacity(own.len());
    for (k, &from) in own.iter().enumerate() {
        let again = match own.get(k + 1) {
            Some(&next) => next,
            None if cut == StepCut::Wrap => own[0] + launches,
            None => launches,
        };
        let after = releases.partition_point(|&at| at < from);
        let mut before_again = releases.partition_point(|&at| at < again);
        if again > launches {
            before_again += releases.partition_point(|&at| at + launches < again);
        }
        let to = if before_again > after { release(before_again - 1) } else { release(after) };
        live.push((from, to.unwrap_or(NEVER)));
    }
    live
}

/// How far depth lengthens lifetimes in one step.
struct Reach {
    launches: u32,
    depth: u32,
    /// Of each group with a depth of its own: the depth, and the launches that use the group.
    groups: Vec<(u32, Vec<u32>)>,
}

impl Reach {
    fn new(roster: &Roster<'_>, options: &PlanOptions, step: &Range<u32>) -> Reach {
        let users = |group: &str| {
            let using: Vec<bool> = roster.trace.runners.iter().map(|runner| runner.uses(group)).collect();
            let launched = &roster.launched[step.start as usize..step.end as usize];
            (0..step.end - step.start).filter(|&at| using[launched[at as usize]]).collect()
        };
        let groups = options.depth_by_group.iter().map(|(group, &depth)| (depth, users(group))).collect();
        Reach { launches: step.end - step.start, depth: options.depth, groups }
    }

    /// The launch from which bytes of a class that is released in launch `to` may be reused. Runs on around the circle.
    fn end(&self, class: &Class, to: u32) -> u32 {
        let Some((depth, users)) = class.group.map(|group| &self.groups[group]).filter(|_| to != NEVER)
        else {
            return to.saturating_add(self.depth);
        };
        // `to` counts as the first launch; the one after the last that counts may reuse.
        let Some(more) = depth.checked_sub(2) else { return to + 1 };
        if users.is_empty() {
            return u32::MAX;
        }
        let around = to / self.launches * self.launches;
        let next = users.partition_point(|&user| user <= to - around) + more as usize;
        let rounds = (next / users.len()) as u32;
        users[next % users.len()]
            .saturating_add(around)
            .saturating_add(rounds.saturating_mul(self.launches))
            .saturating_add(1)
    }
}

//! What bytes hold: nothing, zeros, data, or a sum whose order matters.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::bytes::{Bytes, Leaves};
use super::order::Point;
use super::report::{Operation, Reason, name};
use super::tally::{Tally, memory};
use crate::log::{Entry, Log, LogAccess, LogView, Mode, Work, ZERO};

/// A step of one rank: where it begins, and its name.
struct Step<'a> {
    entry: u32,
    name: &'a str,
}

/// Additions into one accumulator in one step.
type Additions = Vec<String>;

/// The rules about what bytes hold, over all ranks.
pub(super) struct Content<'a> {
    log: &'a Log,
    /// By place in [`Log::ranks`].
    steps: Vec<Vec<Step<'a>>>,
    /// Runner that is discovered from this entry on.
    discovering: Vec<Vec<(u32, Option<&'a str>)>>,
    accumulators: HashSet<(u32, u64)>,
    /// By accumulator and step of its rank. In a topological order, which is the order of the additions wherever they
    /// are ordered at all.
    additions: BTreeMap<(u32, u64), BTreeMap<usize, Additions>>,
}

impl<'a> Content<'a> {
    pub(super) fn new(log: &'a Log) -> Self {
        let at = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        let steps = log.ranks.iter().map(|rank| {
            let step = |(entry, what): (usize, &'a Entry)| match what {
                Entry::Step { name } => Some(Step { entry: at(entry), name }),
                _ => None,
            };
            rank.entries.iter().enumerate().filter_map(step).collect()
        });
        let discovering = log.ranks.iter().map(|rank| {
            let scope = |(entry, what): (usize, &'a Entry)| match what {
                Entry::Discovering { runner } => Some((at(entry), runner.as_deref())),
                _ => None,
            };
            rank.entries.iter().enumerate().filter_map(scope).collect()
        });
        let accumulators = log
            .ranks
            .iter()
            .flat_map(|rank| rank.memories.iter().filter(|m| m.accumulator).map(|m| (rank.rank, m.serial)));
        Content {
            log,
            steps: steps.collect(),
            discovering: discovering.collect(),
            accumulators: accumulators.collect(),
            additions: BTreeMap::new(),
        }
    }

    fn work(&self, point: &Point) -> Option<(&'a Work, &'a str)> {
        let rank = &self.log.ranks[point.rank as usize];
        match &rank.entries[point.entry as usize] {
            Entry::Enqueue { work, label, .. } => Some((work, label)),
            Entry::Launch { graph, .. } => {
                let node = rank.graphs[*graph as usize].nodes.get(point.node as usize)?;
                Some((&node.work, &node.label))
            }
            _ => None,
        }
    }

    /// What a write of this point leaves.
    pub(super) fn leaves(&self, point: &Point) -> Leaves {
        match self.work(point) {
            Some((Work::Op(kernel), _)) if kernel == ZERO => Leaves::Zeros,
            Some(_) => Leaves::Data,
            None => match self.log.ranks[point.rank as usize].entries[point.entry as usize] {
                Entry::Fresh { .. } => Leaves::Nothing,
                _ => Leaves::Data,
            },
        }
    }

    /// Looks at an access before its own mark is set.
    pub(super) fn access(&mut self, point: &Point, access: &LogAccess, bytes: &Bytes, tally: &mut Tally<'_>) {
        if access.mode != Mode::Write {
            let unwritten = bytes.written((access.start, access.end), |mark| mark.leaves == Leaves::Nothing);
            if let Some(&((start, end), _)) = unwritten.first() {
                tally.fault(Reason::NeverWritten {
                    memory: memory(self.log, access.rank, access.memory),
                    start,
                    end,
                    reader: Operation::of(self.log, point),
                });
            }
        }
        if access.mode == Mode::Read {
            self.padding(point, access, bytes, tally);
        }
        let place = (access.rank, access.memory);
        if access.mode == Mode::Update && self.accumulators.contains(&place) {
            self.addition(point, place);
        }
    }

    /// The padding behind a tensor that a reduce-scatter reads must have been filled with zeros last.
    fn padding(&self, point: &Point, access: &LogAccess, bytes: &Bytes, tally: &mut Tally<'_>) {
        let Some((Work::Collective { kind, .. }, _)) = self.work(point) else { return };
        if !kind.contains("reduce_scatter") && kind != "all_to_all" {
            return;
        }
        let rank = &self.log.ranks[point.rank as usize];
        let Entry::Launch { graph, .. } = &rank.entries[point.entry as usize] else { return };
        // Views of one runner share bytes where their lifetimes are apart: the one that is read has exactly these bounds.
        // Of several such the largest tensor counts, since the log does not tell them apart.
        let is_read = |view: &&LogView| {
            (view.memory, view.start, view.end) == (access.memory, access.start, access.end)
        };
        let views = rank.graphs[*graph as usize].views.iter().flatten();
        if let Some(view) = views.filter(is_read).max_by_key(|view| view.logical_end) {
            let tail = (view.logical_end, view.end);
            let clean: u64 = bytes
                .written(tail, |mark| mark.leaves == Leaves::Zeros)
                .iter()
                .map(|((start, end), _)| end - start)
                .sum();
            if clean == tail.1 - tail.0 {
                return;
            }
            let dirty = bytes.written(tail, |mark| mark.leaves != Leaves::Zeros);
            let (start, end) = dirty.first().map_or(tail, |(range, _)| *range);
            let writer = dirty.first().filter(|(_, mark)| mark.leaves == Leaves::Data);
            tally.fault(Reason::DirtyPadding {
                memory: memory(self.log, access.rank, access.memory),
                start,
                end,
                writer: writer.map(|(_, mark)| tally.operation(mark.point)),
                reader: Operation::of(self.log, point),
            });
        }
    }

    fn addition(&mut self, point: &Point, place: (u32, u64)) {
        let Some((work, label)) = self.work(point) else { return };
        let rank = point.rank as usize;
        let Some(step) = self.steps[rank].partition_point(|step| step.entry < point.entry).checked_sub(1)
        else {
            return;
        };
        let runner = match &self.log.ranks[rank].entries[point.entry as usize] {
            Entry::Launch { graph, .. } => Some(self.log.ranks[rank].graphs[*graph as usize].runner.as_str()),
            _ => {
                let scopes = &self.discovering[rank];
                let scope = scopes.partition_point(|(entry, _)| *entry < point.entry).checked_sub(1);
                scope.and_then(|scope| scopes[scope].1)
            }
        };
        let what = match runner {
            Some(runner) => format!("{} of runner `{runner}`", name(work, label)),
            None => name(work, label),
        };
        self.additions.entry(place).or_default().entry(step).or_default().push(what);
    }

    /// Compares every step's additions with those of the first step of its name.
    pub(super) fn finish(self, tally: &mut Tally<'_>) {
        for (place, by_step) in &self.additions {
            let Some(rank) = self.log.ranks.iter().position(|rank| rank.rank == place.0) else { continue };
            let steps = &self.steps[rank];
            let mut first: HashMap<&str, usize> = HashMap::new();
            for (at, step) in steps.iter().enumerate() {
                let model = *first.entry(step.name).or_insert(at);
                let of = |step: usize| by_step.get(&step).map_or(&[][..], Vec::as_slice);
                let (expected, found) = (of(model), of(at));
                // The last step may have been cut off by the end of the log.
                let cut_off = at + 1 == steps.len() && expected.starts_with(found);
                if step.name.is_empty() || expected == found || cut_off {
                    continue;
                }
                let differs = (0..).find(|&i| expected.get(i) != found.get(i)).unwrap_or(0);
                tally.fault(Reason::AccumulationOrder {
                    memory: memory(self.log, place.0, place.1),
                    step: step.name.to_owned(),
                    entry: step.entry,
                    position: differs as u64,
                    expected: expected.get(differs).cloned(),
                    found: found.get(differs).cloned(),
                });
            }
        }
    }
}

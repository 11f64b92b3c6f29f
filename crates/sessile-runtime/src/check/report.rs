//! What the checker says.

use std::fmt;

use serde::Serialize;
use sessile_hal::ByteRange;

use super::order::Point;
use crate::log::{Entry, Log, Mode, RankLog, Work};

/// One operation of a log, as a report names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// World rank.
    pub rank: u32,
    /// The runner whose graph it is in; none for eager work and the host.
    pub runner: Option<String>,
    /// Its label, or what it does if it has none.
    pub label: String,
    /// Label of the stream it was enqueued on, or its graph was launched on.
    pub stream: Option<String>,
    /// Place of its graph in the rank's log.
    pub graph: Option<u32>,
    /// Its node there.
    pub node: Option<u32>,
    /// Place of its entry (the launch, for a node) in the rank's log.
    pub entry: u32,
}

impl Operation {
    pub(super) fn of(log: &Log, point: &Point) -> Operation {
        let rank = &log.ranks[point.rank as usize];
        let stream = |at: &u32| rank.streams.get(*at as usize).cloned();
        let mut named = Operation {
            rank: rank.rank,
            runner: None,
            label: String::new(),
            stream: None,
            graph: None,
            node: None,
            entry: point.entry,
        };
        match &rank.entries[point.entry as usize] {
            Entry::Enqueue { stream: at, work, label, .. } => {
                named.stream = stream(at);
                named.label = name(work, label);
            }
            Entry::Launch { stream: at, graph, .. } => {
                let logged = &rank.graphs[*graph as usize];
                named.stream = stream(at);
                named.runner = Some(logged.runner.clone());
                named.graph = Some(*graph);
                match logged.nodes.get(point.node as usize) {
                    Some(node) => {
                        named.node = Some(point.node);
                        named.label = name(&node.work, &node.label);
                    }
                    None => "launch".clone_into(&mut named.label),
                }
            }
            Entry::HostWait { stream: at, accesses } => {
                named.stream = stream(at);
                let label = match accesses.first() {
                    None => "host wait",
                    Some(access) if access.mode == Mode::Read => "host read",
                    Some(_) => "host write",
                };
                label.clone_into(&mut named.label);
            }
            Entry::Exchange { comm } => {
                named.label = format!("exchange of `{}`", rank.comms[*comm as usize].name);
            }
            Entry::Fresh { .. } => "allocation".clone_into(&mut named.label),
            Entry::Registered { .. } => "registration".clone_into(&mut named.label),
            Entry::Sealed { .. } => "seal".clone_into(&mut named.label),
            Entry::Released {} => "release of the plan".clone_into(&mut named.label),
            Entry::Step { name } => named.label = format!("step `{name}`"),
            Entry::Discovering { .. } => "discovery".clone_into(&mut named.label),
            Entry::Ready { weight } => named.label = format!("grad-ready of `{weight}`"),
        }
        named
    }
}

/// The label, or what is done if there is none.
pub(super) fn name(work: &Work, label: &str) -> String {
    if !label.is_empty() {
        return label.to_owned();
    }
    match work {
        Work::Op(kernel) => kernel.clone(),
        Work::Collective { kind, .. } => kind.clone(),
        Work::Record(event) => format!("record of event {event}"),
        Work::Wait(event) => format!("wait for event {event}"),
        Work::Empty => "join".to_owned(),
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (rank {}", self.label, self.rank)?;
        match (&self.runner, self.node) {
            (Some(runner), Some(node)) => write!(f, ", runner `{runner}` node {node}")?,
            (Some(runner), None) => write!(f, ", runner `{runner}`")?,
            (None, _) => write!(f, ", eager")?,
        }
        if let Some(stream) = &self.stream {
            write!(f, ", stream `{stream}`")?;
        }
        write!(f, ", entry {})", self.entry)
    }
}

/// An allocation, as a report names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct MemoryName {
    /// The rank that holds it.
    pub rank: u32,
    /// Its serial there.
    pub serial: u64,
    /// Its label; empty if the log does not list it.
    pub label: String,
}

impl fmt::Display for MemoryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` (r{}m{})", self.label, self.rank, self.serial)
    }
}

/// How two accesses conflict, by the order of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Hazard {
    /// A read may come before the write that it should see.
    ReadAfterWrite,
    /// A write may come before the read of the old bytes has ended.
    WriteAfterRead,
    /// Either write may be the last.
    WriteAfterWrite,
}

impl Hazard {
    /// Its name, as tables show it.
    pub fn name(self) -> &'static str {
        match self {
            Hazard::ReadAfterWrite => "read after write",
            Hazard::WriteAfterRead => "write after read",
            Hazard::WriteAfterWrite => "write after write",
        }
    }
}

/// What is wrong. More kinds will come: match with a wildcard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Reason {
    /// Two operations touch the same bytes, at least one writes, and nothing orders them.
    Unordered {
        /// How they conflict.
        hazard: Hazard,
        /// Where.
        memory: MemoryName,
        /// First byte that both touch.
        start: u64,
        /// One past the last byte that both touch.
        end: u64,
        /// The earlier one in the log.
        first: Operation,
        /// The later one.
        second: Operation,
    },
    /// Members of a group met in different collectives.
    CollectiveMismatch {
        /// The group.
        group: String,
        /// Which collective of it, from 0.
        number: u64,
        /// One member's.
        first: Operation,
        /// Another's.
        second: Operation,
    },
    /// Members of a group never came to a collective.
    MissingPart {
        /// The group.
        group: String,
        /// Which collective of it, from 0.
        number: u64,
        /// World ranks that did not come; the first 64.
        missing: Vec<u32>,
        /// A part that waits for them.
        present: Operation,
    },
    /// Members of a group never came to an exchange.
    MissingExchange {
        /// The group.
        group: String,
        /// Which exchange of it, from 0; its making is the first.
        number: u64,
        /// World ranks that did not come; the first 64.
        missing: Vec<u32>,
        /// A host that waits for them.
        present: Operation,
    },
    /// Operations wait for one another in a ring: none of them can run.
    Deadlock {
        /// The ring, each waiting for the one before it; the first 64.
        cycle: Vec<Operation>,
        /// Points of the order that are never reached, and so were not checked.
        unreached: u64,
    },
    /// An operation reads bytes that nobody wrote since they were allocated or mapped again.
    NeverWritten {
        /// Where.
        memory: MemoryName,
        /// First such byte that it reads.
        start: u64,
        /// One past the last byte of that piece.
        end: u64,
        /// The reader.
        reader: Operation,
    },
    /// A graph touches bytes of an arena that its plan did not give to its runner.
    OutsideView {
        /// Where.
        memory: MemoryName,
        /// First byte it touches.
        start: u64,
        /// One past the last.
        end: u64,
        /// What touches it.
        operation: Operation,
    },
    /// Work uses an arena whose plan was given up before.
    StaleView {
        /// The arena.
        memory: MemoryName,
        /// What uses it.
        operation: Operation,
    },
    /// A reduce-scatter reads padding that was not filled with zeros last.
    DirtyPadding {
        /// Where.
        memory: MemoryName,
        /// First byte of padding that is not zero.
        start: u64,
        /// One past the last byte of that piece.
        end: u64,
        /// What wrote there last, if anything did.
        writer: Option<Operation>,
        /// The reduce-scatter.
        reader: Operation,
    },
    /// A collective uses memory that is registered with another communicator, or with none where its kind needs it.
    ForeignWindow {
        /// Where.
        memory: MemoryName,
        /// The group it is registered with.
        owner: Option<String>,
        /// The group of the collective.
        group: String,
        /// The collective.
        operation: Operation,
    },
    /// Members of a group give views at different places of their windows to one collective.
    WindowMismatch {
        /// The group.
        group: String,
        /// Which collective of it, from 0.
        number: u64,
        /// World rank that differs from the first.
        rank: u32,
        /// Where the first member's views lie: (window in order of registration, offset, bytes).
        expected: Vec<(u32, u64, u64)>,
        /// Where those of `rank` lie.
        found: Vec<(u32, u64, u64)>,
    },
    /// Additions into one allocation came in another order than in the first step of that name.
    AccumulationOrder {
        /// Where.
        memory: MemoryName,
        /// The step's name.
        step: String,
        /// Place of its entry in the rank's log.
        entry: u32,
        /// Which addition of the step, from 0.
        position: u64,
        /// What the first step added there: operation and runner.
        expected: Option<String>,
        /// What this one added.
        found: Option<String>,
    },
    /// Registered memory was allocated, or a window registered, after the seal.
    AfterSeal {
        /// What was done.
        what: &'static str,
        /// The allocation.
        memory: MemoryName,
        /// Place of the entry in the rank's log.
        entry: u32,
    },
    /// A weight's gradient became ready another number of times than in the first step of that name.
    ReadyCount {
        /// World rank.
        rank: u32,
        /// The weight.
        weight: String,
        /// The step's name.
        step: String,
        /// Place of its entry in the rank's log.
        entry: u32,
        /// Times in the first step.
        expected: u64,
        /// Times in this one.
        found: u64,
    },
    /// A graph waits for another one with which nothing behind the wait shares bytes.
    NeedlessWait {
        /// World rank.
        rank: u32,
        /// The runner that waits.
        runner: String,
        /// Its node.
        node: u32,
        /// The runners that record what it waits for.
        recorders: Vec<String>,
    },
    /// The log breaks its own format; nothing was checked.
    Malformed {
        /// How.
        text: String,
    },
    /// The log is beyond what is checked; it was not checked to the end.
    TooLarge {
        /// Of what.
        what: &'static str,
        /// How many there are.
        needed: u64,
        /// How many may be.
        limit: u64,
    },
}

impl Reason {
    /// A code for tables and tests.
    pub fn code(&self) -> &'static str {
        match self {
            Reason::Unordered { .. } => "unordered",
            Reason::CollectiveMismatch { .. } => "collective_mismatch",
            Reason::MissingPart { .. } => "missing_part",
            Reason::MissingExchange { .. } => "missing_exchange",
            Reason::Deadlock { .. } => "deadlock",
            Reason::NeverWritten { .. } => "never_written",
            Reason::OutsideView { .. } => "outside_view",
            Reason::StaleView { .. } => "stale_view",
            Reason::DirtyPadding { .. } => "dirty_padding",
            Reason::ForeignWindow { .. } => "foreign_window",
            Reason::WindowMismatch { .. } => "window_mismatch",
            Reason::AccumulationOrder { .. } => "accumulation_order",
            Reason::AfterSeal { .. } => "after_seal",
            Reason::ReadyCount { .. } => "ready_count",
            Reason::NeedlessWait { .. } => "needless_wait",
            Reason::Malformed { .. } => "malformed",
            Reason::TooLarge { .. } => "too_large",
        }
    }

    /// The bytes, where it is about bytes.
    pub fn range(&self) -> Option<ByteRange> {
        match *self {
            Reason::Unordered { start, end, .. }
            | Reason::NeverWritten { start, end, .. }
            | Reason::OutsideView { start, end, .. }
            | Reason::DirtyPadding { start, end, .. } => Some(ByteRange { start, end }),
            _ => None,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Unordered { hazard, memory, start, end, first, second } => write!(
                f,
                "{}: nothing orders {first} and {second} on bytes {start}..{end} of {memory}",
                hazard.name()
            ),
            Reason::CollectiveMismatch { group, number, first, second } => {
                write!(f, "collective {number} of group `{group}` is {first} and {second}")
            }
            Reason::MissingPart { group, number, missing, present } => {
                write!(f, "collective {number} of group `{group}`: {present} waits for ranks {missing:?}")
            }
            Reason::MissingExchange { group, number, missing, present } => {
                write!(f, "exchange {number} of group `{group}`: {present} waits for ranks {missing:?}")
            }
            Reason::Deadlock { cycle, unreached } => {
                write!(f, "deadlock, {unreached} points never reached:")?;
                cycle.iter().take(16).try_for_each(|operation| write!(f, " → {operation}"))
            }
            Reason::NeverWritten { memory, start, end, reader } => {
                write!(f, "{reader} reads bytes {start}..{end} of {memory}, which nobody wrote")
            }
            Reason::OutsideView { memory, start, end, operation } => write!(
                f,
                "{operation} touches bytes {start}..{end} of {memory}, which the plan did not give to its runner"
            ),
            Reason::StaleView { memory, operation } => {
                write!(f, "{operation} uses {memory} after its plan was given up")
            }
            Reason::DirtyPadding { memory, start, end, writer, reader } => {
                write!(f, "{reader} reads padding {start}..{end} of {memory}, ")?;
                match writer {
                    Some(writer) => write!(f, "which {writer} wrote last and did not fill with zeros"),
                    None => write!(f, "which nobody filled with zeros"),
                }
            }
            Reason::ForeignWindow { memory, owner, group, operation } => {
                write!(f, "{operation} of group `{group}` uses {memory}, ")?;
                match owner {
                    Some(owner) => write!(f, "a window of group `{owner}`"),
                    None => write!(f, "which is no window of any group"),
                }
            }
            Reason::WindowMismatch { group, number, rank, expected, found } => write!(
                f,
                "collective {number} of group `{group}`: rank {rank} gives (window, offset, bytes) {found:?}, the first \
                 member {expected:?}"
            ),
            Reason::AccumulationOrder { memory, step, entry, position, expected, found } => {
                let text = |side: &Option<String>| side.clone().unwrap_or_else(|| "nothing".to_owned());
                write!(
                    f,
                    "step `{step}` (entry {entry}) adds into {memory} in another order: addition {position} is {}, the \
                     first such step had {}",
                    text(found),
                    text(expected)
                )
            }
            Reason::AfterSeal { what, memory, entry } => {
                write!(f, "{what} of {memory} after the seal (entry {entry})")
            }
            Reason::ReadyCount { rank, weight, step, entry, expected, found } => write!(
                f,
                "rank {rank}: the gradient of `{weight}` became ready {found} times in step `{step}` (entry {entry}), \
                 {expected} times in the first such step"
            ),
            Reason::NeedlessWait { rank, runner, node, recorders } => write!(
                f,
                "rank {rank}: runner `{runner}` node {node} waits for {recorders:?}, with which nothing behind the wait \
                 shares bytes"
            ),
            Reason::Malformed { text } => write!(f, "malformed log: {text}"),
            Reason::TooLarge { what, needed, limit } => {
                write!(f, "{needed} {what}, more than the {limit} that are checked: record fewer steps")
            }
        }
    }
}

/// A fault and how often it was met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The first time it was met.
    #[serde(flatten)]
    pub reason: Reason,
    /// How often the same two operations (nodes of the same graphs; eager work of the same label and stream), or
    /// the same group and ranks, were met like this. For races a lower bound: a pair that stands behind another
    /// reported one (see the module) is not counted.
    pub count: u64,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if self.count > 1 {
            write!(f, " ({} times)", self.count)?;
        }
        Ok(())
    }
}

/// The verdict on a log.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Operations checked: enqueues, nodes of every launch, named waits.
    pub operations: u64,
    /// Accesses compared.
    pub accesses: u64,
    /// Ranks in the log.
    pub ranks: u64,
    /// Entries in the log, of all ranks.
    pub entries: u64,
    /// Graph launches among them.
    pub launches: u64,
    /// Chains of ordered operations.
    pub chains: u32,
    /// What is wrong.
    pub violations: Vec<Violation>,
    /// Violations beyond those listed.
    pub unlisted: u64,
}

impl Report {
    pub(super) fn of(log: &Log) -> Report {
        let launch = |entry: &&Entry| matches!(entry, Entry::Launch { .. });
        let launches = |rank: &RankLog| rank.entries.iter().filter(launch).count() as u64;
        Report {
            ranks: log.ranks.len() as u64,
            entries: log.ranks.iter().map(|rank| rank.entries.len() as u64).sum(),
            launches: log.ranks.iter().map(launches).sum(),
            ..Report::default()
        }
    }

    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty() && self.unlisted == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let faults = self.violations.len() as u64 + self.unlisted;
        write!(f, "{} operations checked, {faults} violation", self.operations)?;
        f.write_str(if faults == 1 { "" } else { "s" })?;
        self.violations.iter().try_for_each(|violation| write!(f, "\n  {violation}"))?;
        if self.unlisted > 0 {
            write!(f, "\n  and {} more", self.unlisted)?;
        }
        Ok(())
    }
}

//! Logs by hand.

use sessile_runtime::check::{Hazard, Reason, Report, check};
use sessile_runtime::log::{
    Entry, Log, LogAccess, LogComm, LogGraph, LogMemory, LogNode, Mode, RankLog, Work,
};

/// Bytes of each allocation. Every rank has four, with serials 0 to 3; 0 is an arena.
pub(crate) const BYTES: u64 = 64;

/// One rank's log under construction.
pub(crate) struct Rank {
    pub(crate) log: RankLog,
    ticket: u64,
}

impl Rank {
    /// Rank `rank` with that many streams, and the communicator `world` of ranks 0 and 1 (its index is 0).
    pub(crate) fn new(rank: u32, streams: u32) -> Rank {
        let memory = |serial| LogMemory {
            serial,
            label: format!("m{serial}"),
            bytes: BYTES,
            arena: serial == 0,
            symmetric: false,
            accumulator: false,
        };
        let log = RankLog {
            rank,
            streams: (0..streams).map(|stream| format!("s{stream}")).collect(),
            comms: vec![LogComm { name: "world".into(), ranks: vec![0, 1] }],
            memories: (0..4).map(memory).collect(),
            ..RankLog::default()
        };
        Rank { log, ticket: 0 }
    }

    fn ticket(&mut self) -> u64 {
        self.ticket += 1;
        self.ticket
    }

    pub(crate) fn work(&mut self, stream: u32, work: Work, label: &str, accesses: &[LogAccess]) -> u64 {
        let ticket = self.ticket();
        let (label, accesses) = (label.to_owned(), accesses.to_vec());
        self.log.entries.push(Entry::Enqueue { ticket, stream, work, label, accesses });
        ticket
    }

    pub(crate) fn op(&mut self, stream: u32, label: &str, accesses: &[LogAccess]) -> u64 {
        self.work(stream, Work::Op("kernel".into()), label, accesses)
    }

    pub(crate) fn record(&mut self, stream: u32, event: u32) -> u64 {
        self.work(stream, Work::Record(event), "", &[])
    }

    pub(crate) fn wait(&mut self, stream: u32, event: u32) -> u64 {
        self.work(stream, Work::Wait(event), "", &[])
    }

    pub(crate) fn collective(&mut self, stream: u32, kind: &str, accesses: &[LogAccess]) -> u64 {
        self.work(stream, Work::Collective { comm: 0, kind: kind.into() }, kind, accesses)
    }

    pub(crate) fn graph(&mut self, runner: &str, nodes: Vec<LogNode>) -> u32 {
        self.log.graphs.push(LogGraph { runner: runner.into(), views: None, nodes });
        u32::try_from(self.log.graphs.len() - 1).unwrap()
    }

    pub(crate) fn launch(&mut self, graph: u32, stream: u32) -> u64 {
        let ticket = self.ticket();
        self.log.entries.push(Entry::Launch { ticket, stream, graph });
        ticket
    }

    pub(crate) fn host(&mut self, stream: u32, accesses: &[LogAccess]) {
        self.log.entries.push(Entry::HostWait { stream, accesses: accesses.to_vec() });
    }

    pub(crate) fn exchange(&mut self) {
        self.log.entries.push(Entry::Exchange { comm: 0 });
    }
}

/// A node.
pub(crate) fn node(work: Work, label: &str, accesses: &[LogAccess], dependencies: &[u32]) -> LogNode {
    let (accesses, dependencies) = (accesses.to_vec(), dependencies.to_vec());
    LogNode { work, label: label.into(), accesses, dependencies }
}

/// A kernel node.
pub(crate) fn kernel(label: &str, accesses: &[LogAccess], dependencies: &[u32]) -> LogNode {
    node(Work::Op("kernel".into()), label, accesses, dependencies)
}

fn access(rank: u32, memory: u64, (start, end): (u64, u64), mode: Mode) -> LogAccess {
    LogAccess { rank, memory, start, end, mode }
}

/// A read of bytes of memory `at = (rank, serial)`.
pub(crate) fn read(at: (u32, u64), bytes: (u64, u64)) -> LogAccess {
    access(at.0, at.1, bytes, Mode::Read)
}

/// A write.
pub(crate) fn write(at: (u32, u64), bytes: (u64, u64)) -> LogAccess {
    access(at.0, at.1, bytes, Mode::Write)
}

/// An update.
pub(crate) fn update(at: (u32, u64), bytes: (u64, u64)) -> LogAccess {
    access(at.0, at.1, bytes, Mode::Update)
}

/// The job's log.
pub(crate) fn job(ranks: Vec<Rank>) -> Log {
    Log::from_ranks(ranks.into_iter().map(|rank| rank.log).collect())
}

/// Checks, after a round trip through JSON.
pub(crate) fn verdict(ranks: Vec<Rank>) -> Report {
    let log = job(ranks);
    let mut bytes = Vec::new();
    sessile_runtime::log::write_log(&log, &mut bytes).unwrap();
    let again = sessile_runtime::log::read_log(&bytes).unwrap();
    assert_eq!(log, again);
    check(&again)
}

/// Nothing is wrong.
#[track_caller]
pub(crate) fn clean(ranks: Vec<Rank>) {
    let report = verdict(ranks);
    assert!(report.is_clean(), "{report}");
}

/// Exactly one fault, a race of these two labels.
#[track_caller]
pub(crate) fn race(ranks: Vec<Rank>, labels: (&str, &str), hazard: Hazard, range: (u64, u64)) -> Report {
    let report = verdict(ranks);
    assert_eq!(report.violations.len(), 1, "{report}");
    let Reason::Unordered { hazard: found, start, end, first, second, .. } = &report.violations[0].reason
    else {
        panic!("{report}");
    };
    assert_eq!((first.label.as_str(), second.label.as_str()), labels, "{report}");
    assert_eq!((*found, (*start, *end)), (hazard, range), "{report}");
    report
}

/// The codes of all faults.
pub(crate) fn codes(report: &Report) -> Vec<&'static str> {
    report.violations.iter().map(|violation| violation.reason.code()).collect()
}

//! What must hold of every log before anything walks it.

use std::collections::{HashMap, HashSet};

use super::{Entry, Log, LogAccess, LogError, RankLog, Work};

impl Log {
    /// The log of a job, from what its ranks recorded, in any order.
    pub fn from_ranks(mut ranks: Vec<RankLog>) -> Log {
        ranks.sort_by_key(|rank| rank.rank);
        Log { schema: Log::SCHEMA.to_owned(), version: super::LOG_VERSION, ranks }
    }

    /// Checks that every index points at something and every range lies in its allocation.
    ///
    /// # Errors
    /// The first fault found; permanent.
    pub fn validate(&self) -> Result<(), LogError> {
        for (at, pair) in self.ranks.windows(2).enumerate() {
            if pair[0].rank >= pair[1].rank {
                let (found, previous) = (pair[1].rank, pair[0].rank);
                return Err(LogError::RankOrder { at: at as u64 + 1, found, previous });
            }
        }
        let mut sizes = HashMap::new();
        for log in &self.ranks {
            for (at, memory) in log.memories.iter().enumerate() {
                if sizes.insert((log.rank, memory.serial), memory.bytes).is_some() {
                    return Err(LogError::Duplicate {
                        rank: log.rank,
                        place: format!("memories[{at}]"),
                        field: "serial",
                        found: memory.serial,
                    });
                }
            }
        }
        self.ranks.iter().try_for_each(|log| Rank { log, sizes: &sizes }.validate())
    }
}

struct Rank<'a> {
    log: &'a RankLog,
    sizes: &'a HashMap<(u32, u64), u64>,
}

impl Rank<'_> {
    fn validate(&self) -> Result<(), LogError> {
        let rank = self.log.rank;
        for (at, comm) in self.log.comms.iter().enumerate() {
            let place = || format!("comms[{at}]");
            let mut members = HashSet::new();
            for member in &comm.ranks {
                if !members.insert(*member) {
                    let found = u64::from(*member);
                    return Err(LogError::Duplicate { rank, place: place(), field: "ranks", found });
                }
            }
            if !members.contains(&rank) {
                let ranks = comm.ranks.iter().copied().take(16).collect();
                return Err(LogError::NotMember { rank, place: place(), ranks });
            }
        }
        for (graph_at, graph) in self.log.graphs.iter().enumerate() {
            for (at, view) in graph.views.iter().flatten().enumerate() {
                let place = || format!("graphs[{graph_at}].views[{at}]");
                let (start, end, bytes) =
                    (view.start, view.end, self.sizes.get(&(rank, view.memory)).copied().unwrap_or(u64::MAX));
                if start > view.logical_end || view.logical_end > end || end > bytes {
                    return Err(LogError::Range { rank, place: place(), start, end, bytes });
                }
            }
            for (at, node) in graph.nodes.iter().enumerate() {
                let place = || format!("graphs[{graph_at}].nodes[{at}]");
                if let Some(&found) = node.dependencies.iter().find(|&&on| on as usize >= at) {
                    return Err(LogError::DependencyOrder { rank, place: place(), found });
                }
                self.work(&node.work, place)?;
                self.accesses(&node.accesses, place)?;
            }
        }
        for (at, entry) in self.log.entries.iter().enumerate() {
            let place = || format!("entries[{at}]");
            match entry {
                Entry::Enqueue { stream, work, accesses, .. } => {
                    self.index("stream", *stream, self.log.streams.len(), place)?;
                    self.work(work, place)?;
                    self.accesses(accesses, place)?;
                }
                Entry::Launch { stream, graph, .. } => {
                    self.index("stream", *stream, self.log.streams.len(), place)?;
                    self.index("graph", *graph, self.log.graphs.len(), place)?;
                }
                Entry::HostWait { stream, accesses } => {
                    self.index("stream", *stream, self.log.streams.len(), place)?;
                    self.accesses(accesses, place)?;
                }
                Entry::Exchange { comm } | Entry::Registered { comm, .. } => {
                    self.index("comm", *comm, self.log.comms.len(), place)?;
                }
                Entry::Fresh { accesses } => self.accesses(accesses, place)?,
                Entry::Sealed { .. }
                | Entry::Released {}
                | Entry::Step { .. }
                | Entry::Discovering { .. }
                | Entry::Ready { .. } => {}
            }
        }
        Ok(())
    }

    fn work(&self, work: &Work, place: impl Fn() -> String) -> Result<(), LogError> {
        match work {
            Work::Collective { comm, .. } => self.index("comm", *comm, self.log.comms.len(), place),
            Work::Op(_) | Work::Record(_) | Work::Wait(_) | Work::Empty => Ok(()),
        }
    }

    fn accesses(&self, accesses: &[LogAccess], place: impl Fn() -> String) -> Result<(), LogError> {
        for access in accesses {
            let bytes = self.sizes.get(&(access.rank, access.memory)).copied().unwrap_or(u64::MAX);
            if access.start > access.end || access.end > bytes {
                let LogAccess { start, end, .. } = *access;
                return Err(LogError::Range { rank: self.log.rank, place: place(), start, end, bytes });
            }
        }
        Ok(())
    }

    fn index(
        &self,
        field: &'static str,
        found: u32,
        limit: usize,
        place: impl Fn() -> String,
    ) -> Result<(), LogError> {
        if (found as usize) < limit {
            return Ok(());
        }
        let (found, limit) = (u64::from(found), limit as u64);
        Err(LogError::Index { rank: self.log.rank, place: place(), field, found, limit })
    }
}

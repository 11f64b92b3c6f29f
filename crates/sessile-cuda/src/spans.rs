//! When work ran: kernels of one thread before and after each operation append the GPU's clock to a log.
//!
//! In a graph the two are nodes of its own. A launch is told from the next by counting: launches of one graph never
//! overlap, so the k-th entry of a node belongs to the k-th launch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sessile_hal::{DeviceError, Span, Ticket};

use crate::context::RawStream;
use crate::kernel::{Argument, Extent, Modules};
use crate::physical::{Block, Pool, copy_in, copy_out};

/// Entries of the log between two readings.
const ROOM: u32 = 1 << 18;

/// The log of a device.
pub(crate) struct Spans {
    log: Block,
    count: Block,
    pool: Arc<Pool>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Launches of each graph since the log was read last.
    launches: HashMap<u32, Vec<Ticket>>,
    /// Nodes of each graph by the number of the enqueue in its capture.
    nodes: HashMap<u32, Vec<Option<u32>>>,
}

/// Whether an entry is the begin or the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Edge {
    Begin,
    End,
}

/// What an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// An eager enqueue.
    Eager(Ticket),
    /// An enqueue in the capture of a graph, by number.
    Captured { graph: u32, step: u32 },
}

const CAPTURED: u64 = 1 << 63;

impl Subject {
    fn key(self, edge: Edge) -> u64 {
        let edge = u64::from(edge == Edge::End);
        match self {
            Subject::Eager(ticket) => ticket.0 << 1 & !CAPTURED | edge,
            Subject::Captured { graph, step } => {
                CAPTURED | u64::from(graph & 0x7fff_ffff) << 32 | u64::from(step) << 1 | edge
            }
        }
    }

    fn of(key: u64) -> (Self, Edge) {
        let edge = if key & 1 == 1 { Edge::End } else { Edge::Begin };
        if key & CAPTURED == 0 {
            return (Subject::Eager(Ticket(key >> 1)), edge);
        }
        let graph = u32::try_from((key & !CAPTURED) >> 32).unwrap_or(0);
        let step = u32::try_from((key & 0xffff_ffff) >> 1).unwrap_or(0);
        (Subject::Captured { graph, step }, edge)
    }
}

impl Spans {
    pub(crate) fn new(pool: &Arc<Pool>) -> Result<Self, DeviceError> {
        let count = pool.alloc(4)?;
        copy_in(pool, count.address, &[0; 4])?;
        let log = pool.alloc(16 * u64::from(ROOM))?;
        Ok(Spans { log, count, pool: pool.clone(), known: Mutex::default() })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues an entry.
    pub(crate) fn stamp(
        &self,
        modules: &Modules,
        stream: &RawStream,
        subject: Subject,
        edge: Edge,
    ) -> Result<(), DeviceError> {
        let arguments = [
            Argument::U64(self.log.address),
            Argument::U64(self.count.address),
            Argument::U32(ROOM),
            Argument::U64(subject.key(edge)),
        ];
        let extent = Extent { grid: (1, 1, 1), block: (1, 1), shared: 0 };
        // SAFETY: the log has `ROOM` entries of 16 bytes and the count is one word; both live as long as the device,
        // and only these kernels write them, atomically in the count.
        unsafe { modules.launch(stream, "stamp", extent, &arguments) }
    }

    pub(crate) fn captured(&self, graph: u32, nodes: Vec<Option<u32>>) {
        self.known().nodes.insert(graph, nodes);
    }

    pub(crate) fn launched(&self, graph: u32, ticket: Ticket) {
        self.known().launches.entry(graph).or_default().push(ticket);
    }

    /// Everything since the last call. Nothing may be in flight.
    pub(crate) fn take(&self) -> Result<Vec<Span>, DeviceError> {
        let mut count = [0; 4];
        copy_out(&self.pool, &mut count, self.count.address)?;
        let count = u32::from_le_bytes(count).min(ROOM) as usize;
        let mut bytes = vec![0; 16 * count];
        if count > 0 {
            copy_out(&self.pool, &mut bytes, self.log.address)?;
        }
        copy_in(&self.pool, self.count.address, &[0; 4])?;
        let mut known = self.known();
        let launches = std::mem::take(&mut known.launches);
        let entries = bytes.chunks_exact(16).map(|entry| {
            let word = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap_or_default());
            (word(0), word(8))
        });
        Ok(pair(entries, &launches, &known.nodes))
    }
}

/// Begins and ends, in order of time, as spans in order of begin.
fn pair(
    entries: impl Iterator<Item = (u64, u64)>,
    launches: &HashMap<u32, Vec<Ticket>>,
    nodes: &HashMap<u32, Vec<Option<u32>>>,
) -> Vec<Span> {
    let mut begins: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut ends: HashMap<u64, Vec<u64>> = HashMap::new();
    for (key, time) in entries {
        let (list, key) = if key & 1 == 1 { (&mut ends, key & !1) } else { (&mut begins, key) };
        list.entry(key).or_default().push(time);
    }
    let mut spans = Vec::new();
    for (key, mut begins) in begins {
        let mut ends = ends.remove(&key).unwrap_or_default();
        begins.sort_unstable();
        ends.sort_unstable();
        for (at, (begin, end)) in begins.into_iter().zip(ends).enumerate() {
            let (ticket, node) = match Subject::of(key).0 {
                Subject::Eager(ticket) => (Some(ticket), None),
                Subject::Captured { graph, step } => (
                    launches.get(&graph).and_then(|launches| launches.get(at).copied()),
                    nodes.get(&graph).and_then(|nodes| nodes.get(step as usize).copied().flatten()),
                ),
            };
            if let Some(ticket) = ticket {
                spans.push(Span { ticket, node, begin, end });
            }
        }
    }
    spans.sort_by_key(|span| (span.begin, span.ticket, span.node));
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_survive_their_keys() {
        for subject in [
            Subject::Eager(Ticket(1)),
            Subject::Eager(Ticket(1 << 40)),
            Subject::Captured { graph: 0, step: 0 },
            Subject::Captured { graph: 7, step: 99 },
        ] {
            for edge in [Edge::Begin, Edge::End] {
                assert_eq!(Subject::of(subject.key(edge)), (subject, edge));
            }
        }
    }

    #[test]
    fn entries_of_a_node_belong_to_launches_in_order() {
        let node = Subject::Captured { graph: 3, step: 1 };
        let eager = Subject::Eager(Ticket(9));
        let mut entries = vec![(eager.key(Edge::Begin), 5), (eager.key(Edge::End), 6)];
        for launch in 0..2 {
            entries.push((node.key(Edge::End), 20 + 100 * launch));
            entries.push((node.key(Edge::Begin), 10 + 100 * launch));
        }
        let launches = HashMap::from([(3, vec![Ticket(4), Ticket(7)])]);
        let nodes = HashMap::from([(3, vec![None, Some(2)])]);
        let spans = pair(entries.into_iter(), &launches, &nodes);
        let span = |ticket, node, begin, end| Span { ticket: Ticket(ticket), node, begin, end };
        assert_eq!(spans, [span(9, None, 5, 6), span(4, Some(2), 10, 20), span(7, Some(2), 110, 120)]);
    }
}

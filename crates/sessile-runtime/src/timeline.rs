//! Timelines: a run as Chrome trace JSON, which opens in Perfetto (<https://ui.perfetto.dev>).
//!
//! ```text
//!   process "rank 0"
//!     thread "compute"            ├─ runner layer1.bwd ──────────┤├─ op ─┤     a lane per stream
//!     thread "layer1.bwd lane 0"  ├─ wgrad ─┤├─ dgrad ─┤                       lanes per runner's graph
//!     thread "layer1.bwd lane 1"             ├─ reduce_scatter ──┤──╮ fence
//!     thread "layer3.bwd lane 0"                                   ╰▶├ wait ┤
//! ```
//!
//! One process a rank; a lane per stream for eager work and for launches, which enclose their nodes in time; lanes for
//! each graph by a cover of its edges, the same for all its launches. Fences (a record and the waits that saw it) are
//! flow arrows.
//!
//! What is on one lane ran one after the other, but clocks of devices are not that exact: a slice that reaches beyond the
//! begin of a later one is cut there, so that slices of one lane are apart or nested, as viewers need. Its argument
//! `cut` tells how many ticks were cut off.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};

use serde_json::{Value, json};
use sessile_hal::Span;

use crate::check::cover;
use crate::log::{Entry, Log, LogAccess, LogNode, Mode, RankLog, Work};

/// What the numbers of a span count. A trace is in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ticks {
    /// Nanoseconds of a wall or virtual clock.
    Nanoseconds,
    /// Steps of a scheduler; shown as microseconds.
    Steps,
}

impl Ticks {
    /// In microseconds, exactly: ends that are told from begins and lengths must not differ by rounding.
    fn micros(self, ticks: u64) -> String {
        match self {
            Ticks::Nanoseconds => format!("{}.{:03}", ticks / 1000, ticks % 1000),
            Ticks::Steps => format!("{ticks}.0"),
        }
    }
}

/// Writes the timeline of a run. `spans` holds, in the order of [`Log::ranks`], what each rank's device took; what
/// the log does not know is passed over, and so are ranks without spans.
///
/// # Errors
/// Those of the writer.
pub fn write_timeline(log: &Log, spans: &[&[Span]], ticks: Ticks, out: &mut impl Write) -> io::Result<()> {
    let mut trace = Trace { out, ticks, first: true, flows: 0 };
    trace.out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    for (rank, spans) in log.ranks.iter().zip(spans) {
        Process::new(rank).write(spans, &mut trace)?;
    }
    trace.out.write_all(b"\n]}\n")?;
    trace.out.flush()
}

/// Events, one at a time.
struct Trace<'a, W> {
    out: &'a mut W,
    ticks: Ticks,
    first: bool,
    flows: u64,
}

impl<W: Write> Trace<'_, W> {
    fn event(&mut self, event: &str) -> io::Result<()> {
        self.out.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        self.out.write_all(event.as_bytes())
    }

    fn slice(&mut self, lane: Lane, (begin, end): Time, slice: &Slice<'_>) -> io::Result<()> {
        let (ts, dur) = (self.ticks.micros(begin), self.ticks.micros(end.saturating_sub(begin)));
        let Slice { name, category, args } = slice;
        let (process, thread, name) = (lane.process, lane.thread, json!(name));
        self.event(&format!(
            r#"{{"args":{args},"cat":"{category}","dur":{dur},"name":{name},"ph":"X","pid":{process},"tid":{thread},"ts":{ts}}}"#
        ))
    }

    /// An arrow from one place to another.
    fn flow(&mut self, from: (Lane, u64), to: (Lane, u64), name: &str) -> io::Result<()> {
        self.flows += 1;
        let (id, name) = (self.flows, json!(name));
        // The head binds to the slice around the point, not to the next one.
        for (phase, bind, (lane, time)) in [("s", "", from), ("f", r#""bp":"e","#, to)] {
            let (process, thread, ts) = (lane.process, lane.thread, self.ticks.micros(time));
            self.event(&format!(
                r#"{{{bind}"cat":"fence","id":{id},"name":{name},"ph":"{phase}","pid":{process},"tid":{thread},"ts":{ts}}}"#
            ))?;
        }
        Ok(())
    }
}

struct Slice<'a> {
    name: &'a str,
    category: &'static str,
    args: Value,
}

/// A track of the picture.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Lane {
    process: u32,
    thread: u64,
}

/// One rank.
struct Process<'a> {
    rank: &'a RankLog,
    /// Place in the entries, by ticket.
    entries: HashMap<u64, usize>,
    /// First thread of each graph, and the lane of each node.
    graphs: Vec<(u64, Vec<Option<u32>>)>,
    /// All threads and their names.
    threads: Vec<String>,
}

impl<'a> Process<'a> {
    fn new(rank: &'a RankLog) -> Self {
        let ticket = |entry: &Entry| match entry {
            Entry::Enqueue { ticket, .. } | Entry::Launch { ticket, .. } => Some(*ticket),
            _ => None,
        };
        let entries = rank.entries.iter().enumerate();
        let entries = entries.filter_map(|(at, entry)| Some((ticket(entry)?, at))).collect();
        let mut threads = rank.streams.clone();
        let mut graphs = Vec::with_capacity(rank.graphs.len());
        for graph in &rank.graphs {
            let (lanes, count) = cover(&graph.nodes, |_| true);
            graphs.push((threads.len() as u64, lanes));
            threads.extend((0..count).map(|lane| format!("{} lane {lane}", graph.runner)));
        }
        Process { rank, entries, graphs, threads }
    }

    fn lane(&self, thread: u64) -> Lane {
        Lane { process: self.rank.rank, thread }
    }

    /// Where work at `(entry, node)` is drawn.
    fn place(&self, entry: usize, node: Option<u32>) -> Option<Lane> {
        match (&self.rank.entries[entry], node) {
            (Entry::Enqueue { stream, .. }, None) | (Entry::Launch { stream, .. }, None) => {
                Some(self.lane(u64::from(*stream)))
            }
            (Entry::Launch { graph, .. }, Some(node)) => {
                let (first, lanes) = self.graphs.get(*graph as usize)?;
                let lane = lanes.get(node as usize).copied().flatten()?;
                Some(self.lane(first + u64::from(lane)))
            }
            _ => None,
        }
    }

    fn write<W: Write>(&self, spans: &[Span], trace: &mut Trace<'_, W>) -> io::Result<()> {
        let mut known: HashMap<Place, Time> = HashMap::new();
        for span in spans {
            let Some(&entry) = self.entries.get(&span.ticket.0) else { continue };
            if self.place(entry, span.node).is_some() {
                known.insert((entry, span.node), (span.begin, span.end.max(span.begin)));
            }
        }
        if known.is_empty() {
            return Ok(());
        }
        self.names(trace)?;
        let mut program =
            Program { known, streams: vec![None; self.rank.streams.len()], ..Program::default() };
        for (at, entry) in self.rank.entries.iter().enumerate() {
            match entry {
                Entry::Enqueue { stream, work, .. } => {
                    let before = program.stream_end(*stream);
                    let time = program.place(work, (at, None), before, before);
                    program.pass(*stream, time);
                }
                Entry::Launch { stream, graph, .. } => {
                    let Some(graph) = self.rank.graphs.get(*graph as usize) else { continue };
                    let whole = program.launch(&graph.nodes, at, *stream);
                    program.pass(*stream, whole);
                }
                _ => {}
            }
        }
        self.draw(&program, trace)
    }

    /// Slices and arrows, the slices of each lane apart or nested.
    fn draw<W: Write>(&self, program: &Program, trace: &mut Trace<'_, W>) -> io::Result<()> {
        let placed = program.drawn.iter().filter_map(|&(at, time)| Some((self.place(at.0, at.1)?, time, at)));
        let mut placed: Vec<(Lane, Time, Place)> = placed.collect();
        placed.sort_by_key(|&(lane, (begin, end), _)| (lane, begin, Reverse(end)));
        let mut ends: Vec<u64> = placed.iter().map(|&(_, (_, end), _)| end).collect();
        let mut around: Vec<usize> = Vec::new();
        for (at, &(lane, (begin, end), _)) in placed.iter().enumerate() {
            while let Some(outer) = around.pop() {
                if placed[outer].0 == lane && ends[outer] > begin {
                    if ends[outer] >= end {
                        around.push(outer);
                        break;
                    }
                    ends[outer] = begin;
                }
            }
            around.push(at);
        }
        let mut shown: HashMap<Place, u64> = HashMap::with_capacity(placed.len());
        for (&(lane, (begin, end), at), &shown_end) in placed.iter().zip(&ends) {
            shown.insert(at, shown_end);
            if let Some(mut slice) = self.slice(at.0, at.1) {
                if shown_end < end {
                    slice.args["cut"] = json!(end - shown_end);
                }
                trace.slice(lane, (begin, shown_end), &slice)?;
            }
        }
        for &Arrow { event, record, wait, arrives } in &program.arrows {
            let lanes = self.place(record.at.0, record.at.1).zip(self.place(wait.0, wait.1));
            if let Some((tail, head)) = lanes {
                // Each end must lie in its slice. A device may show a wait as begun before its record.
                let end = shown.get(&wait).copied().unwrap_or(arrives.1);
                let time = record.time.clamp(arrives.0, end);
                trace.flow((tail, record.time), (head, time), &format!("fence {event}"))?;
            }
        }
        Ok(())
    }

    fn names<W: Write>(&self, trace: &mut Trace<'_, W>) -> io::Result<()> {
        let pid = self.rank.rank;
        let meta = |name: &str, tid: usize, args: Value| json!({ "ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": name, "args": args });
        let mut event = |event: &Value| trace.event(&event.to_string());
        event(&meta("process_name", 0, json!({ "name": format!("rank {pid}") })))?;
        event(&meta("process_sort_index", 0, json!({ "sort_index": pid })))?;
        for (tid, name) in self.threads.iter().enumerate() {
            event(&meta("thread_name", tid, json!({ "name": name })))?;
            event(&meta("thread_sort_index", tid, json!({ "sort_index": tid })))?;
        }
        Ok(())
    }

    fn slice(&self, entry: usize, node: Option<u32>) -> Option<Slice<'_>> {
        let (work, label, accesses, ticket) = match (&self.rank.entries[entry], node) {
            (Entry::Enqueue { work, label, accesses, ticket, .. }, None) => (work, label, accesses, *ticket),
            (Entry::Launch { graph, ticket, .. }, Some(node)) => {
                let node = self.rank.graphs.get(*graph as usize)?.nodes.get(node as usize)?;
                (&node.work, &node.label, &node.accesses, *ticket)
            }
            (Entry::Launch { graph, ticket, .. }, None) => {
                let runner = &self.rank.graphs.get(*graph as usize)?.runner;
                let args = json!({ "graph": graph, "ticket": ticket });
                return Some(Slice { name: runner, category: "graph", args });
            }
            _ => return None,
        };
        let sizes = accesses.iter().map(|access| access.end.saturating_sub(access.start));
        let bytes = sizes.fold(0, u64::saturating_add);
        let operands: Vec<String> = accesses.iter().map(|access| self.operand(access)).collect();
        let mut args = json!({ "ticket": ticket, "bytes": bytes, "operands": operands });
        let (fallback, category) = match work {
            Work::Op(kernel) => {
                args["kernel"] = json!(kernel);
                (kernel.as_str(), "op")
            }
            Work::Collective { comm, kind } => {
                args["group"] = json!(self.rank.comms.get(*comm as usize).map(|comm| &comm.name));
                (kind.as_str(), "collective")
            }
            Work::Record(event) => {
                args["event"] = json!(event);
                ("record", "event")
            }
            Work::Wait(event) => {
                args["event"] = json!(event);
                ("wait", "event")
            }
            Work::Empty => ("join", "event"),
        };
        let name = if label.is_empty() { fallback } else { label };
        Some(Slice { name, category, args })
    }

    /// As `write r0 arena 0..256`.
    fn operand(&self, access: &LogAccess) -> String {
        let mode = match access.mode {
            Mode::Read => "read",
            Mode::Write => "write",
            Mode::Update => "update",
        };
        let own = access.rank == self.rank.rank;
        let listed = self.rank.memories.iter().find(|memory| own && memory.serial == access.memory);
        let label = listed.map_or_else(|| format!("m{}", access.memory), |memory| memory.label.clone());
        format!("{mode} r{} {label} {}..{}", access.rank, access.start, access.end)
    }
}

/// Entry, and node of a launch.
type Place = (usize, Option<u32>);

/// Begin and end.
type Time = (u64, u64);

/// A record that was enqueued.
#[derive(Clone, Copy)]
struct Recorded {
    at: Place,
    /// When the work that it follows began.
    since: u64,
    /// When it happened.
    time: u64,
}

/// A wait that saw a record.
#[derive(Clone, Copy)]
struct Arrow {
    event: u32,
    record: Recorded,
    wait: Place,
    arrives: Time,
}

/// Walks a rank's program and finds the times of all that is drawn. Devices give spans of kernels and collectives;
/// for records, waits and joins that have none, the times follow from what is before them.
#[derive(Default)]
struct Program {
    known: HashMap<Place, Time>,
    /// Work that last ended, by stream.
    streams: Vec<Option<Time>>,
    records: HashMap<u32, Recorded>,
    /// All slices.
    drawn: Vec<(Place, Time)>,
    /// All arrows.
    arrows: Vec<Arrow>,
}

impl Program {
    fn stream_end(&self, stream: u32) -> Option<Time> {
        self.streams.get(stream as usize).copied().flatten()
    }

    /// The stream stands at the end of this work.
    fn pass(&mut self, stream: u32, time: Option<Time>) {
        if let (Some(tail), Some(time)) = (self.streams.get_mut(stream as usize), time) {
            *tail = Some(tail.map_or(time, |before| if before.1 > time.1 { before } else { time }));
        }
    }

    /// Finds when a piece of work ran. `before` is what it follows, and `rest` where it is drawn if it took no time.
    fn place(&mut self, work: &Work, at: Place, before: Option<Time>, rest: Option<Time>) -> Option<Time> {
        let seen = match work {
            Work::Wait(event) => self.records.get(event).copied(),
            _ => None,
        };
        let time = self.known.get(&at).copied().or_else(|| match work {
            Work::Record(_) | Work::Empty => rest.map(|(_, end)| (end, end)),
            Work::Wait(_) => {
                // Nobody knows when the host enqueued it: it is shown to wait while the work that it waits for runs.
                let from = before.map_or(0, |(_, end)| end);
                match seen.filter(|record| record.time > from) {
                    Some(record) => Some((from.max(record.since).min(record.time), record.time)),
                    None => rest.map(|(_, end)| (end, end)),
                }
            }
            Work::Op(_) | Work::Collective { .. } => None,
        })?;
        self.drawn.push((at, time));
        if let (Work::Wait(event), Some(record)) = (work, seen) {
            self.arrows.push(Arrow { event: *event, record, wait: at, arrives: time });
        }
        if let Work::Record(event) = work {
            let since = before.map_or(time.0, |(begin, _)| begin);
            self.records.insert(*event, Recorded { at, since, time: time.0 });
        }
        Some(time)
    }

    /// Places the nodes of a launch, and the launch around them.
    fn launch(&mut self, nodes: &[LogNode], entry: usize, stream: u32) -> Option<Time> {
        let tail = self.stream_end(stream);
        let drawn = self.drawn.len();
        let spans = (0..).zip(nodes).filter_map(|(at, _)| self.known.get(&(entry, Some(at))));
        let begin = spans.map(|&(begin, _)| begin).min();
        let start = begin.map(|begin| (begin, begin)).or(tail);
        let mut times: Vec<Option<Time>> = Vec::with_capacity(nodes.len());
        for (index, node) in (0..).zip(nodes) {
            let ended = node.dependencies.iter().filter_map(|&on| times.get(on as usize).copied().flatten());
            let last = ended.max_by_key(|&(_, end)| end);
            let time = self.place(&node.work, (entry, Some(index)), last.or(tail), last.or(start));
            // What has no time of its own passes on the time before it.
            times.push(time.or(last));
        }
        let own = self.known.get(&(entry, None)).copied();
        let parts = self.drawn[drawn..].iter().map(|&(_, time)| time).chain(own);
        let whole = parts.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))?;
        self.drawn.push(((entry, None), whole));
        Some(whole)
    }
}

//! The event log of a program whose kernels are a framework's: what is known of it is where requests begin and end.
//!
//! Each request is logged as **one operation that writes its bytes, from its acquire to its release**. Its graph's edges are
//! those that the driver reports of the captured graph, between marks; waits and records of fences are nodes where the
//! capture has them. So two requests that share bytes are ordered for the checker exactly if one is released before the
//! other is acquired:
//!
//! ```text
//!   runner a   acquire x ──→ [life of x] ──→ release x ──→ record 0 ──→ completion
//!   runner b   wait 0 ──→ acquire y ──→ [life of y: the bytes of x] ──→ ...     without the wait: a race of the two lives
//! ```
//!
//! What this does not see: a kernel of the framework that touches a view outside its life. What sessile itself enqueues on a
//! request (the one-shot reduce-scatter) is seen, and is a read of its own. Of a request that a later runner releases, the time
//! between the two graphs is not covered.
//!
//! Requests that accumulate into one weight are updates of one more allocation, at their releases, where their order inside
//! the runner is proven; else they are left out, and then no wait is judged needless.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use sessile_plan::{Domain, Plan, RequestId, RequestSpec, Runner, Trace};

use super::{Entry, Log, LogAccess, LogGraph, LogMemory, LogNode, LogView, Mode, RankLog, Work};
use crate::events::Events;
use crate::order::{Mark, Order};

/// The log of one rank.
#[derive(Debug)]
pub struct Lives {
    rank: RankLog,
    tickets: u64,
    /// Place in the rank's streams, by handle.
    streams: HashMap<u64, u32>,
    /// Events so far, over all plans.
    events: u32,
    sealed: Sealed,
    /// Serial of what each weight's gradients are added to.
    accumulators: BTreeMap<String, u64>,
    /// Whether additions were left out, so that waits may look needless.
    loose: bool,
}

/// What belongs to one plan.
#[derive(Debug, Default)]
struct Sealed {
    /// First event: fences, then three for each runner.
    first: u32,
    fences: u32,
    serial: u64,
    /// Graphs of captured runners.
    graphs: BTreeMap<usize, u32>,
    specs: BTreeMap<RequestId, RequestSpec>,
}

impl Lives {
    /// An empty log.
    #[must_use]
    pub fn new(rank: u32) -> Lives {
        Lives {
            rank: RankLog { rank, ..RankLog::default() },
            tickets: 0,
            streams: HashMap::new(),
            events: 0,
            sealed: Sealed::default(),
            accumulators: BTreeMap::new(),
            loose: false,
        }
    }

    /// The log so far.
    #[must_use]
    pub fn log(&self) -> Log {
        let mut rank = self.rank.clone();
        if self.loose {
            rank.graphs.iter_mut().for_each(|graph| graph.views = None);
        }
        Log::from_ranks(vec![rank])
    }

    /// A plan was sealed, with as many fence events.
    pub fn sealed(&mut self, trace: &Trace, plan: &Plan, fences: usize) {
        let serial = self.rank.memories.len() as u64;
        let mut arenas = Vec::new();
        for (at, arena) in plan.arenas.iter().enumerate() {
            let serial = serial + at as u64;
            self.rank.memories.push(LogMemory {
                serial,
                label: format!("arena {}", arena.domain),
                bytes: arena.bytes,
                arena: true,
                symmetric: arena.domain != Domain::Default,
                accumulator: false,
            });
            let accesses = vec![self.access(serial, 0, arena.bytes, Mode::Write)];
            self.rank.entries.push(Entry::Fresh { accesses });
            arenas.push(serial);
        }
        self.rank.entries.push(Entry::Sealed { arenas });
        let fences = number(fences);
        let specs = trace.requests().map(|(_, request)| (request.id, request.spec.clone())).collect();
        self.sealed = Sealed { first: self.events, fences, serial, graphs: BTreeMap::new(), specs };
        self.events += fences + 3 * number(trace.runners.len());
    }

    /// A runner was captured, and this is the order of its graph, with its waits and records.
    pub fn captured(&mut self, trace: &Trace, plan: &Plan, runner: usize, order: &Order, events: &Events) {
        let Some(known) = trace.runners.get(runner) else { return };
        let marks = order.nodes();
        let released: BTreeSet<RequestId> = marks
            .iter()
            .filter_map(|(mark, _)| match mark {
                Mark::Release(id) => Some(*id),
                _ => None,
            })
            .collect();
        let adds = self.additions(known, order);
        let mut build = Build::default();
        let mut places: Vec<u32> = Vec::new();
        for (mark, before) in &marks {
            let mut before: Vec<u32> = before.iter().filter_map(|&at| places.get(at).copied()).collect();
            let place = match *mark {
                Mark::Acquire(id) => {
                    let point = build.point(Work::Empty, mark.text(), before);
                    let life = build.node("life", self.label(id), self.view(plan, id, Mode::Write), [point]);
                    build.lives.insert(id, vec![life]);
                    if let Some(&serial) = adds.get(&id).filter(|_| !released.contains(&id)) {
                        build.add(id, self.access(serial, 0, 1, Mode::Update), vec![life]);
                    }
                    point
                }
                Mark::Use(id) => {
                    // A use inside the life divides it; anywhere else it stands for itself.
                    let inside = order.precedes(Mark::Acquire(id), *mark)
                        && (!released.contains(&id) || order.precedes(*mark, Mark::Release(id)));
                    let life = build.lives.get(&id).and_then(|parts| parts.first()).filter(|_| inside);
                    before.extend(life);
                    let used = build.node("use", mark.text(), self.view(plan, id, Mode::Read), before);
                    if inside {
                        build.lives.entry(id).or_default().push(used);
                    }
                    used
                }
                Mark::Release(id) => {
                    match build.lives.get(&id).cloned() {
                        Some(parts) if order.precedes(Mark::Acquire(id), *mark) => match parts[..] {
                            [life] => before.push(life),
                            _ => {
                                let view = self.view(plan, id, Mode::Write);
                                let uses = parts.into_iter().skip(1);
                                before.push(build.node("life", self.label(id), view, uses));
                            }
                        },
                        // Acquired by a runner before: alive since the head of this one.
                        None => {
                            let view = self.view(plan, id, Mode::Write);
                            before.push(build.node("life", self.label(id), view, []));
                        }
                        // Nothing orders its acquire and its release.
                        Some(_) => {}
                    }
                    if let Some(&serial) = adds.get(&id) {
                        let add = build.add(id, self.access(serial, 0, 1, Mode::Update), before.clone());
                        before.push(add);
                    }
                    build.point(Work::Empty, mark.text(), before)
                }
                Mark::Wait(event) => build.point(Work::Wait(self.fence(event)), String::new(), before),
                Mark::Record(event) => {
                    // At the end of the runner, where what it did not release ends.
                    for id in events.recorded(event).iter().filter(|id| !released.contains(id)) {
                        before.extend(build.lives.get(id).into_iter().flatten());
                    }
                    build.point(Work::Record(self.fence(event)), String::new(), before)
                }
                Mark::Complete => {
                    build.point(Work::Record(self.event(runner, Event::Completion)), String::new(), before)
                }
                Mark::End => build.point(Work::Empty, mark.text(), before),
            };
            places.push(place);
        }
        let own = known.requests.iter().map(|request| request.id);
        let ids: BTreeSet<RequestId> = own.chain(released).collect();
        let views = ids.into_iter().filter_map(|id| self.log_view(plan, id)).collect();
        let graph = LogGraph { runner: known.name.clone(), views: Some(views), nodes: build.nodes };
        self.sealed.graphs.insert(runner, number(self.rank.graphs.len()));
        self.rank.graphs.push(graph);
    }

    /// A captured runner was launched: on `main`, or on a stream of its own behind what `main` had, which then waited for its
    /// completion.
    pub fn launched(&mut self, runner: usize, main: u64, lane: Option<u64>) {
        let Some(&graph) = self.sealed.graphs.get(&runner) else { return };
        let main = self.stream(main);
        let Some(lane) = lane else {
            return self.launch(main, graph);
        };
        let lane = self.stream(lane);
        let (start, completion) = (self.event(runner, Event::Start), self.event(runner, Event::Completion));
        self.enqueue(main, Work::Record(start));
        self.enqueue(lane, Work::Wait(start));
        self.launch(lane, graph);
        self.enqueue(main, Work::Wait(completion));
    }

    /// `main` was made to wait for all that a runner's stream had.
    pub fn joined(&mut self, runner: usize, lane: u64, main: u64) {
        let (main, lane) = (self.stream(main), self.stream(lane));
        let end = self.event(runner, Event::End);
        self.enqueue(lane, Work::Record(end));
        self.enqueue(main, Work::Wait(end));
    }

    /// The plan was given up, after the host had waited for the device.
    pub fn freed(&mut self) {
        for stream in 0..number(self.rank.streams.len()) {
            self.rank.entries.push(Entry::HostWait { stream, accesses: Vec::new() });
        }
        self.rank.entries.push(Entry::Released {});
        self.sealed = Sealed::default();
    }

    /// What a runner's requests add to, if the order of all its additions into one weight is proven.
    fn additions(&mut self, runner: &Runner, order: &Order) -> BTreeMap<RequestId, u64> {
        let mut into: BTreeMap<&str, Vec<RequestId>> = BTreeMap::new();
        for request in &runner.requests {
            if let Some(weight) = &request.spec.accumulates_into {
                into.entry(weight).or_default().push(request.id);
            }
        }
        let mut all = BTreeMap::new();
        for (weight, ids) in into {
            let apart = |a: RequestId, b: RequestId| {
                let (a, b) = (Mark::Release(a), Mark::Release(b));
                a != b && !order.precedes(a, b) && !order.precedes(b, a)
            };
            if ids.iter().any(|&a| ids.iter().any(|&b| apart(a, b))) {
                self.loose = true;
                continue;
            }
            let memories = &mut self.rank.memories;
            let serial = *self.accumulators.entry(weight.to_owned()).or_insert_with(|| {
                let serial = memories.len() as u64;
                let label = format!("gradient of {weight}");
                memories.push(LogMemory {
                    serial,
                    label,
                    bytes: 1,
                    arena: false,
                    symmetric: false,
                    accumulator: false,
                });
                serial
            });
            all.extend(ids.into_iter().map(|id| (id, serial)));
        }
        all
    }

    fn enqueue(&mut self, stream: u32, work: Work) {
        let ticket = self.ticket();
        let entry = Entry::Enqueue { ticket, stream, work, label: String::new(), accesses: Vec::new() };
        self.rank.entries.push(entry);
    }

    fn launch(&mut self, stream: u32, graph: u32) {
        let ticket = self.ticket();
        self.rank.entries.push(Entry::Launch { ticket, stream, graph });
    }

    fn ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    fn stream(&mut self, handle: u64) -> u32 {
        let streams = &mut self.rank.streams;
        *self.streams.entry(handle).or_insert_with(|| {
            streams.push(format!("{handle:#x}"));
            number(streams.len() - 1)
        })
    }

    fn fence(&self, event: usize) -> u32 {
        self.sealed.first + number(event)
    }

    fn event(&self, runner: usize, which: Event) -> u32 {
        self.sealed.first + self.sealed.fences + 3 * number(runner) + which as u32
    }

    fn access(&self, memory: u64, start: u64, end: u64, mode: Mode) -> LogAccess {
        LogAccess { rank: self.rank.rank, memory, start, end, mode }
    }

    fn label(&self, id: RequestId) -> String {
        self.sealed.specs.get(&id).map_or_else(|| id.to_string(), ToString::to_string)
    }

    /// The tensor's bytes in its arena.
    fn view(&self, plan: &Plan, id: RequestId, mode: Mode) -> Option<LogAccess> {
        let view = self.log_view(plan, id)?;
        Some(self.access(view.memory, view.start, view.logical_end, mode))
    }

    fn log_view(&self, plan: &Plan, id: RequestId) -> Option<LogView> {
        let view = plan.view(id)?;
        let bytes = self.sealed.specs.get(&id)?.bytes()?.min(view.bytes);
        Some(LogView {
            label: self.label(id),
            memory: self.sealed.serial + u64::from(view.arena),
            start: view.offset,
            end: view.offset + view.bytes,
            logical_end: view.offset + bytes,
        })
    }
}

/// Events of a runner that others run beside.
#[derive(Clone, Copy)]
enum Event {
    Start,
    Completion,
    End,
}

#[derive(Default)]
struct Build {
    nodes: Vec<LogNode>,
    /// Nodes of each request's life: the one from its acquire first, then what uses it or adds it.
    lives: BTreeMap<RequestId, Vec<u32>>,
}

impl Build {
    fn push(&mut self, work: Work, label: String, accesses: Vec<LogAccess>, dependencies: Vec<u32>) -> u32 {
        self.nodes.push(LogNode { work, label, accesses, dependencies });
        number(self.nodes.len() - 1)
    }

    fn point(&mut self, work: Work, label: String, before: Vec<u32>) -> u32 {
        self.push(work, label, Vec::new(), before)
    }

    fn node(
        &mut self,
        kind: &str,
        label: String,
        access: Option<LogAccess>,
        before: impl IntoIterator<Item = u32>,
    ) -> u32 {
        let accesses = access.into_iter().collect();
        self.push(Work::Op(kind.to_owned()), label, accesses, before.into_iter().collect())
    }

    fn add(&mut self, id: RequestId, access: LogAccess, before: Vec<u32>) -> u32 {
        let add = self.node("add", format!("addition of {id}"), Some(access), before);
        self.lives.entry(id).or_default().push(add);
        add
    }
}

fn number(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

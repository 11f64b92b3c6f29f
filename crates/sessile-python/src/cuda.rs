//! A GPU of the framework: marks and fences in its captures, launches of its graphs, memory that a group shares.

#![allow(unsafe_code, reason = "streams and graphs are the framework's handles; each use carries its proof")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sessile_cuda::guest::{
    Block, GaveUp, Guest, GuestEvent, GuestGroup, GuestLaunch, GuestMemory, PAD_BYTES,
};
use sessile_hal::{Comm, DeviceError};
use sessile_plan::{DType, Domain, Plan, RequestId};
use sessile_runtime::{RuntimeError, agree, events::Events};

use crate::arena::Arena;
use crate::exchange::Group;
use sessile_runtime::order::{Mark, Node, Order};

/// How long a rank waits for handles of the others' memory.
const HANDOVER: Duration = Duration::from_secs(60);

/// Memory of every rank of a group, mapped here.
struct Region {
    group: String,
    /// Whether it is an arena of the plan, and goes with it.
    planned: bool,
    members: Vec<GuestMemory>,
    /// This rank's position.
    member: usize,
}

/// One GPU, and what exists on it for one storage.
pub(crate) struct Cuda {
    guest: Arc<Guest>,
    rank: u32,
    /// How long a reduction waits for another rank.
    patience: Duration,
    /// Marks of the pass under way, if it runs in a capture.
    marked: Option<Marked>,
    /// Where fences record and wait, and the external events by number.
    events: Events,
    fences: Vec<GuestEvent>,
    /// Memory that groups share: arenas first, then that of eager work.
    regions: Vec<Region>,
    reducers: BTreeMap<String, Reducer>,
    /// Groups whose turn the capture under way has waited for.
    turned: BTreeSet<String>,
    /// For each runner, by number: what it has if it has a completion point.
    lanes: Vec<Option<Lane>>,
    /// What was launched and may run on.
    in_flight: Vec<(usize, GuestEvent, u64)>,
}

/// Marks, and where each stood: a part of `nodes`.
#[derive(Default)]
struct Marked {
    marks: Vec<(Mark, usize)>,
    nodes: Vec<u64>,
}

impl Marked {
    fn take(self) -> Vec<(Mark, Vec<u64>)> {
        let mut from = 0;
        let mut part = |to: usize| self.nodes[std::mem::replace(&mut from, to)..to].to_vec();
        self.marks.iter().map(|&(mark, to)| (mark, part(to))).collect()
    }
}

/// A group that reduces. Its launches follow each other, across graphs and eager work: each waits for the turn of the
/// one before.
struct Reducer {
    group: GuestGroup,
    turn: GuestEvent,
}

/// A runner that others run beside: events of its start, its completion inside the graph, and its end.
struct Lane {
    start: GuestEvent,
    completion: GuestEvent,
    end: GuestEvent,
    runs: bool,
}

/// A runner's graph with what its launches need.
pub(crate) struct Launch {
    runner: usize,
    raw: GuestLaunch,
}

impl Launch {
    /// Calls of the driver that enqueue something, in one launch.
    pub(crate) fn calls(&self) -> u32 {
        self.raw.calls()
    }

    /// The stream of its own, if it has one.
    pub(crate) fn lane(&self) -> Option<u64> {
        self.raw.lane()
    }
}

impl Cuda {
    pub(crate) fn open(ordinal: u32, rank: u32, patience: Duration) -> Result<Cuda, DeviceError> {
        Ok(Cuda {
            guest: Guest::open(ordinal)?,
            rank,
            patience,
            marked: None,
            events: Events::default(),
            fences: Vec::new(),
            regions: Vec::new(),
            reducers: BTreeMap::new(),
            turned: BTreeSet::new(),
            lanes: Vec::new(),
            in_flight: Vec::new(),
        })
    }

    pub(crate) fn is_capturing(&self, stream: u64) -> Result<bool, DeviceError> {
        // SAFETY: streams come from the framework's current stream, which is alive (as everywhere in this file).
        unsafe { self.guest.is_capturing(stream) }
    }

    /// Begins a pass. In a capture its marks note where the capture stands.
    pub(crate) fn begin(&mut self, stream: u64) -> Result<bool, DeviceError> {
        let capturing = self.is_capturing(stream)?;
        self.marked = capturing.then(Marked::default);
        self.turned.clear();
        Ok(capturing)
    }

    pub(crate) fn forget(&mut self) {
        self.marked = None;
    }

    /// Notes where the capture stands at a mark, if there is one.
    pub(crate) fn mark(&mut self, mark: Mark, stream: u64) -> Result<(), DeviceError> {
        if let Some(marked) = &mut self.marked {
            // SAFETY: as in `is_capturing`.
            unsafe { self.guest.frontier(stream, &mut marked.nodes) }?;
            marked.marks.push((mark, marked.nodes.len()));
        }
        Ok(())
    }

    /// What the capture's edges prove of the pass that ends on `stream`; `None` outside a capture.
    pub(crate) fn proven(&mut self, runner: &str, stream: u64) -> Result<Option<Order>, RuntimeError> {
        if self.marked.is_none() {
            return Ok(None);
        }
        self.mark(Mark::End, stream)?;
        let Some(marked) = self.marked.take() else { return Ok(None) };
        // SAFETY: as in `is_capturing`.
        let nodes = unsafe { self.guest.captured(stream) }?;
        let nodes: Vec<Node> =
            nodes.into_iter().map(|node| Node { id: node.id, after: node.after }).collect();
        let broken = || DeviceError::CaptureInvalid { stream: format!("{stream:#x}") };
        let marked = marked.take();
        let order = Order::captured(&nodes, &marked).ok_or_else(broken)?;
        let order = order.without_end().map_err(|loose| RuntimeError::OrderDiffers {
            runner: runner.to_owned(),
            index: marked.len(),
            expected: "all streams joined at the end of the pass".to_owned(),
            found: format!("{} on a stream that was not joined", loose.text()),
        })?;
        Ok(Some(order))
    }

    /// Waits for what the plan fences before a request.
    pub(crate) fn wait_for(&mut self, acquire: RequestId, stream: u64) -> Result<(), DeviceError> {
        for at in 0..self.events.waits(acquire).len() {
            let event = self.events.waits(acquire)[at];
            let Some(raw) = self.fences.get(event) else { continue };
            // SAFETY: the stream as in `is_capturing`; the graph owns the event since `own`.
            unsafe { self.guest.wait(raw, stream) }?;
            self.mark(Mark::Wait(event), stream)?;
        }
        Ok(())
    }

    /// Records that a request is free, if a fence waits for that.
    pub(crate) fn record(&mut self, release: RequestId, stream: u64) -> Result<(), DeviceError> {
        let Some(event) = self.events.record(release) else { return Ok(()) };
        let Some(raw) = self.fences.get(event) else { return Ok(()) };
        // SAFETY: as in `wait_for`.
        unsafe { self.guest.record(raw, stream) }?;
        self.mark(Mark::Record(event), stream)
    }

    /// How many of these releases are recorded, and how many waits these acquires have.
    pub(crate) fn event_nodes(
        &self,
        releases: impl Iterator<Item = RequestId>,
        acquires: impl Iterator<Item = RequestId>,
    ) -> (usize, usize) {
        let records = releases.filter(|&id| self.events.record(id).is_some()).count();
        (records, acquires.map(|id| self.events.waits(id).len()).sum())
    }

    /// Makes the graph under capture own what it may touch.
    pub(crate) fn own(&self, arenas: &[Arena], runner: usize, stream: u64) -> Result<(), DeviceError> {
        let lane = self.lane(runner).map(|lane| lane.completion.clone());
        let regions: Vec<GuestMemory> = self.regions.iter().flat_map(|r| r.members.clone()).collect();
        let fences = self.fences.clone();
        let reducers: Vec<(GuestGroup, GuestEvent)> =
            self.reducers.values().map(|reducer| (reducer.group.clone(), reducer.turn.clone())).collect();
        let kept = (arenas.to_vec(), regions, fences, reducers, lane);
        // SAFETY: the stream as in `is_capturing`; memory, events and groups bury what they own when dropped, which
        // calls nothing of CUDA.
        unsafe { self.guest.keep(stream, kept) }
    }

    /// Records the completion point of a runner inside its graph.
    pub(crate) fn complete(&self, runner: usize, stream: u64) -> Result<(), DeviceError> {
        match self.lane(runner) {
            // SAFETY: as in `wait_for`.
            Some(lane) => unsafe { self.guest.record(&lane.completion, stream) },
            None => Ok(()),
        }
    }

    fn lane(&self, runner: usize) -> Option<&Lane> {
        self.lanes.get(runner).and_then(Option::as_ref)
    }

    /// What launches of a runner's executable graph need; `lane`: a stream of its own, if others run beside it.
    pub(crate) fn launcher(&self, runner: usize, exec: u64, lane: Option<u64>) -> Launch {
        let beside = self
            .lane(runner)
            .zip(lane)
            .map(|(known, lane)| (lane, known.start.clone(), known.completion.clone()));
        Launch { runner, raw: GuestLaunch::new(&self.guest, exec, beside) }
    }

    /// A whole launch of a graph that needs nothing of the framework.
    pub(crate) fn launch(&mut self, launch: &Launch, main: u64) -> Result<(), DeviceError> {
        // SAFETY: streams come from the framework, which keeps them; launches are made outside captures; the executable is
        // that of a graph which the launcher holds, and the interpreter's lock is held.
        unsafe { launch.raw.launch(main) }?;
        self.runs_on(launch);
        Ok(())
    }

    /// Before a launch that the framework makes on the runner's stream: it starts after what `main` has.
    pub(crate) fn before_launch(&mut self, launch: &Launch, main: u64) -> Result<(), DeviceError> {
        // SAFETY: as in `launch`.
        unsafe { launch.raw.before(main) }?;
        self.runs_on(launch);
        Ok(())
    }

    /// After it: `main` goes on once the runner has completed, while the rest of it runs on.
    pub(crate) fn after_launch(&mut self, launch: &Launch, main: u64) -> Result<(), DeviceError> {
        // SAFETY: as in `launch`.
        unsafe { launch.raw.after(main) }
    }

    /// Runners that may run on, with their streams.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = (usize, u64)> {
        self.in_flight.iter().map(|(runner, _, stream)| (*runner, *stream))
    }

    fn runs_on(&mut self, launch: &Launch) {
        let Some(stream) = launch.raw.lane() else { return };
        if let Some(lane) = self.lanes.get_mut(launch.runner).and_then(Option::as_mut)
            && !std::mem::replace(&mut lane.runs, true)
        {
            self.in_flight.push((launch.runner, lane.end.clone(), stream));
        }
    }

    /// Makes `main` wait for all that runs on.
    pub(crate) fn join(&mut self, main: u64) -> Result<(), DeviceError> {
        for (_, end, stream) in &self.in_flight {
            // SAFETY: as in `launch`; the runner's stream lives as long as the storage.
            unsafe { self.guest.order(end, *stream, main) }?;
        }
        if !self.in_flight.is_empty() {
            self.in_flight.clear();
            self.lanes.iter_mut().flatten().for_each(|lane| lane.runs = false);
        }
        Ok(())
    }

    /// Events of a plan's fences and completions. Each is recorded once, so that the first waits pass.
    pub(crate) fn prepare(
        &mut self,
        events: &Events,
        completing: &[bool],
        stream: u64,
    ) -> Result<(), DeviceError> {
        self.forget_plan();
        for _ in 0..events.count {
            let event = self.guest.event()?;
            // SAFETY: as in `is_capturing`.
            unsafe { self.guest.record(&event, stream) }?;
            self.fences.push(event);
        }
        self.events = events.clone();
        for &completes in completing {
            let event = || self.guest.event();
            let lane = |()| {
                Ok::<_, DeviceError>(Lane {
                    start: event()?,
                    completion: event()?,
                    end: event()?,
                    runs: false,
                })
            };
            self.lanes.push(completes.then_some(()).map(lane).transpose()?);
        }
        Ok(())
    }

    fn forget_plan(&mut self) {
        self.events = Events::default();
        self.fences.clear();
        self.lanes.clear();
        self.in_flight.clear();
    }

    /// Gives the plan's events and arenas up. The caller has waited for the GPU.
    pub(crate) fn release(&mut self) {
        self.forget_plan();
        self.give_back();
    }

    /// Destroys what was dropped, arenas among it. The caller has waited for the GPU.
    fn give_back(&mut self) {
        self.regions.retain(|region| !region.planned);
        self.guest.reap();
    }

    /// The arenas of a plan; those of groups are shared with their ranks. After an error none is left, on any rank.
    /// Collective; the caller has waited for the GPU.
    pub(crate) fn arenas(
        &mut self,
        plan: &Plan,
        world: &Group,
        groups: &BTreeMap<String, Group>,
    ) -> Result<Vec<Arena>, RuntimeError> {
        self.give_back();
        let made = self.make_arenas(plan, world, groups);
        if made.is_err() {
            self.give_back();
        }
        made
    }

    fn make_arenas(
        &mut self,
        plan: &Plan,
        world: &Group,
        groups: &BTreeMap<String, Group>,
    ) -> Result<Vec<Arena>, RuntimeError> {
        let alloc = |arena: &sessile_plan::Arena| {
            let label = format!("arena {}", arena.domain);
            GuestMemory::alloc(&self.guest, self.rank, &label, arena.bytes)
        };
        let made: Result<Vec<GuestMemory>, DeviceError> = plan.arenas.iter().map(alloc).collect();
        let made = agree::share(world, made.map_err(RuntimeError::from))?;
        let mut first = Ok(());
        for (name, group) in groups {
            let domain = Domain::Symmetric(name.clone());
            let Some(at) = plan.arenas.iter().position(|arena| arena.domain == domain) else { continue };
            let shared = self.share(name, group, &made[at], true);
            if first.is_ok() {
                first = shared;
            }
        }
        agree::share(world, first)?;
        Ok(made.into_iter().map(Arena::Cuda).collect())
    }

    /// Memory of its own for eager work of a group, shared with its ranks. Collective over the group.
    pub(crate) fn eager(&mut self, name: &str, group: &Group, bytes: u64) -> Result<Arena, RuntimeError> {
        let label = format!("eager buffer of {name}");
        let memory = GuestMemory::alloc(&self.guest, self.rank, &label, bytes);
        let memory = agree::share(group, memory.map_err(RuntimeError::from))?;
        self.share(name, group, &memory, false)?;
        Ok(Arena::Cuda(memory))
    }

    fn share(
        &mut self,
        name: &str,
        group: &Group,
        memory: &GuestMemory,
        planned: bool,
    ) -> Result<(), RuntimeError> {
        let members = swap(group, memory)?;
        let member = group.rank() as usize;
        self.regions.push(Region { group: name.to_owned(), planned, members, member });
        Ok(())
    }

    /// Makes the group able to reduce in one shot. Collective over the group.
    pub(crate) fn add_reducer(&mut self, name: &str, group: &Group) -> Result<(), RuntimeError> {
        if let Some(known) = self.reducers.get(name) {
            group.reduces(&known.group);
            return Ok(());
        }
        let (gpu, machine) = self.guest.place();
        let places = group.exchange(&[&gpu[..], machine.as_bytes()].concat())?;
        let near = places.iter().all(|place| place.get(16..) == Some(machine.as_bytes()));
        let on_one = places
            .iter()
            .map(|place| places.iter().filter(|other| other.get(..16) == place.get(..16)).count());
        let share = u32::try_from(on_one.max().unwrap_or(1)).unwrap_or(u32::MAX);
        let made = if near {
            let pad = GuestMemory::alloc(&self.guest, self.rank, "signal words", PAD_BYTES);
            let pad = agree::share(group, pad.map_err(RuntimeError::from))?;
            let pads = swap(group, &pad)?;
            GuestGroup::new(&self.guest, name, group.ranks(), pads, group.rank(), share, self.patience)
        } else {
            Err(DeviceError::BadGroup {
                name: name.to_owned(),
                ranks: group.ranks().to_vec(),
                why: "the one-shot reduce-scatter needs all ranks on one machine: use kind `ring`",
            })
        };
        // Nobody launches before all pads are ready.
        let turn = self.guest.event();
        let made = made.and_then(|group| Ok(Reducer { group, turn: turn? }));
        let made = agree::share(group, made.map_err(RuntimeError::from))?;
        group.reduces(&made.group);
        self.reducers.insert(name.to_owned(), made);
        Ok(())
    }

    /// Adds `scale` times the sum of every rank's block of `send` to `recv`, which has `elements` FP32.
    pub(crate) fn reduce(&mut self, what: &Reduction<'_>) -> Result<(), DeviceError> {
        let unregistered = || DeviceError::NotRegistered {
            kernel: "one_shot",
            label: format!("{:#x}", what.send),
            group: what.group.to_owned(),
        };
        let reducer = self.reducers.get(what.group).ok_or_else(unregistered)?;
        let block = what.elements * what.dtype.size();
        let found = self.regions.iter().filter(|region| region.group == what.group).find_map(|region| {
            let own = &region.members[region.member];
            let offset = what.send.checked_sub(own.address())?;
            let end = offset.checked_add(block.checked_mul(region.members.len() as u64)?)?;
            (end <= own.bytes()).then_some((region, offset))
        });
        let (region, offset) = found.ok_or_else(unregistered)?;
        let mine = offset + region.member as u64 * block;
        let from = region.members.iter().map(|memory| memory.address() + mine).collect();
        let blocks = vec![Block { from, to: what.recv, elements: what.elements }];
        // Inside one capture its own stream order does; a wait would be for the launch before this one.
        let capturing = self.marked.is_some();
        if !capturing || self.turned.insert(what.group.to_owned()) {
            // SAFETY: the stream as in `is_capturing`; the graph owns the event since `own`.
            unsafe { self.guest.wait(&reducer.turn, what.stream) }?;
        }
        // SAFETY: the stream as in `is_capturing`; the sources lie in regions, which live as long as the storage and,
        // in a capture, as the graph (`own`); `recv` is a tensor of the framework that `python/sessile/torch` has
        // checked and keeps; that ranks make equal calls in equal order is what collectives ask of every program.
        unsafe { reducer.group.reduce_scatter_accumulate(what.stream, what.dtype, what.scale, blocks) }?;
        // SAFETY: as for the wait.
        unsafe { self.guest.record(&reducer.turn, what.stream) }
    }

    /// The reduction that gave up waiting for a rank, if one that has ended did.
    pub(crate) fn gave_up(&self) -> Option<GaveUp> {
        self.reducers.values().find_map(|reducer| reducer.group.gave_up())
    }
}

/// A one-shot reduce-scatter, as it is asked for.
pub(crate) struct Reduction<'a> {
    pub(crate) group: &'a str,
    pub(crate) stream: u64,
    pub(crate) dtype: DType,
    pub(crate) scale: f32,
    /// Address of this rank's input: the blocks of all ranks.
    pub(crate) send: u64,
    /// Address of this rank's accumulator.
    pub(crate) recv: u64,
    /// Elements of a block.
    pub(crate) elements: u64,
}

/// The memory of every rank of a group, in group order. Every rank makes every exchange.
fn swap(group: &Group, memory: &GuestMemory) -> Result<Vec<GuestMemory>, RuntimeError> {
    let offer = agree::share(group, memory.offer().map_err(RuntimeError::from))?;
    let invitations = group.exchange(offer.invitation())?;
    let accepted = offer.accept(&invitations, group.rank() as usize, HANDOVER);
    agree::share(group, accepted.map_err(RuntimeError::from))
}

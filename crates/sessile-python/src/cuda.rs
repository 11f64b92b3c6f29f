//! A GPU of the framework: marks and fences in its captures, launches of its graphs, memory that a group shares.

#![allow(unsafe_code, reason = "streams and graphs are the framework's handles; each use carries its proof")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sessile_cuda::guest::{Block, Guest, GuestEvent, GuestGroup, GuestMemory, PAD_BYTES};
use sessile_hal::{Comm, DeviceError};
use sessile_plan::{DType, Domain, Plan, RequestId};
use sessile_runtime::{RuntimeError, agree};

use crate::arena::Arena;
use crate::exchange::Group;
use sessile_runtime::order::{Mark, Node, Order};

/// How long a rank waits for another one.
const PATIENCE: Duration = Duration::from_secs(60);

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
    /// Marks of the pass under way, if it runs in a capture.
    marked: Option<Vec<(Mark, Vec<u64>)>>,
    /// One external event for each request that a fence waits for, and what each acquire waits for.
    fences: BTreeMap<RequestId, GuestEvent>,
    waits: BTreeMap<RequestId, Vec<RequestId>>,
    /// Memory that groups share: arenas first, then that of eager work.
    regions: Vec<Region>,
    reducers: BTreeMap<String, Reducer>,
    /// Groups whose turn the capture under way has waited for.
    turned: BTreeSet<String>,
    /// For each runner with a completion point: its start, and its completion inside the graph.
    lanes: BTreeMap<usize, Lane>,
}

/// A group that reduces. Its launches follow each other, across graphs and eager work: each waits for the turn of the
/// one before.
struct Reducer {
    group: GuestGroup,
    turn: GuestEvent,
}

/// A runner that others run beside.
struct Lane {
    start: GuestEvent,
    completion: GuestEvent,
    end: GuestEvent,
    in_flight: Option<u64>,
}

impl Cuda {
    pub(crate) fn open(ordinal: u32, rank: u32) -> Result<Cuda, DeviceError> {
        Ok(Cuda {
            guest: Guest::open(ordinal)?,
            rank,
            marked: None,
            fences: BTreeMap::new(),
            waits: BTreeMap::new(),
            regions: Vec::new(),
            reducers: BTreeMap::new(),
            turned: BTreeSet::new(),
            lanes: BTreeMap::new(),
        })
    }

    pub(crate) fn is_capturing(&self, stream: u64) -> Result<bool, DeviceError> {
        // SAFETY: streams come from the framework's current stream, which is alive (as everywhere in this file).
        unsafe { self.guest.is_capturing(stream) }
    }

    /// Begins a pass. In a capture its marks note where the capture stands.
    pub(crate) fn begin(&mut self, stream: u64) -> Result<bool, DeviceError> {
        let capturing = self.is_capturing(stream)?;
        self.marked = capturing.then(Vec::new);
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
            let stands = unsafe { self.guest.frontier(stream) }?;
            marked.push((mark, stands));
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
    pub(crate) fn wait_for(&self, acquire: RequestId, stream: u64) -> Result<(), DeviceError> {
        for release in self.waits.get(&acquire).into_iter().flatten() {
            if let Some(event) = self.fences.get(release) {
                // SAFETY: the stream as in `is_capturing`; the graph owns the event since `own`.
                unsafe { self.guest.wait(event, stream) }?;
            }
        }
        Ok(())
    }

    /// Records that a request is free, if a fence waits for that.
    pub(crate) fn record(&self, release: RequestId, stream: u64) -> Result<(), DeviceError> {
        match self.fences.get(&release) {
            // SAFETY: as in `wait_for`.
            Some(event) => unsafe { self.guest.record(event, stream) },
            None => Ok(()),
        }
    }

    /// Makes the graph under capture own what it may touch.
    pub(crate) fn own(&self, arenas: &[Arena], runner: usize, stream: u64) -> Result<(), DeviceError> {
        let lane = self.lanes.get(&runner).map(|lane| lane.completion.clone());
        let regions: Vec<GuestMemory> = self.regions.iter().flat_map(|r| r.members.clone()).collect();
        let fences: Vec<GuestEvent> = self.fences.values().cloned().collect();
        let reducers: Vec<(GuestGroup, GuestEvent)> =
            self.reducers.values().map(|reducer| (reducer.group.clone(), reducer.turn.clone())).collect();
        let kept = (arenas.to_vec(), regions, fences, reducers, lane);
        // SAFETY: the stream as in `is_capturing`; memory, events and groups bury what they own when dropped, which
        // calls nothing of CUDA.
        unsafe { self.guest.keep(stream, kept) }
    }

    /// Records the completion point of a runner inside its graph.
    pub(crate) fn complete(&self, runner: usize, stream: u64) -> Result<(), DeviceError> {
        match self.lanes.get(&runner) {
            // SAFETY: as in `wait_for`.
            Some(lane) => unsafe { self.guest.record(&lane.completion, stream) },
            None => Ok(()),
        }
    }

    /// Before the launch of a runner on `lane`: it starts after what `main` has. Gives the stream to launch on.
    pub(crate) fn before_launch(&mut self, runner: usize, main: u64, lane: u64) -> Result<(), DeviceError> {
        if let Some(known) = self.lanes.get_mut(&runner) {
            // SAFETY: as in `is_capturing`; launches are made outside captures.
            unsafe { self.guest.order(&known.start, main, lane) }?;
            known.in_flight = Some(lane);
        }
        Ok(())
    }

    /// A whole launch of a graph that needs nothing of the framework.
    pub(crate) fn launch(
        &mut self,
        runner: usize,
        exec: u64,
        main: u64,
        lane: u64,
    ) -> Result<(), DeviceError> {
        let beside = self.lanes.get_mut(&runner).map(|known| {
            known.in_flight = Some(lane);
            (&known.start, &known.completion)
        });

        // SAFETY: as in `before_launch`; the executable is that of a graph which `python/sessile/torch` holds, and the
        // interpreter's lock is held.
        unsafe { self.guest.launch(exec, main, lane, beside) }
    }

    /// After the launch: `main` goes on once the runner has completed, while the rest of it runs on.
    pub(crate) fn after_launch(&mut self, runner: usize, main: u64) -> Result<(), DeviceError> {
        match self.lanes.get(&runner) {
            // SAFETY: as in `before_launch`.
            Some(lane) => unsafe { self.guest.wait_plain(&lane.completion, main) },
            None => Ok(()),
        }
    }

    /// Makes `main` wait for all that runs on.
    pub(crate) fn join(&mut self, main: u64) -> Result<(), DeviceError> {
        for lane in self.lanes.values_mut() {
            if let Some(stream) = lane.in_flight.take() {
                // SAFETY: as in `before_launch`; the runner's stream lives as long as the storage.
                unsafe { self.guest.order(&lane.end, stream, main) }?;
            }
        }
        Ok(())
    }

    /// Events of a plan's fences and completions. Each is recorded once, so that the first waits pass.
    pub(crate) fn prepare(
        &mut self,
        plan: &Plan,
        completing: &BTreeSet<usize>,
        stream: u64,
    ) -> Result<(), DeviceError> {
        (self.fences, self.waits, self.lanes) = Default::default();
        for fence in &plan.fences {
            if !self.fences.contains_key(&fence.release) {
                let event = self.guest.event()?;
                // SAFETY: as in `is_capturing`.
                unsafe { self.guest.record(&event, stream) }?;
                self.fences.insert(fence.release, event);
            }
            self.waits.entry(fence.acquire).or_default().push(fence.release);
        }
        for &runner in completing {
            let lane = Lane {
                start: self.guest.event()?,
                completion: self.guest.event()?,
                end: self.guest.event()?,
                in_flight: None,
            };
            self.lanes.insert(runner, lane);
        }
        Ok(())
    }

    /// Gives the plan's events and arenas up. The caller has waited for the GPU.
    pub(crate) fn release(&mut self) {
        (self.fences, self.waits, self.lanes) = Default::default();
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
        if self.reducers.contains_key(name) {
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
            GuestGroup::new(&self.guest, name, pads, group.rank(), share, PATIENCE)
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

    /// Whether an earlier reduction gave up waiting for a rank.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        self.reducers.values().try_for_each(|reducer| reducer.group.check())
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
    let accepted = offer.accept(&invitations, group.rank() as usize, PATIENCE);
    agree::share(group, accepted.map_err(RuntimeError::from))
}

//! The life of planned storage on one rank: discover → agree → seal → capture → replay → release.
//!
//! ```text
//!            discover*          seal             capture*            replay*          release
//!   Open ───────────────▶ Open ───────▶ Sealed ───────────▶ Sealed ──────────▶ Sealed ───────▶ Open
//! ```
//!
//! A call in the wrong phase is an error and changes nothing. Outside discovery and capture, requests are served
//! from eager pools in every phase.

mod cursor;
mod footprint;
mod replay;
mod scope;
mod seal;

use std::collections::{BTreeMap, BTreeSet};

use sessile_hal::{Comm, Device, DeviceError, EventScope, Memory, NotedView, View};
use sessile_plan::{Domain, Fence, Plan, PointKind, RequestId, RequestSpec, Role, Trace};

pub use cursor::{Cursor, Place};
pub use footprint::Footprint;
pub use replay::Order;
use scope::Scope;
pub use scope::{HasRuntime, Marker, Slot, capture, discover};

use crate::{RuntimeError, discovery::Discovery, pool::EagerPool};

/// A sealed runner: its stream, its events, and once captured its graph.
struct SealedRunner<D: Device> {
    /// The planned view of each request.
    views: Vec<View<D::Memory>>,
    /// The fences that each request waits for.
    waits: Vec<Vec<Fence>>,
    /// Other runners whose end a launch waits for, with [`Fencing::Borders`].
    borders: Vec<usize>,
    stream: D::Stream,
    /// Recorded on the main stream before each launch.
    start: D::Event,
    /// Recorded inside the graph at the end of stage 1.
    completion: D::Event,
    /// Recorded on the runner's stream after each launch, when somebody has to wait for all of it.
    end: D::Event,
    graph: Option<D::Graph>,
    completes: bool,
    in_flight: bool,
    /// [`Memory::mapping`] of every arena at the capture.
    mappings: Vec<u64>,
}

/// Everything that exists between seal and release.
struct Sealed<D: Device> {
    trace: Trace,
    plan: Plan,
    arenas: Vec<D::Memory>,
    by_name: BTreeMap<String, usize>,
    /// One external event for each request that a fence waits for.
    fence_events: BTreeMap<RequestId, D::Event>,
    runners: Vec<SealedRunner<D>>,
    cursor: Cursor,
}

enum Phase<D: Device> {
    Open,
    Sealed(Box<Sealed<D>>),
}

/// Where a launch waits for the fences of its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fencing {
    /// Inside the graph, just before the first write: what comes before it does not wait.
    #[default]
    Inside,
    /// Before the graph starts, for the end of the graphs that released the bytes. For comparison.
    Borders,
}

/// Counters of one rank's runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Graph launches.
    pub replays: u64,
    /// Launches that were not the next one of the sealed order.
    pub order_deviations: u64,
    /// Joins of all runner streams that deviations and step cuts made.
    pub joins: u64,
}

/// One rank's storage runtime.
pub struct Runtime<D: Device> {
    device: D,
    world: D::Comm,
    groups: BTreeMap<String, D::Comm>,
    main: D::Stream,
    pool: EagerPool<D>,
    discovery: Discovery,
    phase: Phase<D>,
    scope: Scope,
    counters: Counters,
    /// Seals so far; tells views of one plan from those of the next.
    seals: u64,
    omitted: BTreeSet<Fence>,
    fencing: Fencing,
    /// Discovery and capture passes begun so far.
    passes: u64,
}

impl<D: Device> Runtime<D> {
    /// A runtime over a device, with the communicator of all ranks of the job.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: D, world: D::Comm) -> Result<Self, RuntimeError> {
        let main = device.stream("main")?;
        Ok(Runtime {
            device,
            world,
            groups: BTreeMap::new(),
            main,
            pool: EagerPool::new(),
            discovery: Discovery::default(),
            phase: Phase::Open,
            scope: Scope::Idle,
            counters: Counters::default(),
            seals: 0,
            omitted: BTreeSet::new(),
            fencing: Fencing::Inside,
            passes: 0,
        })
    }

    /// Makes a communicator known as the group of this name. Requests and domains name groups; ranks of different
    /// groups may use one name for theirs.
    pub fn add_group(&mut self, name: &str, comm: D::Comm) {
        self.groups.insert(name.to_owned(), comm);
    }

    /// The communicator of a group.
    ///
    /// # Errors
    /// [`RuntimeError::UnknownGroup`].
    pub fn group(&self, name: &str) -> Result<&D::Comm, RuntimeError> {
        self.groups.get(name).ok_or_else(|| RuntimeError::UnknownGroup { group: name.to_owned() })
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The communicator of all ranks.
    pub fn world(&self) -> &D::Comm {
        &self.world
    }

    /// The stream of work outside runners. Launches are ordered with it.
    pub fn main(&self) -> &D::Stream {
        &self.main
    }

    /// The plan, once sealed.
    pub fn plan(&self) -> Option<&Plan> {
        self.sealed().map(|sealed| &sealed.plan)
    }

    /// The agreed trace, once sealed.
    pub fn trace(&self) -> Option<&Trace> {
        self.sealed().map(|sealed| &sealed.trace)
    }

    /// The arenas, in the plan's order, once sealed.
    pub fn arenas(&self) -> &[D::Memory] {
        self.sealed().map_or(&[], |sealed| &sealed.arenas)
    }

    /// Graph of a runner, once captured.
    pub fn graph(&self, runner: &str) -> Option<&D::Graph> {
        let sealed = self.sealed()?;
        sealed.runners[*sealed.by_name.get(runner)?].graph.as_ref()
    }

    /// Counters since the runtime was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes that eager pools have allocated.
    pub fn eager_bytes(&self) -> u64 {
        self.pool.bytes()
    }

    /// Chooses where launches wait, before the seal.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`] after it.
    pub fn set_fencing(&mut self, fencing: Fencing) -> Result<(), RuntimeError> {
        if self.sealed().is_some() {
            return Err(RuntimeError::WrongPhase {
                call: "set_fencing",
                phase: "a plan is sealed",
                remedy: "choose before the seal",
            });
        }
        self.fencing = fencing;
        Ok(())
    }

    /// Leaves fences out of later captures. Exists to prove that each one is necessary.
    #[doc(hidden)]
    pub fn omit_fences(&mut self, fences: impl IntoIterator<Item = Fence>) {
        self.omitted.extend(fences);
    }

    /// A domain as the device knows it. Plans name groups as this rank does, devices by their communicators.
    fn device_domain(&self, domain: &Domain) -> Domain {
        match window_group(domain).and_then(|group| self.groups.get(group)) {
            Some(comm) => Domain::Symmetric(comm.name().to_owned()),
            None => domain.clone(),
        }
    }

    fn sealed(&self) -> Option<&Sealed<D>> {
        match &self.phase {
            Phase::Sealed(sealed) => Some(sealed),
            Phase::Open => None,
        }
    }

    fn sealed_mut(&mut self, call: &'static str) -> Result<&mut Sealed<D>, RuntimeError> {
        match &mut self.phase {
            Phase::Sealed(sealed) => Ok(sealed),
            Phase::Open => Err(RuntimeError::WrongPhase {
                call,
                phase: "nothing is sealed",
                remedy: "discover every runner once, then seal",
            }),
        }
    }
}

impl<D: Device> Sealed<D> {
    /// The first arena whose bytes were mapped again since the runner's capture.
    fn stale_arena(&self, runner: usize) -> Option<&D::Memory> {
        let then = &self.runners[runner].mappings;
        self.arenas.iter().zip(then).find(|(arena, then)| arena.mapping() != **then).map(|(arena, _)| arena)
    }

    fn runner(&self, name: &str) -> Result<usize, RuntimeError> {
        self.by_name.get(name).copied().ok_or_else(|| RuntimeError::UnknownRunner { runner: name.to_owned() })
    }

    /// The views that a runner may use: its own, and those that earlier runners left for it to release.
    fn noted_views(&self, at: usize) -> Result<Vec<NotedView<D::Memory>>, DeviceError> {
        let runner = &self.trace.runners[at];
        let own = runner.requests.iter().map(|request| request.id);
        let left = runner.points.iter().filter_map(|point| match point.kind {
            PointKind::Release(id) if runner.requests.iter().all(|request| request.id != id) => Some(id),
            _ => None,
        });
        own.chain(left)
            .map(|id| {
                let spec = self.spec(id);
                let view = self.view(id, spec)?;
                let unsharded =
                    spec.unsharded_shape.iter().try_fold(spec.dtype.size(), |all, &n| all.checked_mul(n));
                // A reduce-scatter reads the whole matrix; the rows below it are padding.
                let logical = match spec.role {
                    Role::WgradInput => unsharded.unwrap_or(u64::MAX).min(view.range().bytes()),
                    _ => view.range().bytes(),
                };
                Ok(NotedView { label: spec.to_string(), view, logical_bytes: logical })
            })
            .collect()
    }

    /// Other runners that release what this one's fences wait for.
    fn borders(&self, at: usize) -> Vec<usize> {
        let released: BTreeSet<RequestId> =
            self.runners[at].waits.iter().flatten().map(|fence| fence.release).collect();
        let releases = |point: &PointKind| matches!(point, PointKind::Release(id) if released.contains(id));
        let owns = |runner: &sessile_plan::Runner| {
            runner.requests.iter().any(|request| released.contains(&request.id))
        };
        let others = self.trace.runners.iter().enumerate().filter(|(other, _)| *other != at);
        others
            .filter(|(_, runner)| owns(runner) || runner.points.iter().any(|point| releases(&point.kind)))
            .map(|(other, _)| other)
            .collect()
    }

    fn spec(&self, id: RequestId) -> &RequestSpec {
        let request = self.trace.requests().find(|(_, request)| request.id == id);
        &request.expect("planned requests are in the trace").1.spec
    }

    /// The bytes the plan gave to a request.
    fn view(&self, id: RequestId, spec: &RequestSpec) -> Result<View<D::Memory>, DeviceError> {
        let planned = self.plan.view(id).expect("a sealed plan has a view for every request of its trace");
        let bytes = spec.bytes().expect("checked traces do not overflow");
        View::new(&self.arenas[planned.arena as usize], planned.offset, bytes / spec.dtype.size(), spec.dtype)
    }
}

/// Whether a domain's memory must be registered, and with which group.
fn window_group(domain: &Domain) -> Option<&str> {
    match domain {
        Domain::Default => None,
        Domain::Symmetric(group) => Some(group),
    }
}

fn external<D: Device>(device: &D) -> Result<D::Event, DeviceError> {
    device.event(EventScope::External)
}

/// Address of an arena, which must not change between seal and release.
impl<D: Device> Runtime<D> {
    /// Base addresses of the arenas, in the plan's order.
    pub fn arena_addresses(&self) -> Vec<u64> {
        self.arenas().iter().map(Memory::address).collect()
    }
}

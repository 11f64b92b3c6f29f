//! The life of planned storage on one rank: discover → agree → seal → capture → replay → free.
//!
//! A call in the wrong phase is an error and changes nothing. Outside discovery, capture and replay, requests are the
//! framework's own business.

mod seal;

use std::collections::{BTreeMap, BTreeSet};

use pyo3::prelude::*;
use sessile_hal::{Comm, DeviceError};
use sessile_plan::{DType, Domain, PlanOptions, RequestId, RequestSpec, Role, check_trace, write_trace};
use sessile_runtime::RuntimeError;
use sessile_runtime::log::Lives;

use crate::cuda::{Cuda, Launch, Reduction};
use crate::discovery::{Discovery, Pass};
use crate::dlpack;
use crate::error::Failure;
use crate::exchange::Group;
use crate::logs::write;
use crate::planning::{Plan, options};
use crate::sealed::{Follow, Sealed, acquire};
use sessile_runtime::order::{Mark, Order};

/// What is under way.
enum Scope {
    Idle,
    Discover(Pass),
    /// A capture, or a replay by hand of a captured sequence.
    Follow(Follow),
}

/// Counters of one rank's storage.
#[derive(Default)]
struct Counters {
    replays: u64,
    order_deviations: u64,
}

/// The storage of one rank, without the framework's half.
#[pyclass(module = "sessile._sessile")]
pub(crate) struct Core {
    name: String,
    options: PlanOptions,
    world: Group,
    groups: BTreeMap<String, Group>,
    discovery: Discovery,
    /// What each discovered request was asked for by.
    keys: BTreeMap<RequestId, Py<PyAny>>,
    scope: Scope,
    sealed: Option<Sealed>,
    /// Plans so far: tells a launcher of one from those of the next.
    seals: u64,
    /// Released in the pass under way, or by a runner before: a second release is an error.
    released: BTreeSet<RequestId>,
    counters: Counters,
    cuda: Option<Cuda>,
    /// The event log, if it is kept.
    log: Option<Lives>,
}

/// What an answer to a request is: nothing is known of it, its number in a discovery, or its planned tensor.
type Answer = (Option<u32>, Option<Py<PyAny>>);

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (name, ranks, rank, gather, *, strategy, depth, step_cut, ordinal, log))]
    #[expect(clippy::too_many_arguments, reason = "options, one by one")]
    fn new(
        name: &str,
        ranks: Vec<u32>,
        rank: u32,
        gather: Option<Py<PyAny>>,
        strategy: &str,
        depth: u32,
        step_cut: &str,
        ordinal: Option<u32>,
        log: bool,
    ) -> Result<Core, Failure> {
        let world_rank = ranks.get(rank as usize).copied().unwrap_or(0);
        let cuda = ordinal.map(|ordinal| Cuda::open(ordinal, world_rank)).transpose()?;
        Ok(Core {
            name: name.to_owned(),
            options: options(strategy, depth, BTreeMap::new(), step_cut)?,
            world: Group::new("world", ranks, rank, gather),
            groups: BTreeMap::new(),
            discovery: Discovery::default(),
            keys: BTreeMap::new(),
            scope: Scope::Idle,
            sealed: None,
            seals: 0,
            released: BTreeSet::new(),
            counters: Counters::default(),
            cuda,
            log: log.then(|| Lives::new(world_rank)),
        })
    }

    /// Makes a group known by its name.
    fn add_group(
        &mut self,
        name: &str,
        ranks: Vec<u32>,
        rank: u32,
        gather: Option<Py<PyAny>>,
    ) -> Result<(), Failure> {
        self.open("add_group")?;
        self.groups.insert(name.to_owned(), Group::new(name, ranks, rank, gather));
        Ok(())
    }

    /// Ranks of a group.
    fn group_size(&self, group: &str) -> Result<u32, Failure> {
        let unknown = || RuntimeError::UnknownGroup { group: group.to_owned() };
        Ok(self.groups.get(group).ok_or_else(unknown)?.size())
    }

    /// `idle`, `discover`, `capture` or `replay`.
    #[getter]
    fn scope(&self) -> &'static str {
        match &self.scope {
            Scope::Idle => "idle",
            Scope::Discover(_) => "discover",
            Scope::Follow(follow) if follow.capture => "capture",
            Scope::Follow(_) => "replay",
        }
    }

    #[getter]
    fn is_sealed(&self) -> bool {
        self.sealed.is_some()
    }

    #[getter]
    fn plan(&self) -> Option<Plan> {
        self.sealed.as_ref().map(|sealed| Plan { plan: sealed.plan.clone() })
    }

    /// Replays, and how many of them were not the next one of the sealed order.
    #[getter]
    fn counters(&self) -> (u64, u64) {
        (self.counters.replays, self.counters.order_deviations)
    }

    /// Whether a runner was captured.
    fn is_captured(&self, runner: &str) -> bool {
        self.sealed
            .as_ref()
            .is_some_and(|sealed| sealed.by_name.get(runner).is_some_and(|&at| sealed.runners[at].captured))
    }

    /// The trace of what was discovered, as versioned JSON.
    fn trace(&self) -> Result<String, Failure> {
        let trace = match &self.sealed {
            Some(sealed) => sealed.trace.clone(),
            None => self.discovery.trace(&self.name),
        };
        check_trace(&trace)?;
        Ok(write_trace(&trace))
    }

    /// Begins a pass over a runner: a launch of the step, or only a proof of order for one that was discovered.
    fn begin_discover(&mut self, runner: &str, launch: bool, stream: u64) -> Result<(), Failure> {
        self.idle("discover")?;
        self.open("discover")?;
        if !launch && self.discovery.index(runner).is_none() {
            return Err(RuntimeError::UnknownRunner { runner: runner.to_owned() }.into());
        }
        if let Some(cuda) = &mut self.cuda {
            cuda.begin(stream)?;
        }
        self.scope = Scope::Discover(self.discovery.begin(runner, launch));
        Ok(())
    }

    /// What the next steps do never runs together with what was discovered so far.
    fn next_alternative(&mut self) -> Result<(), Failure> {
        self.idle("next_alternative")?;
        self.open("next_alternative")?;
        self.discovery.next_alternative();
        Ok(())
    }

    /// Begins the capture of a sealed runner.
    fn begin_capture(&mut self, runner: &str, stream: u64) -> Result<(), Failure> {
        let at = self.sealed_runner("capture", runner)?;
        let Some(sealed) = &self.sealed else { return Ok(()) };
        if sealed.runners[at].captured {
            return Err(RuntimeError::CapturedTwice { runner: runner.to_owned() }.into());
        }
        if let Some(cuda) = &mut self.cuda {
            if !cuda.begin(stream)? {
                let remedy = "enter it inside torch.cuda.graph, on the stream that captures";
                return Err(Failure::phase("capture", "the current stream captures nothing", remedy));
            }
            let begun = cuda.own(&sealed.arenas, at, stream);
            begun.and_then(|()| sealed.unproven(at).try_for_each(|id| cuda.wait_for(id, stream)))?;
        }
        self.follow(at, true);
        Ok(())
    }

    /// Begins a replay by hand: the program makes the captured sequence again and gets the same views. Returns whether
    /// it was the next launch of the sealed order.
    fn begin_replay(&mut self, runner: &str) -> Result<bool, Failure> {
        let at = self.sealed_runner("replay", runner)?;
        let in_order = self.next_launch(self.seals, at, 0)?;
        self.log_launch(at, 0, None);
        self.follow(at, false);
        Ok(in_order)
    }

    /// Number of a captured runner, for its launches.
    fn runner(&self, runner: &str) -> Result<usize, Failure> {
        let at = self.sealed_runner("replay", runner)?;
        match &self.sealed {
            Some(sealed) if sealed.runners[at].captured => Ok(at),
            _ => Err(RuntimeError::NotCaptured { runner: runner.to_owned() }.into()),
        }
    }

    /// Whether a runner says from where on the next one may start, so that it needs a stream of its own.
    fn completes(&self, runner: usize) -> bool {
        let of = |sealed: &Sealed| sealed.runs_on(runner);
        self.sealed.as_ref().is_some_and(of)
    }

    /// Nodes of a runner's graph that are sessile's: records (with that of the completion) and waits.
    fn event_nodes(&self, runner: usize) -> (usize, usize) {
        let (Some(sealed), Some(cuda)) = (&self.sealed, &self.cuda) else { return (0, 0) };
        let Some(known) = sealed.runners.get(runner) else { return (0, 0) };
        let released = known.marks.iter().filter_map(|mark| match mark {
            Mark::Release(id) if known.order.is_some() => Some(*id),
            _ => None,
        });
        let (fences, waits) = cuda.event_nodes(
            released.chain(sealed.unreleased(runner)),
            known.requests.iter().map(|planned| planned.request.id),
        );
        (fences + usize::from(sealed.runs_on(runner)), waits)
    }

    /// Makes `main` wait for all that runs on beside it.
    fn join(&mut self, main: u64) -> Result<(), Failure> {
        let Some(cuda) = &mut self.cuda else { return Ok(()) };
        Ok(join(cuda, self.log.as_mut(), main)?)
    }

    /// The event log so far, as versioned JSON.
    fn log(&self) -> Result<String, Failure> {
        let Some(lives) = &self.log else {
            return Err(Failure::phase(
                "save_log",
                "no event log is kept",
                "make the storage with GraphStorage(log=True)",
            ));
        };
        Ok(write(&lives.log())?)
    }

    /// The planned tensor, if the next request is asked for by exactly this key. Changes nothing else.
    fn take(&mut self, py: Python<'_>, key: &Bound<'_, PyAny>, stream: u64) -> PyResult<Option<Py<PyAny>>> {
        let (Scope::Follow(follow), Some(sealed)) = (&mut self.scope, &self.sealed) else { return Ok(None) };
        let runner = &sealed.runners[follow.at];
        let Some(planned) = runner.requests.get(follow.request) else { return Ok(None) };
        let (Some(known), Some(tensor)) = (&planned.key, &planned.tensor) else { return Ok(None) };
        if runner.marks.get(follow.mark) != Some(&Mark::Acquire(planned.request.id))
            || !known.bind(py).eq(key)?
        {
            return Ok(None);
        }
        if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
            acquire(cuda, runner, planned.request.id, stream).map_err(Failure::from)?;
        }
        follow.request += 1;
        follow.mark += 1;
        Ok(Some(tensor.clone_ref(py)))
    }

    /// The same for any key, with errors that say what differs; in a discovery, notes the request.
    #[pyo3(signature = (key, weight, role, dtype, shape, unsharded, group, symmetric, expert, accumulates_into, stream))]
    #[expect(clippy::too_many_arguments, reason = "the fields of a request, one by one")]
    fn request(
        &mut self,
        py: Python<'_>,
        key: Py<PyAny>,
        weight: String,
        role: &str,
        dtype: &str,
        shape: Vec<u64>,
        unsharded: Vec<u64>,
        group: Option<String>,
        symmetric: bool,
        expert: Option<u32>,
        accumulates_into: Option<String>,
        stream: u64,
    ) -> Result<Answer, Failure> {
        if matches!(self.scope, Scope::Idle) {
            return Ok((None, None));
        }
        let dtype = match dtype {
            "bfloat16" => DType::Bf16,
            "float32" => DType::F32,
            "int32" => DType::U32,
            other => {
                return Err(Failure::argument(
                    "dtype",
                    other,
                    "planned storage holds bfloat16, float32 or int32",
                ));
            }
        };
        if let Some(group) = group.as_deref().filter(|group| !self.groups.contains_key(*group)) {
            return Err(RuntimeError::UnknownGroup { group: group.to_owned() }.into());
        }
        let domain = match (&group, symmetric) {
            (Some(group), true) => Domain::Symmetric(group.clone()),
            (None, true) => {
                return Err(Failure::argument(
                    "symmetric",
                    "true",
                    "symmetric storage belongs to a group: name it",
                ));
            }
            (_, false) => Domain::Default,
        };
        let spec = RequestSpec {
            weight,
            role: role_of(role),
            dtype,
            shape,
            unsharded_shape: unsharded,
            domain,
            group,
            expert,
            accumulates_into,
        };
        match &mut self.scope {
            Scope::Idle => Ok((None, None)),
            Scope::Discover(pass) => {
                let id = self.discovery.request(pass, spec)?;
                self.keys.entry(id).or_insert(key);
                if let Some(cuda) = &mut self.cuda {
                    cuda.mark(Mark::Acquire(id), stream)?;
                }
                Ok((Some(id.0), None))
            }
            Scope::Follow(_) => Ok((None, Some(self.follow_request(py, &spec, stream)?))),
        }
    }

    /// Notes the release of a request on which nothing waits any more.
    fn release(&mut self, id: u32, stream: u64) -> Result<(), Failure> {
        let id = RequestId(id);
        if matches!(self.scope, Scope::Idle) {
            return Err(RuntimeError::ReleasedOutsideRunner { request: id.to_string() }.into());
        }
        if !self.released.insert(id) {
            return Err(Failure::argument(
                "view",
                &id.to_string(),
                "it was released before; release each view once",
            ));
        }
        self.mark(Mark::Release(id), stream)
    }

    /// Notes the point from which the next runner may start.
    fn complete(&mut self, stream: u64) -> Result<(), Failure> {
        if matches!(self.scope, Scope::Idle) {
            return Err(Failure::phase(
                "complete",
                "no runner is active",
                "call it inside discover or capture",
            ));
        }
        self.mark(Mark::Complete, stream)
    }

    /// Ends the pass. Whatever fails here leaves no pass under way.
    fn end(&mut self, stream: u64) -> Result<(), Failure> {
        self.released.clear();
        match std::mem::replace(&mut self.scope, Scope::Idle) {
            Scope::Idle => Err(Failure::phase("end", "no runner is active", "begin one first")),
            Scope::Discover(pass) => {
                let order = match &mut self.cuda {
                    Some(cuda) => cuda.proven(&pass.runner, stream)?,
                    None => Some(Order::program(&pass.marks)),
                };
                Ok(self.discovery.end(pass, order)?)
            }
            Scope::Follow(follow) => {
                let Some(sealed) = &mut self.sealed else { return Ok(()) };
                sealed.ended(&follow)?;
                let mut captured = None;
                if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
                    sealed.unreleased(follow.at).try_for_each(|id| cuda.record(id, stream))?;
                    let name = &sealed.trace.runners[follow.at].name;
                    captured = cuda.proven(name, stream)?;
                    sealed.still_proven(follow.at, captured.as_ref())?;
                }
                if let Some(log) = self.log.as_mut().filter(|_| follow.capture)
                    && let Some(order) = captured.as_ref().or(sealed.runners[follow.at].order.as_ref())
                {
                    log.captured(&sealed.trace, &sealed.plan, follow.at, order, &sealed.events);
                }
                sealed.runners[follow.at].captured |= follow.capture;
                Ok(())
            }
        }
    }

    /// Gives the pass up, as after an exception in it. What was known before is known still.
    fn abort(&mut self) {
        if let Some(cuda) = &mut self.cuda {
            cuda.forget();
        }
        self.released.clear();
        self.scope = Scope::Idle;
    }

    /// Agrees with the other ranks, plans, allocates. Collective over the job. Nothing is kept after an error.
    fn seal(&mut self, py: Python<'_>, stream: u64) -> PyResult<Plan> {
        self.idle("seal")?;
        self.open("seal")?;
        let sealed = self.agree_and_build(stream);
        let sealed = match sealed {
            Ok(sealed) => sealed,
            Err(error) => {
                let raised = std::iter::once(&self.world).chain(self.groups.values()).find_map(Group::raised);
                let failure = PyErr::from(Failure::from(error));
                if let Some(cause) = raised {
                    failure.set_cause(py, Some(cause));
                }
                return Err(failure);
            }
        };
        let mut sealed = sealed;
        for planned in sealed.runners.iter_mut().flat_map(|runner| &mut runner.requests) {
            planned.key = self.keys.get(&planned.request.id).map(|key| key.clone_ref(py));
        }
        let plan = Plan { plan: sealed.plan.clone() };
        if let Some(log) = &mut self.log {
            log.sealed(&sealed.trace, &sealed.plan, sealed.events.count);
        }
        self.sealed = Some(sealed);
        self.seals += 1;
        Ok(plan)
    }

    /// Each planned request as number and DLPack capsule, to be given back as a tensor by `set_tensors`.
    fn exports(&self, py: Python<'_>) -> PyResult<Vec<(u32, Py<PyAny>)>> {
        let Some(sealed) = &self.sealed else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for planned in sealed.runners.iter().flat_map(|runner| &runner.requests) {
            let id = planned.request.id;
            let spec = &planned.request.spec;
            let Some(view) = sealed.plan.view(id) else { continue };
            let arena = &sealed.arenas[view.arena as usize];
            if let Some(capsule) = dlpack::export(py, arena, view.offset, spec.dtype, &spec.shape)? {
                all.push((id.0, capsule));
            }
        }
        Ok(all)
    }

    /// Takes the tensors made of the capsules.
    fn set_tensors(&mut self, py: Python<'_>, tensors: BTreeMap<u32, Py<PyAny>>) {
        let Some(sealed) = &mut self.sealed else { return };
        for planned in sealed.runners.iter_mut().flat_map(|runner| &mut runner.requests) {
            planned.tensor = tensors.get(&planned.request.id.0).map(|tensor| tensor.clone_ref(py));
        }
    }

    /// Address and bytes of each arena.
    fn arenas(&self) -> Vec<(u64, u64)> {
        self.sealed.as_ref().map_or(Vec::new(), |sealed| {
            sealed.arenas.iter().map(|arena| (arena.address(), arena.bytes())).collect()
        })
    }

    /// Gives the plan up and forgets the discovery. Tensors that somebody still holds keep their memory.
    fn free(&mut self) -> Result<(), Failure> {
        self.idle("free")?;
        if self.sealed.take().is_none() {
            return Err(Failure::phase("free", "nothing is sealed", "seal first"));
        }
        if let Some(cuda) = &mut self.cuda {
            cuda.release();
        }
        if let Some(log) = &mut self.log {
            log.freed();
        }
        self.discovery = Discovery::default();
        self.keys.clear();
        Ok(())
    }

    /// Makes a group able to reduce in one shot. Collective over the group.
    fn add_reducer(&mut self, group: &str) -> Result<(), Failure> {
        let Some(known) = self.groups.get(group).cloned() else {
            return Err(RuntimeError::UnknownGroup { group: group.to_owned() }.into());
        };
        match &mut self.cuda {
            Some(cuda) => Ok(cuda.add_reducer(group, &known)?),
            None => Ok(()),
        }
    }

    /// Bytes for eager work that the group's ranks share, as a capsule of `int32`. Collective over the group.
    fn eager(&mut self, py: Python<'_>, group: &str, bytes: u64) -> PyResult<Option<Py<PyAny>>> {
        let Some(known) = self.groups.get(group).cloned() else {
            return Err(Failure::from(RuntimeError::UnknownGroup { group: group.to_owned() }).into());
        };
        if self.sealed.is_some() {
            let domain = Domain::Symmetric(group.to_owned()).to_string();
            return Err(Failure::from(RuntimeError::PoolSealed { domain, bytes }).into());
        }
        let Some(cuda) = &mut self.cuda else { return Ok(None) };
        let words = bytes.div_ceil(4);
        let arena = cuda.eager(group, &known, 4 * words).map_err(Failure::from)?;
        dlpack::export(py, &arena, 0, DType::U32, &[words])
    }

    /// Adds `scale` times the sum over ranks of this rank's block of `send` to the FP32 at `recv`.
    #[pyo3(signature = (group, dtype, scale, send, recv, elements, stream, request))]
    #[expect(clippy::too_many_arguments, reason = "the operands, one by one")]
    fn reduce_scatter_accumulate(
        &mut self,
        group: &str,
        dtype: &str,
        scale: f32,
        send: u64,
        recv: u64,
        elements: u64,
        stream: u64,
        request: Option<u32>,
    ) -> Result<(), Failure> {
        let Some(cuda) = &mut self.cuda else {
            return Err(Failure::phase(
                "one_shot",
                "the storage is of the CPU",
                "use a storage of a CUDA device",
            ));
        };
        let dtype = if dtype == "bfloat16" { DType::Bf16 } else { DType::F32 };
        let request = request.map(RequestId);
        if let Some(id) = request.filter(|id| self.released.contains(id)) {
            return Err(Failure::argument(
                "send",
                &id.to_string(),
                "it was released before; release it behind its last use",
            ));
        }
        cuda.reduce(&Reduction { group, stream, dtype, scale, send, recv, elements })?;
        match (&self.scope, request) {
            (Scope::Follow(follow), Some(id)) if follow.capture => Ok(cuda.mark(Mark::Use(id), stream)?),
            _ => Ok(()),
        }
    }

    /// Raises what a launch that gave up waiting for a rank left behind.
    fn check(&self) -> Result<(), Failure> {
        match &self.cuda {
            Some(cuda) => Ok(cuda.check()?),
            None => Ok(()),
        }
    }

    /// Forgets what was discovered so far.
    fn restart_discovery(&mut self) -> Result<(), Failure> {
        self.idle("restart_discovery")?;
        self.open("restart_discovery")?;
        self.discovery = Discovery::default();
        self.keys.clear();
        Ok(())
    }
}

impl Core {
    pub(crate) fn cuda_mut(&mut self) -> Option<&mut Cuda> {
        self.cuda.as_mut()
    }

    /// Which plan this is, and what launches of a runner need.
    pub(crate) fn launch_of(&self, runner: usize, exec: u64, lane: Option<u64>) -> (u64, Option<Launch>) {
        (self.seals, self.cuda.as_ref().map(|cuda| cuda.launcher(runner, exec, lane)))
    }

    /// The next launch is that of a captured runner of plan number `seal`: counts it, and joins everything first if it is out
    /// of order or begins a step.
    pub(crate) fn next_launch(&mut self, seal: u64, at: usize, main: u64) -> Result<bool, Failure> {
        self.idle("replay")?;
        let wraps = self.options.step_cut == sessile_plan::StepCut::Wrap;
        let Some(sealed) = &mut self.sealed else {
            return Err(Failure::phase(
                "replay",
                "nothing is sealed",
                "discover every runner once, then seal",
            ));
        };
        let Some(runner) = sealed.runners.get(at).filter(|_| seal == self.seals) else {
            return Err(Failure::phase(
                "replay",
                "the runner is of another plan",
                "look it up after the seal",
            ));
        };
        if !runner.captured {
            let runner = sealed.trace.runners[at].name.clone();
            return Err(RuntimeError::NotCaptured { runner }.into());
        }
        let place = sealed.cursor.place(&sealed.trace.steps, wraps, u32::try_from(at).unwrap_or(u32::MAX));
        sealed.cursor = place.after;
        self.counters.replays += 1;
        self.counters.order_deviations += u64::from(!place.in_order);
        if let Some(cuda) = &mut self.cuda
            && (!place.in_order || (place.begins && !wraps))
        {
            join(cuda, self.log.as_mut(), main)?;
        }
        Ok(place.in_order)
    }

    /// A launch was made, on `main` or on a stream of the runner's own.
    pub(crate) fn log_launch(&mut self, runner: usize, main: u64, lane: Option<u64>) {
        if let Some(log) = &mut self.log {
            log.launched(runner, main, lane);
        }
    }

    fn idle(&self, call: &'static str) -> Result<(), Failure> {
        match &self.scope {
            Scope::Idle => Ok(()),
            Scope::Discover(_) => Err(Failure::phase(
                call,
                "a runner is being discovered",
                "end the discovery of that runner first",
            )),
            Scope::Follow(follow) if follow.capture => {
                Err(Failure::phase(call, "a runner is being captured", "end or abort the capture first"))
            }
            Scope::Follow(_) => {
                Err(Failure::phase(call, "a runner is being replayed", "end the replay first"))
            }
        }
    }

    fn open(&self, call: &'static str) -> Result<(), Failure> {
        match &self.sealed {
            None => Ok(()),
            Some(_) => {
                Err(Failure::phase(call, "a plan is sealed", "free it first; after the seal nothing grows"))
            }
        }
    }

    fn sealed_runner(&self, call: &'static str, runner: &str) -> Result<usize, Failure> {
        self.idle(call)?;
        let Some(sealed) = &self.sealed else {
            let remedy = "discover every runner once, then seal";
            return Err(Failure::phase(call, "nothing is sealed", remedy));
        };
        let at = sealed.by_name.get(runner).copied();
        at.ok_or_else(|| RuntimeError::UnknownRunner { runner: runner.to_owned() }.into())
    }

    fn follow(&mut self, at: usize, capture: bool) {
        self.released.clear();
        self.scope = Scope::Follow(Follow { at, request: 0, mark: 0, capture });
    }

    /// Notes a mark in the pass; in a capture or replay it must be the one that the discovery had there.
    fn mark(&mut self, mark: Mark, stream: u64) -> Result<(), Failure> {
        match (&mut self.scope, &self.sealed) {
            (Scope::Discover(pass), _) => {
                pass.marks.push(mark);
                if let Some(cuda) = &mut self.cuda {
                    cuda.mark(mark, stream)?;
                }
            }
            (Scope::Follow(follow), Some(sealed)) => {
                sealed.expect(follow, mark)?;
                if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
                    cuda.mark(mark, stream)?;
                    match mark {
                        Mark::Release(id) if sealed.runners[follow.at].order.is_some() => {
                            cuda.record(id, stream)?;
                        }
                        Mark::Complete => cuda.complete(follow.at, stream)?,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn follow_request(
        &mut self,
        py: Python<'_>,
        spec: &RequestSpec,
        stream: u64,
    ) -> Result<Py<PyAny>, Failure> {
        let (Scope::Follow(follow), Some(sealed)) = (&mut self.scope, &self.sealed) else {
            return Err(Failure::phase("empty", "no runner is active", "begin a capture first"));
        };
        let runner = sealed.trace.runners[follow.at].name.clone();
        let index = follow.request;
        let Some(planned) = sealed.runners[follow.at].requests.get(index) else {
            return Err(RuntimeError::UnplannedRequest {
                runner,
                index,
                found: spec.to_string(),
                bytes: spec.bytes().unwrap_or(u64::MAX),
            }
            .into());
        };
        if planned.request.spec != *spec {
            return Err(RuntimeError::RequestMismatch {
                runner,
                index,
                expected: planned.request.spec.to_string(),
                found: spec.to_string(),
            }
            .into());
        }
        let tensor = planned.tensor.as_ref().map(|tensor| tensor.clone_ref(py));
        sealed.expect(follow, Mark::Acquire(planned.request.id))?;
        if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
            acquire(cuda, &sealed.runners[follow.at], planned.request.id, stream)?;
        }
        follow.request += 1;
        tensor.ok_or_else(|| {
            Failure::phase("empty", "the plan has no tensors yet", "call set_tensors after the seal")
        })
    }
}

/// Makes `main` wait for all that runs on.
fn join(cuda: &mut Cuda, log: Option<&mut Lives>, main: u64) -> Result<(), DeviceError> {
    let Some(log) = log else { return cuda.join(main) };
    let joined: Vec<(usize, u64)> = cuda.in_flight().collect();
    cuda.join(main)?;
    joined.into_iter().for_each(|(runner, lane)| log.joined(runner, lane, main));
    Ok(())
}

fn role_of(name: &str) -> Role {
    match name {
        "wgrad_input" => Role::WgradInput,
        "rs_output" => Role::RsOutput,
        "a2a_scratch" => Role::A2aScratch,
        "fp32_output" => Role::Fp32Output,
        "gathered_weight" => Role::GatheredWeight,
        other => Role::User(other.to_owned()),
    }
}

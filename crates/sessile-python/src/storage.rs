//! The life of planned storage on one rank: discover → agree → seal → capture → replay → free.
//!
//! A call in the wrong phase is an error and changes nothing. Outside discovery, capture and replay, requests are the
//! framework's own business.

mod launches;
mod passes;
mod requests;
mod seal;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use pyo3::prelude::*;
use sessile_hal::Comm;
use sessile_plan::{DType, Domain, PlanOptions, RequestId, RequestSpec, check_trace, write_trace};
use sessile_runtime::RuntimeError;
use sessile_runtime::log::Lives;
use sessile_runtime::order::Mark;

use crate::cuda::{Cuda, Reduction};
use crate::discovery::{Discovery, Pass};
use crate::dlpack;
use crate::error::Failure;
use crate::exchange::Group;
use crate::logs::write;
use crate::planning::{Plan, options};
use crate::sealed::{Follow, Sealed};

/// The longest that a rank may wait for another one.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

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
    #[pyo3(signature = (name, ranks, rank, gather, *, strategy, depth, step_cut, ordinal, log, patience))]
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
        patience: f64,
    ) -> Result<Core, Failure> {
        let world_rank = ranks.get(rank as usize).copied().unwrap_or(0);
        let asked = patience;
        let patience =
            Duration::try_from_secs_f64(patience).ok().filter(|time| !time.is_zero() && *time <= LONGEST);
        let Some(patience) = patience else {
            return Err(Failure::argument(
                "patience",
                &asked.to_string(),
                "give seconds: above 0, at most a day",
            ));
        };
        let cuda = ordinal.map(|ordinal| Cuda::open(ordinal, world_rank, patience)).transpose()?;
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
        self.discover(runner, launch, stream)
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
        self.capture(runner, stream)
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
        self.count_event_nodes(runner)
    }

    /// Makes `main` wait for all that runs on beside it.
    fn join(&mut self, main: u64) -> Result<(), Failure> {
        let Some(cuda) = &mut self.cuda else { return Ok(()) };
        Ok(launches::join(cuda, self.log.as_mut(), main)?)
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
        self.take_planned(py, key, stream)
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
        let dtype = requests::dtype_of(dtype)?;
        if let Some(group) = group.as_deref().filter(|group| !self.groups.contains_key(*group)) {
            return Err(RuntimeError::UnknownGroup { group: group.to_owned() }.into());
        }
        let spec = RequestSpec {
            weight,
            role: requests::role_of(role),
            dtype,
            shape,
            unsharded_shape: unsharded,
            domain: requests::domain_of(group.as_deref(), symmetric)?,
            group,
            expert,
            accumulates_into,
        };
        self.ask(py, key, spec, stream)
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
        self.end_pass(stream)
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
        self.agree_and_seal(py, stream)
    }

    /// Each planned request as number and DLPack capsule, to be given back as a tensor by `set_tensors`.
    fn exports(&self, py: Python<'_>) -> PyResult<Vec<(u32, Py<PyAny>)>> {
        self.capsules(py)
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
        self.check()?;
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
        match self.cuda.as_ref().and_then(Cuda::gave_up) {
            Some(gave_up) => Err(gave_up.into()),
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

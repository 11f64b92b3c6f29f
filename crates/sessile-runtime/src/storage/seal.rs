//! Seal: agree, plan, allocate, register. After it no arena grows.

use std::collections::BTreeMap;

use serde::{Serialize, de::DeserializeOwned};
use sessile_hal::{Comm, Device, EventScope, Note, Span};
use sessile_plan::{Domain, Fence, Plan, PlanOptions, PointKind, RequestId, Trace, check_trace, plan};

use super::{Cursor, Fencing, Phase, Runtime, Scope, Sealed, SealedRunner, external, window_group};
use crate::{RuntimeError, agree, discovery::Discovery};

impl<D: Device> Runtime<D> {
    /// Agrees with the other ranks on what was discovered, plans it, allocates and registers the arenas.
    /// Collective over the job; blocks the host.
    ///
    /// The discovery must have covered exactly one step, or one step of each alternative
    /// ([`Runtime::next_alternative`]): its launches, in order, become the sealed order.
    ///
    /// # Errors
    /// The same on every rank, within the device's deadline: [`RuntimeError::PlanMismatch`],
    /// [`RuntimeError::PeerAllocFailed`], [`RuntimeError::PeerFailed`] and others. Nothing is kept; the call can be
    /// made again.
    pub fn seal(&mut self, name: &str, options: &PlanOptions) -> Result<&Plan, RuntimeError> {
        let local = self.prepare(name, options);
        let agreed = agree::compare(&self.groups, local.as_ref().ok().map(|(trace, _)| trace));
        let local = agree::share(&self.world, local.and_then(|local| agreed.map(|()| local)));
        let (trace, plan) = local?;

        let offsets = self.compare_offsets(&plan);
        agree::share(&self.world, offsets)?;
        agree::same_options(&self.world, options)?;

        // Allocation is local and may fail on one rank alone; registration is collective. So agree in between.
        let allocated = self.fits(&plan).and_then(|()| self.allocate(&plan));
        let arenas = agree::share(&self.world, allocated)?;
        let registered = self.register(&plan, &arenas);
        agree::share(&self.world, registered)?;

        let sealed = self.build(trace, plan, arenas);
        let sealed = agree::share(&self.world, sealed)?;
        self.seals += 1;
        self.device.note(Note::Sealed(&sealed.arenas));
        self.phase = Phase::Sealed(Box::new(sealed));
        Ok(self.plan().expect("sealed just now"))
    }

    /// Waits for all launches, then gives up graphs, events and arenas, and forgets the discovery.
    ///
    /// # Errors
    /// Those of the named waits; everything is given up all the same.
    pub fn release_plan(&mut self) -> Result<(), RuntimeError> {
        self.idle("release_plan")?;
        self.sealed_mut("release_plan")?;
        // Also those that the main stream has joined: it may not have reached that point.
        let waits: Vec<_> = self
            .sealed()
            .into_iter()
            .flat_map(|sealed| &sealed.runners)
            .filter(|runner| runner.graph.is_some())
            .map(|runner| self.device.wait_stream(&runner.stream))
            .collect();
        self.phase = Phase::Open;
        self.device.note(Note::Released);
        self.discovery = Discovery::default();
        waits.into_iter().collect::<Result<(), _>>()?;
        Ok(())
    }

    /// Gives the physical bytes of the arenas back and maps fresh ones at the same addresses, registered anew. The graphs
    /// captured before are out of date: capture each runner again before its next replay. Waits for all launches.
    /// Collective over the job.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`]; [`RuntimeError::PeerAllocFailed`] and [`RuntimeError::PeerFailed`] on every rank alike;
    /// those of the named waits.
    pub fn remap_arenas(&mut self) -> Result<(), RuntimeError> {
        self.idle("remap_arenas")?;
        self.sealed_mut("remap_arenas")?;
        let joined = self.join();
        let waited = joined.and_then(|()| Ok(self.device.wait_stream(&self.main)?));
        let arenas = self.arenas().to_vec();
        let remap = || arenas.iter().try_for_each(|arena| Ok(self.device.remap(arena)?));
        agree::share(&self.world, waited.and_then(|()| remap()))?;
        let plan = self.plan().expect("checked above");
        agree::share(&self.world, self.register(plan, &arenas))
    }

    /// What is discovered from here on is another step, which never runs together with those before it: each step
    /// replays one of them as a whole (one for each sequence length, say). Alternatives share storage; their need is the
    /// largest, not the sum.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`] inside a runner or after the seal.
    pub fn next_alternative(&mut self) -> Result<(), RuntimeError> {
        self.idle("next_alternative")?;
        if self.sealed().is_some() {
            return Err(RuntimeError::WrongPhase {
                call: "next_alternative",
                phase: "a plan is sealed",
                remedy: "discover every alternative before the seal",
            });
        }
        self.discovery.next_alternative();
        Ok(())
    }

    /// Takes the spans of the discovery and notes how long each piece of work took: of the ranks' durations the longest,
    /// of collectives the shortest, since a rank that comes early counts its wait for the others. The trace then holds
    /// them. Collective over the job, after all work of the discovery has ended. Nothing if the device keeps no spans.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`] inside a runner or after the seal; those of the exchange.
    pub fn measure(&mut self, spans: &[Span]) -> Result<(), RuntimeError> {
        self.idle("measure")?;
        if self.sealed().is_some() {
            return Err(RuntimeError::WrongPhase {
                call: "measure",
                phase: "a plan is sealed",
                remedy: "measure before the seal",
            });
        }
        let ranks = agree::durations(&self.world, &self.discovery.durations(spans))?;
        self.discovery.reduce(&ranks);
        Ok(())
    }

    /// Rank 0 decides for all. Collective over the job; the others wait.
    ///
    /// # Errors
    /// Those of `decide`, told to all ranks, and of the exchange.
    pub fn decide<T: Serialize + DeserializeOwned>(
        &self,
        decide: impl FnOnce() -> Result<T, RuntimeError>,
    ) -> Result<T, RuntimeError> {
        let mine = if self.device.rank() == self.world.ranks()[0] { decide().map(Some) } else { Ok(None) };
        let mine = agree::share(&self.world, mine)?;
        agree::first(&self.world, &mine)?.ok_or(RuntimeError::WrongPhase {
            call: "decide",
            phase: "the first rank gave no answer",
            remedy: "call it on all ranks",
        })
    }

    /// What was discovered so far, as the seal will take it.
    pub fn discovered(&self, name: &str) -> Trace {
        self.discovery.trace(name)
    }

    /// Forgets what was discovered so far, as after a discovery that failed half-way.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`] inside a runner or after the seal.
    pub fn restart_discovery(&mut self) -> Result<(), RuntimeError> {
        self.idle("restart_discovery")?;
        if self.sealed().is_some() {
            return Err(RuntimeError::WrongPhase {
                call: "restart_discovery",
                phase: "a plan is sealed",
                remedy: "release it first",
            });
        }
        self.discovery = Discovery::default();
        Ok(())
    }

    pub(super) fn idle(&self, call: &'static str) -> Result<(), RuntimeError> {
        match self.scope {
            Scope::Idle => Ok(()),
            Scope::Discover { .. } => Err(RuntimeError::WrongPhase {
                call,
                phase: "a runner is being discovered",
                remedy: "end the discovery of that runner first",
            }),
            Scope::Capture { .. } => Err(RuntimeError::WrongPhase {
                call,
                phase: "a runner is being captured",
                remedy: "end or abort the capture first",
            }),
        }
    }

    pub(super) fn prepare(&self, name: &str, options: &PlanOptions) -> Result<(Trace, Plan), RuntimeError> {
        self.idle("seal")?;
        if self.sealed().is_some() {
            return Err(RuntimeError::WrongPhase {
                call: "seal",
                phase: "a plan is sealed",
                remedy: "release it first; after the seal nothing grows",
            });
        }
        let trace = self.discovery.trace(name);
        check_trace(&trace)?;
        for (_, request) in trace.requests() {
            for group in request.spec.group.as_deref().into_iter().chain(window_group(&request.spec.domain)) {
                self.group(group)?;
            }
        }
        let plan = plan(&trace, options)?;
        Ok((trace, plan))
    }

    fn compare_offsets(&self, plan: &Plan) -> Result<(), RuntimeError> {
        // In order of request; the numbers themselves are local to a rank.
        let mut offsets: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
        for view in &plan.views {
            if let Some(group) = window_group(&plan.arenas[view.arena as usize].domain) {
                offsets.entry(group).or_default().push((view.offset, view.bytes));
            }
        }
        let mut first = Ok(());
        for (group, comm) in &self.groups {
            let Some(list) = offsets.get(group.as_str()) else { continue };
            let outcome = agree::compare_offsets(group, comm, list);
            if first.is_ok() {
                first = outcome;
            }
        }
        first
    }

    fn allocate(&self, plan: &Plan) -> Result<Vec<D::Memory>, RuntimeError> {
        plan.arenas
            .iter()
            .map(|arena| {
                let domain = self.device_domain(&arena.domain);
                Ok(self.device.alloc(arena.bytes, &domain, &format!("arena {}", arena.domain))?)
            })
            .collect()
    }

    /// Registers in order of group name, which is equal on all ranks.
    fn register(&self, plan: &Plan, arenas: &[D::Memory]) -> Result<(), RuntimeError> {
        // Also after a failure: the members of the other groups wait for this rank.
        let mut first = Ok(());
        for (group, comm) in &self.groups {
            let domain = Domain::Symmetric(group.clone());
            if let Some(at) = plan.arenas.iter().position(|arena| arena.domain == domain) {
                let outcome = self.device.register_window(comm, &arenas[at]);
                if first.is_ok() {
                    first = outcome;
                }
            }
        }
        Ok(first?)
    }

    fn build(&self, trace: Trace, plan: Plan, arenas: Vec<D::Memory>) -> Result<Sealed<D>, RuntimeError> {
        let by_name =
            trace.runners.iter().enumerate().map(|(at, runner)| (runner.name.clone(), at)).collect();
        let mut fence_events: BTreeMap<RequestId, D::Event> = BTreeMap::new();
        let inside = plan.fences.iter().filter(|_| self.fencing == Fencing::Inside);
        for Fence { release, .. } in inside {
            if !fence_events.contains_key(release) {
                fence_events.insert(*release, external(&self.device)?);
            }
        }
        let mut waits: BTreeMap<RequestId, Vec<Fence>> = BTreeMap::new();
        for fence in &plan.fences {
            waits.entry(fence.acquire).or_default().push(*fence);
        }
        let runners = trace
            .runners
            .iter()
            .map(|runner| {
                Ok(SealedRunner {
                    waits: runner
                        .requests
                        .iter()
                        .map(|request| waits.remove(&request.id).unwrap_or_default())
                        .collect(),
                    views: Vec::new(),
                    borders: Vec::new(),
                    stream: self.device.stream(&runner.name)?,
                    start: self.device.event(EventScope::Internal)?,
                    completion: external(&self.device)?,
                    end: self.device.event(EventScope::Internal)?,
                    graph: None,
                    completes: runner.points.iter().any(|point| point.kind == PointKind::Complete),
                    in_flight: false,
                    mappings: Vec::new(),
                })
            })
            .collect::<Result<Vec<_>, RuntimeError>>()?;
        let mut sealed =
            Sealed { trace, plan, arenas, by_name, fence_events, runners, cursor: Cursor::default() };
        for at in 0..sealed.runners.len() {
            let requests = &sealed.trace.runners[at].requests;
            let views = requests
                .iter()
                .map(|request| sealed.view(request.id, &request.spec))
                .collect::<Result<_, _>>()?;
            sealed.runners[at].views = views;
            sealed.runners[at].borders = sealed.borders(at);
        }
        Ok(sealed)
    }
}

//! The seal: ranks agree on what they discovered, plan it and allocate.

use pyo3::prelude::*;
use sessile_hal::{Comm, DeviceError};
use sessile_plan::{Domain, LaunchOrder, Trace, check_trace, plan};
use sessile_runtime::events::Events;
use sessile_runtime::{Cursor, RuntimeError, agree};

use super::Core;
use crate::arena::Arena;
use crate::dlpack;
use crate::error::Failure;
use crate::exchange::Group;
use crate::planning::Plan;
use crate::sealed::{Planned, Runner, Sealed};

impl Core {
    pub(super) fn agree_and_seal(&mut self, py: Python<'_>, stream: u64) -> PyResult<Plan> {
        self.idle("seal")?;
        self.open("seal")?;
        let sealed = self.agree_and_build(stream);
        let sealed = match sealed {
            Ok(sealed) => sealed,
            Err(error) => {
                let groups = std::iter::once(&self.world).chain(self.groups.values());
                let raised: Vec<PyErr> = groups.filter_map(Group::raised).collect();
                // Of an error of this rank itself an exchange after it is no cause.
                let stands_for_it = matches!(error, RuntimeError::Device(DeviceError::Rendezvous { .. }));
                let failure = PyErr::from(Failure::from(error));
                if let Some(cause) = raised.into_iter().next().filter(|_| stands_for_it) {
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

    pub(super) fn capsules(&self, py: Python<'_>) -> PyResult<Vec<(u32, Py<PyAny>)>> {
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

    /// Every exchange is made by every rank, also by one that failed, so that none waits for another for ever.
    pub(super) fn agree_and_build(&mut self, stream: u64) -> Result<Sealed, RuntimeError> {
        let local = self.prepare();
        let agreed = agree::compare(&self.groups, local.as_ref().ok().map(|(trace, _)| trace));
        let local = agree::share(&self.world, local.and_then(|local| agreed.map(|()| local)));
        let (trace, plan) = local?;
        agree::share(&self.world, self.compare_offsets(&plan))?;
        agree::same_options(&self.world, &self.options)?;
        let arenas = match &mut self.cuda {
            Some(cuda) => cuda.arenas(&plan, &self.world, &self.groups)?,
            None => agree::share(&self.world, self.allocate(&plan))?,
        };
        let runners: Vec<Runner> = trace
            .runners
            .iter()
            .zip(&self.discovery.runners)
            .map(|(runner, found)| Runner {
                requests: runner
                    .requests
                    .iter()
                    .map(|request| Planned { request: request.clone(), key: None, tensor: None })
                    .collect(),
                marks: found.marks.clone(),
                order: found.order.clone(),
                captured: false,
            })
            .collect();
        let mut events = Events::default();
        if let Some(cuda) = &mut self.cuda {
            // With serial launches nothing runs on beside the next runner, and the plan has no fences for it.
            let overlapped = plan.launch_order == LaunchOrder::Overlapped;
            let completing: Vec<bool> =
                runners.iter().map(|runner| overlapped && runner.completes()).collect();
            events = Sealed::events(&plan, &runners);
            let prepared = cuda.prepare(&events, &completing, stream).map_err(RuntimeError::from);
            agree::share(&self.world, prepared)?;
        }
        let by_name =
            trace.runners.iter().enumerate().map(|(at, runner)| (runner.name.clone(), at)).collect();
        Ok(Sealed { trace, plan, arenas, runners, by_name, cursor: Cursor::default(), events })
    }

    fn prepare(&self) -> Result<(Trace, sessile_plan::Plan), RuntimeError> {
        let trace = self.discovery.trace(&self.name);
        check_trace(&trace)?;
        let plan = plan(&trace, &self.options)?;
        Ok((trace, plan))
    }

    fn compare_offsets(&self, plan: &sessile_plan::Plan) -> Result<(), RuntimeError> {
        let mut first = Ok(());
        for (name, group) in &self.groups {
            let domain = Domain::Symmetric(name.clone());
            let Some(at) = plan.arenas.iter().position(|arena| arena.domain == domain) else { continue };
            let of_arena = plan.views.iter().filter(|view| view.arena as usize == at);
            let offsets: Vec<(u64, u64)> = of_arena.map(|view| (view.offset, view.bytes)).collect();
            let outcome = agree::compare_offsets(name, group, &offsets);
            if first.is_ok() {
                first = outcome;
            }
        }
        first
    }

    fn allocate(&self, plan: &sessile_plan::Plan) -> Result<Vec<Arena>, RuntimeError> {
        let arena = |arena: &sessile_plan::Arena| {
            Arena::host(arena.bytes).ok_or_else(|| {
                RuntimeError::Device(DeviceError::OutOfMemory {
                    rank: self.world.ranks()[self.world.rank() as usize],
                    label: format!("arena {}", arena.domain),
                    requested: arena.bytes,
                    free: 0,
                })
            })
        };
        plan.arenas.iter().map(arena).collect()
    }
}

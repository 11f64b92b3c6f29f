//! The seal: ranks agree on what they discovered, plan it and allocate.

use sessile_hal::{Comm, DeviceError};
use sessile_plan::{Domain, LaunchOrder, Trace, check_trace, plan};
use sessile_runtime::events::Events;
use sessile_runtime::{Cursor, RuntimeError, agree};

use super::Core;
use crate::arena::Arena;
use crate::sealed::{Planned, Runner, Sealed};

impl Core {
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

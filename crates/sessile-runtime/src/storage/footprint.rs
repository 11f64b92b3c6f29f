//! What a plan takes of a rank's memory, known before anything is allocated.

use sessile_hal::Device;
use sessile_plan::{Plan, PlanOptions};

use super::{Runtime, window_group};
use crate::RuntimeError;

/// Bytes of all arenas of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// As planned.
    pub planned: u64,
    /// As allocated: with what the device rounds up.
    pub allocated: u64,
    /// Of these, registered with a group.
    pub registered: u64,
    /// What the device could still allocate; `None` if it has no memory of its own.
    pub free: Option<u64>,
}

impl<D: Device> Runtime<D> {
    /// What a seal with these options would allocate on this rank, against what is free now. Allocates nothing.
    ///
    /// # Errors
    /// [`RuntimeError::WrongPhase`] inside a runner or after the seal; those of the trace, the plan and the device.
    pub fn footprint(&self, options: &PlanOptions) -> Result<Footprint, RuntimeError> {
        let (_, plan) = self.prepare("footprint", options)?;
        self.footprint_of(&plan)
    }

    pub(super) fn footprint_of(&self, plan: &Plan) -> Result<Footprint, RuntimeError> {
        let mut footprint =
            Footprint { planned: plan.bytes(), allocated: 0, registered: 0, free: self.device.free_bytes()? };
        for arena in &plan.arenas {
            let bytes = self.device.allocated_bytes(arena.bytes, &arena.domain);
            footprint.allocated = footprint.allocated.saturating_add(bytes);
            if window_group(&arena.domain).is_some() {
                footprint.registered = footprint.registered.saturating_add(bytes);
            }
        }
        Ok(footprint)
    }

    /// Fails if the arenas of a plan can't fit.
    pub(super) fn fits(&self, plan: &Plan) -> Result<(), RuntimeError> {
        let footprint = self.footprint_of(plan)?;
        match footprint.free {
            Some(free) if free < footprint.allocated => {
                Err(RuntimeError::DoesNotFit { rank: self.device.rank(), footprint, free })
            }
            _ => Ok(()),
        }
    }
}

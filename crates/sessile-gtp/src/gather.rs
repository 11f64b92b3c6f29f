//! All-gathers, one step ahead along the chain.

use sessile_hal::{Collective, Device, DeviceError, Transfer, View};
use sessile_runtime::{RuntimeError, Slot};

use crate::{ChainKind, Gtp, Pass, WeightId, chain::Prefetched, runner::Import};

/// A whole weight, bf16 `[padded_rows, cols]` each matrix, ready for the compute stream. Give it to [`Gtp::release`] after
/// the last operation that reads it was enqueued.
#[derive(Debug)]
pub struct Gathered<D: Device> {
    slots: Vec<Slot<D>>,
    elements: u64,
}

impl<D: Device> Gathered<D> {
    /// Matrix `part`, `[rows, cols]` without the padding below.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] if there are fewer matrices.
    pub fn matrix(&self, part: usize) -> Result<View<D::Memory>, DeviceError> {
        // A weight has at least one matrix; the last one's view gives the error for those beyond.
        let slot = &self.slots[part.min(self.slots.len() - 1)];
        let beyond = if part < self.slots.len() { 0 } else { slot.view().elements() };
        slot.view().slice(beyond, self.elements)
    }

    /// Number of matrices: one, or one an expert.
    pub fn parts(&self) -> usize {
        self.slots.len()
    }
}

impl<D: Device> Gtp<D> {
    /// The whole weight, ready for the compute stream; the next one of the chain is on its way.
    ///
    /// # Errors
    /// Those of requests and of the device.
    pub fn materialize(&mut self, weight: WeightId, pass: Pass) -> Result<Gathered<D>, RuntimeError> {
        let kind = self.weights[weight.0].chain;
        let current = match self.chain(kind).gathered.take() {
            Some(gathered) if gathered.weight == weight => gathered,
            Some(stale) => {
                // Left over from a pass that was given up.
                let stream = self.group_of(stale.weight).gather.clone();
                for slot in stale.slots {
                    self.runtime.release(&stream, slot)?;
                }
                self.start_gather(weight)?
            }
            None => self.start_gather(weight)?,
        };
        if let Some(next) = self.chain(kind).order(pass).pass(weight) {
            let next = self.start_gather(next)?;
            self.chain(kind).gathered = Some(next);
        }
        let compute = self.runtime.compute().clone();
        if let Some(ready) = &current.ready {
            self.runtime.wait(&compute, ready)?;
        }
        if self.runtime.is_capturing() && kind == ChainKind::Graphed {
            let runner = self.runtime.runner().map(str::to_owned);
            if let (Some(runner), true) = (&runner, current.runner != runner) {
                let views = current.slots.iter().map(|slot| slot.view().clone()).collect();
                self.imports.entry(runner.clone()).or_default().push(Import { weight, views });
            }
        }
        let elements = self.weights[weight.0].shard.elements();
        Ok(Gathered { slots: current.slots, elements })
    }

    /// Gives a weight back whose last reader is on the compute stream.
    ///
    /// # Errors
    /// Those of [`sessile_runtime::Runtime::release`].
    pub fn release(&mut self, gathered: Gathered<D>) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        for slot in gathered.slots {
            self.runtime.release(&compute, slot)?;
        }
        Ok(())
    }

    fn start_gather(&mut self, weight: WeightId) -> Result<Prefetched<D>, RuntimeError> {
        let (compute, gather) = (self.runtime.compute().clone(), self.group_of(weight).gather.clone());
        let now = self.runtime.mark(&compute)?;
        self.runtime.wait(&gather, &now)?;
        let group = self.group_of_mut(weight);
        group.gather_used = true;
        let name = group.name.clone();
        let mut slots = Vec::new();
        let mut transfers = Vec::new();
        for at in 0..self.weights[weight.0].parts.len() {
            let (of, group) = (&self.weights[weight.0], self.group_of(weight));
            let (spec, send) = (of.gathered_spec(&of.parts[at], group), of.parts[at].value.clone());
            let slot = self.runtime.request(&gather, spec)?;
            transfers.push(Transfer { send, recv: slot.view().clone() });
            slots.push(slot);
        }
        self.runtime.collective_batch(&gather, &name, Collective::AllGather, &transfers)?;
        let ready = self.runtime.mark(&gather)?;
        let runner = self.runtime.runner().map(str::to_owned);
        Ok(Prefetched { weight, slots, ready: Some(ready), runner })
    }
}

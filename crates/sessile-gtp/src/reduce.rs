//! Reduce-scatters: started right after the wgrad GEMM, finalized one weight later.

use sessile_hal::{Collective, Comm as _, Device, Kernel, Op, Transfer, View};
use sessile_runtime::{Runtime, RuntimeError, Slot};

use crate::{ChainKind, Gtp, ReduceScatter, Weight, WeightId, chain::Reducing, group::Group};

/// The buffers of one reduce-scatter, an entry a matrix; empty where the kind needs none.
#[derive(Debug)]
pub(crate) struct Buffers<D: Device> {
    inputs: Vec<Slot<D>>,
    scratch: Vec<Slot<D>>,
    outputs: Vec<Slot<D>>,
}

impl<D: Device> Default for Buffers<D> {
    fn default() -> Self {
        Buffers { inputs: Vec::new(), scratch: Vec::new(), outputs: Vec::new() }
    }
}

/// What a request for a matrix looks like.
type Ask<D> = fn(&Weight<D>, usize, &Group<D>) -> sessile_plan::RequestSpec;

fn views<D: Device>(slots: &[Slot<D>]) -> impl Iterator<Item = View<D::Memory>> {
    slots.iter().map(|slot| slot.view().clone())
}

fn transfers<M>(
    send: impl Iterator<Item = View<M>>,
    recv: impl Iterator<Item = View<M>>,
) -> Vec<Transfer<M>> {
    send.zip(recv).map(|(send, recv)| Transfer { send, recv }).collect()
}

impl<D: Device> Gtp<D> {
    /// Starts the reduce-scatter of a gradient and finalizes the one before it.
    ///
    /// `write` enqueues on the compute stream what fills the gradients: of each matrix a view `[rows, cols]` in the wire
    /// dtype, all of which it overwrites. The padding below is zeroed here. Matrices of experts without tokens are written
    /// too: with zeros.
    ///
    /// *Order*: nothing blocks the host. The gradient is in `main_grad`, for the compute stream, once it is *ready*: one
    /// weight later, or at the end of the runner or of the backward.
    ///
    /// # Errors
    /// Those of `write`, of requests and of the device.
    pub fn reduce(
        &mut self,
        weight: WeightId,
        write: impl FnOnce(&mut Runtime<D>, &[View<D::Memory>]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        if self.weights[weight.0].reduces_once() {
            return self.add_locally(weight, write);
        }
        let kind = self.weights[weight.0].chain;
        let kept = self.count_use(weight);
        let mut buffers = Buffers::default();
        if self.weights[weight.0].reuses_buffers() {
            if let Some(same) = self.chain(kind).reducing.take_if(|reducing| reducing.weight == weight) {
                self.finalize(same)?;
            }
            buffers = self.chain(kind).kept.remove(&weight).unwrap_or_default();
        }
        if buffers.inputs.is_empty() {
            let compute = self.runtime.compute().clone();
            buffers.inputs =
                self.ask(weight, &compute, |of, at, group| of.input_spec(&of.parts[at], group))?;
            self.zero_padding(weight, &buffers.inputs)?;
        }
        let rows = self.rows(weight, &buffers.inputs)?;
        write(&mut self.runtime, &rows)?;
        self.start(weight, kind, buffers, kept)
    }

    /// Counts one more use; whether another one follows that takes the same buffers.
    fn count_use(&mut self, weight: WeightId) -> bool {
        let (kind, uses) = (self.weights[weight.0].chain, self.weights[weight.0].uses);
        if !self.weights[weight.0].reuses_buffers() {
            return false;
        }
        let count = self.chain(kind).uses.entry(weight).or_insert(0);
        *count += 1;
        *count < uses
    }

    /// A request for each matrix.
    fn ask(
        &mut self,
        weight: WeightId,
        stream: &D::Stream,
        spec: Ask<D>,
    ) -> Result<Vec<Slot<D>>, RuntimeError> {
        (0..self.weights[weight.0].parts.len())
            .map(|at| {
                let spec = spec(&self.weights[weight.0], at, self.group_of(weight));
                self.runtime.request(stream, spec)
            })
            .collect()
    }

    fn zero_padding(&mut self, weight: WeightId, slots: &[Slot<D>]) -> Result<(), RuntimeError> {
        let shard = self.weights[weight.0].shard;
        let padding = shard.padded_elements() - shard.elements();
        let compute = self.runtime.compute().clone();
        for slot in slots.iter().filter(|_| padding > 0) {
            let tail = slot.view().slice(shard.elements(), padding)?;
            let op = Op::new(Kernel::Fill { value: 0.0 }, "zero padding", vec![tail])?;
            self.runtime.enqueue(&compute, op)?;
        }
        Ok(())
    }

    /// The matrices without their padding.
    fn rows(&self, weight: WeightId, slots: &[Slot<D>]) -> Result<Vec<View<D::Memory>>, RuntimeError> {
        let elements = self.weights[weight.0].shard.elements();
        slots.iter().map(|slot| Ok(slot.view().slice(0, elements)?)).collect()
    }

    /// Starts the reduce-scatter of inputs that the compute stream has filled.
    fn start(
        &mut self,
        weight: WeightId,
        chain: ChainKind,
        mut buffers: Buffers<D>,
        kept: bool,
    ) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        let group = self.group_of_mut(weight);
        group.reduce_used = true;
        let (reduce, name, kind, scale) =
            (group.reduce.clone(), group.name.clone(), group.kind, group.scale());
        let written = self.runtime.mark(&compute)?;
        self.runtime.wait(&reduce, &written)?;
        let inputs: Vec<_> = views(&buffers.inputs).collect();
        match kind {
            ReduceScatter::Ring | ReduceScatter::Symmetric => {
                if buffers.outputs.is_empty() {
                    buffers.outputs =
                        self.ask(weight, &reduce, |of, at, group| of.output_spec(&of.parts[at], group))?;
                }
                let collective = match kind {
                    ReduceScatter::Symmetric => Collective::SymmetricReduceScatter,
                    _ => Collective::ReduceScatter,
                };
                let batch = transfers(inputs.into_iter(), views(&buffers.outputs));
                self.runtime.collective_batch(&reduce, &name, collective, &batch)?;
                self.release_unless(kept, &reduce, &mut buffers.inputs)?;
            }
            ReduceScatter::Fp32A2a => {
                if buffers.scratch.is_empty() {
                    buffers.scratch =
                        self.ask(weight, &reduce, |of, at, group| of.scratch_spec(&of.parts[at], group))?;
                }
                let batch = transfers(inputs.into_iter(), views(&buffers.scratch));
                self.runtime.collective_batch(&reduce, &name, Collective::AllToAll, &batch)?;
                self.release_unless(kept, &reduce, &mut buffers.inputs)?;
                if buffers.outputs.is_empty() {
                    buffers.outputs = self.ask(weight, &reduce, |of, at, _| of.fp32_spec(&of.parts[at]))?;
                }
                let parts = self.weights[weight.0].shard.parts;
                for (scratch, output) in buffers.scratch.iter().zip(&buffers.outputs) {
                    let operands = vec![scratch.view().clone(), output.view().clone()];
                    let op = Op::new(Kernel::SumParts { parts }, "sum in rank order", operands)?;
                    self.runtime.enqueue(&reduce, op)?;
                }
                self.release_unless(kept, &reduce, &mut buffers.scratch)?;
            }
            ReduceScatter::OneShot => {
                let grads = self.weights[weight.0].parts.iter().map(|part| part.main_grad.clone());
                let batch = transfers(inputs.into_iter(), grads);
                let collective = Collective::ReduceScatterAccumulate { scale };
                self.runtime.collective_batch(&reduce, &name, collective, &batch)?;
                self.release_unless(kept, &reduce, &mut buffers.inputs)?;
            }
        }
        let done = self.runtime.mark(&reduce)?;
        let before = self.chain(chain).reducing.replace(Reducing { weight, buffers, kept, done });
        before.map_or(Ok(()), |before| self.finalize(before))
    }

    fn release_unless(
        &mut self,
        kept: bool,
        stream: &D::Stream,
        slots: &mut Vec<Slot<D>>,
    ) -> Result<(), RuntimeError> {
        for slot in slots.drain(if kept { 0..0 } else { 0..slots.len() }) {
            self.runtime.release(stream, slot)?;
        }
        Ok(())
    }

    /// Waits for a reduce-scatter, adds its scaled sum into `main_grad`, and publishes that the gradient is ready.
    fn finalize(&mut self, reducing: Reducing<D>) -> Result<(), RuntimeError> {
        let Reducing { weight, mut buffers, kept, done } = reducing;
        let compute = self.runtime.compute().clone();
        self.runtime.wait(&compute, &done)?;
        let scale = self.group_of(weight).scale();
        for (output, part) in buffers.outputs.iter().zip(&self.weights[weight.0].parts) {
            let operands = vec![output.view().clone(), part.main_grad.clone()];
            let label = format!("{} into main_grad", part.name);
            self.runtime.enqueue(&compute, Op::new(Kernel::AddScaled { scale }, label, operands)?)?;
        }
        self.release_unless(kept, &compute, &mut buffers.outputs)?;
        if kept {
            let chain = self.weights[weight.0].chain;
            self.chain(chain).kept.insert(weight, buffers);
        }
        self.note_ready(weight);
        Ok(())
    }

    /// Finalizes what is left of a runner or backward, and releases what no later use took. Runners end with it; inside
    /// one it puts the next reduce-scatter behind the last one's addition.
    ///
    /// # Errors
    /// Those of the device.
    pub fn drain(&mut self, kind: ChainKind) -> Result<(), RuntimeError> {
        if let Some(last) = self.chain(kind).reducing.take() {
            self.finalize(last)?;
        }
        let compute = self.runtime.compute().clone();
        self.chain(kind).uses.clear();
        for (weight, buffers) in std::mem::take(&mut self.chain(kind).kept) {
            let reduce = self.group_of(weight).reduce.clone();
            for slot in buffers.inputs.into_iter().chain(buffers.scratch) {
                self.runtime.release(&reduce, slot)?;
            }
            for slot in buffers.outputs {
                self.runtime.release(&compute, slot)?;
            }
        }
        Ok(())
    }

    /// Finalizes the last gradient of an eager backward: nothing comes after it.
    ///
    /// # Errors
    /// Those of the device.
    pub fn finish_backward(&mut self) -> Result<(), RuntimeError> {
        self.drain(ChainKind::Eager)
    }

    /// Adds one use into the local sum of its weight.
    fn add_locally(
        &mut self,
        weight: WeightId,
        write: impl FnOnce(&mut Runtime<D>, &[View<D::Memory>]) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        let slots = self.ask(weight, &compute, |of, at, _| of.local_spec(&of.parts[at]))?;
        let rows = self.rows(weight, &slots)?;
        write(&mut self.runtime, &rows)?;
        let of = &self.weights[weight.0];
        for (rows, part) in rows.into_iter().zip(&of.parts) {
            let Some(sum) = &part.sum else { continue };
            let operands = vec![rows, sum.slice(0, of.shard.elements())?];
            let op = Op::new(Kernel::Add, format!("{} local sum", part.name), operands)?;
            self.runtime.enqueue(&compute, op)?;
        }
        for slot in slots {
            self.runtime.release(&compute, slot)?;
        }
        self.note_local(weight);
        Ok(())
    }

    /// Ends a step: reduces what [`Repeat::ReduceOnce`](crate::Repeat::ReduceOnce) has added up, each weight once, and not
    /// at all if nothing used it. Call it on every rank after [`Runtime::join`], before anything reads `main_grad`.
    ///
    /// # Errors
    /// Those of requests and of the device.
    pub fn finish_step(&mut self) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        for at in 0..self.weights.len() {
            if std::mem::take(&mut self.local[at]) == 0 {
                continue;
            }
            let weight = WeightId(at);
            let inputs = self.ask(weight, &compute, |of, at, group| of.input_spec(&of.parts[at], group))?;
            for (input, part) in inputs.iter().zip(&self.weights[at].parts) {
                let Some(sum) = &part.sum else { continue };
                let kernel = match input.view().dtype() {
                    sessile_plan::DType::F32 => Kernel::Copy,
                    _ => Kernel::Cast,
                };
                let operands = vec![sum.clone(), input.view().clone()];
                self.runtime.enqueue(&compute, Op::new(kernel, "sum of all uses", operands)?)?;
                let zero = Op::new(Kernel::Fill { value: 0.0 }, "zero local sum", vec![sum.clone()])?;
                self.runtime.enqueue(&compute, zero)?;
            }
            let buffers = Buffers { inputs, ..Buffers::default() };
            self.start(weight, ChainKind::Eager, buffers, false)?;
        }
        self.drain(ChainKind::Eager)
    }

    /// Refuses gradients that are not whole: a reduce-scatter that waited for a rank in vain has ended without its part of
    /// `main_grad`, and so have all after it. To be called before an optimizer's work is enqueued, once the reduce-scatters
    /// have ended; says so at every call, while a wait reports a failure once.
    ///
    /// # Errors
    /// The first failure of a group's communicator.
    pub fn check_gradients(&self) -> Result<(), RuntimeError> {
        for group in &self.groups {
            self.runtime.group(&group.name)?.usable()?;
        }
        Ok(())
    }

    /// Begins a step: zeroes every `main_grad`, and local sums that a step given up has left.
    ///
    /// # Errors
    /// Those of the device.
    pub fn begin_step(&mut self) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        for (weight, uses) in self.weights.iter().zip(&mut self.local) {
            let left = std::mem::take(uses) > 0;
            for part in &weight.parts {
                let sums = part.sum.iter().filter(|_| left);
                for view in sums.chain([&part.main_grad]) {
                    let op = Op::new(Kernel::Fill { value: 0.0 }, "zero gradient", vec![view.clone()])?;
                    self.runtime.enqueue(&compute, op)?;
                }
            }
        }
        Ok(())
    }
}

//! Gathers, reduce-scatters and the two stages of a runner.

use std::collections::BTreeMap;

use sessile_hal::{Collective, Device, DeviceError, Kernel, Note, Op, View};
use sessile_plan::DType;
use sessile_runtime::{HasRuntime, Order, Runtime, RuntimeError, Slot};

use crate::{
    ChainKind, Pass, Shard, Weight, WeightId,
    chain::{Chain, Gathered, Reducing},
};

/// A view that a runner finds filled by the runner before it.
#[derive(Clone)]
struct Import<D: Device> {
    weight: WeightId,
    view: View<D::Memory>,
}

/// Sharded weights of one rank, over its storage runtime.
pub struct Gtp<D: Device> {
    runtime: Runtime<D>,
    gather: D::Stream,
    reduce: D::Stream,
    weights: Vec<Weight<D>>,
    eager: Chain<D>,
    graphed: Chain<D>,
    /// Whether the gather and reduce streams were used since the current runner began.
    gather_used: bool,
    reduce_used: bool,
    /// By the runner that finds them.
    imports: BTreeMap<String, Vec<Import<D>>>,
    /// How often each weight became ready in a capture, by runner; replayed with it.
    captured_ready: BTreeMap<String, Vec<WeightId>>,
    ready: Vec<u64>,
    /// Whether weights changed since the last launch.
    changed: bool,
}

impl<D: Device> HasRuntime<D> for Gtp<D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        &mut self.runtime
    }
}

impl<D: Device> Gtp<D> {
    /// Sharded weights over a runtime whose groups are known.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(runtime: Runtime<D>) -> Result<Self, RuntimeError> {
        let gather = runtime.device().stream("gather")?;
        let reduce = runtime.device().stream("reduce")?;
        Ok(Gtp {
            runtime,
            gather,
            reduce,
            weights: Vec::new(),
            eager: Chain::new(),
            graphed: Chain::new(),
            gather_used: false,
            reduce_used: false,
            imports: BTreeMap::new(),
            captured_ready: BTreeMap::new(),
            ready: Vec::new(),
            changed: false,
        })
    }

    /// The runtime.
    pub fn runtime_ref(&self) -> &Runtime<D> {
        &self.runtime
    }

    /// Adds a weight `[rows, cols]` sharded over `group`, appended to the forward order of its chain and, if its
    /// value is needed there, prepended to the backward order.
    ///
    /// # Errors
    /// [`RuntimeError::UnknownGroup`] and those of the device.
    #[expect(clippy::too_many_arguments, reason = "a weight has this many independent properties")]
    pub fn add_weight(
        &mut self,
        name: &str,
        rows: u64,
        cols: u64,
        group: &str,
        chain: ChainKind,
        wgrad_dtype: DType,
        gathered_in: &[Pass],
    ) -> Result<WeightId, RuntimeError> {
        use sessile_hal::Comm;
        let parts = u64::from(self.runtime.group(group)?.size());
        let shard = Shard { rows, cols, parts };
        let device = self.runtime.device();
        let value = persistent(device, &format!("{name} shard"), shard.shard_elements(), DType::Bf16)?;
        let main_grad = persistent(device, &format!("{name} main_grad"), shard.shard_elements(), DType::F32)?;
        device.note(Note::Accumulator(main_grad.memory()));
        let id = WeightId(self.weights.len());
        self.weights.push(Weight {
            name: name.to_owned(),
            shard,
            group: group.to_owned(),
            chain,
            wgrad_dtype,
            value,
            main_grad,
        });
        self.ready.push(0);
        let chain = self.chain(chain);
        if gathered_in.contains(&Pass::Forward) {
            chain.forward.push(id);
        }
        if gathered_in.contains(&Pass::Backward) {
            chain.backward.insert(0, id);
        }
        Ok(id)
    }

    /// A weight.
    pub fn weight(&self, id: WeightId) -> &Weight<D> {
        &self.weights[id.0]
    }

    /// All weights, in the order they were added.
    pub fn weights(&self) -> &[Weight<D>] {
        &self.weights
    }

    /// How often each weight's gradient became ready, in the order the weights were added.
    pub fn ready(&self) -> &[u64] {
        &self.ready
    }

    fn chain(&mut self, kind: ChainKind) -> &mut Chain<D> {
        match kind {
            ChainKind::Eager => &mut self.eager,
            ChainKind::Graphed => &mut self.graphed,
        }
    }

    /// The whole weight, bf16 `[padded_rows, cols]`, ready for the compute stream; the next weight of the chain is on
    /// its way. Give the slot to [`Gtp::release`] after the last GEMM that reads it.
    ///
    /// # Errors
    /// Those of requests and of the device.
    pub fn materialize(&mut self, weight: WeightId, pass: Pass) -> Result<Slot<D>, RuntimeError> {
        let kind = self.weights[weight.0].chain;
        let current = match self.chain(kind).gathered.take() {
            Some(gathered) if gathered.weight == weight => gathered,
            Some(stale) => {
                // Left over from a pass that was given up.
                let stream = self.gather.clone();
                self.runtime.release(&stream, stale.slot)?;
                self.start_gather(weight)?
            }
            None => self.start_gather(weight)?,
        };
        if let Some(next) = self.chain(kind).next(pass, weight) {
            let next = self.start_gather(next)?;
            self.chain(kind).gathered = Some(next);
        }
        let compute = self.runtime.compute().clone();
        if let Some(ready) = &current.ready {
            self.runtime.wait(&compute, ready)?;
        }
        if self.runtime.is_capturing() {
            let runner = self.runtime.runner().map(str::to_owned);
            if let (Some(runner), true) = (&runner, current.runner != runner) {
                let import = Import { weight, view: current.slot.view().clone() };
                self.imports.entry(runner.clone()).or_default().push(import);
            }
        }
        Ok(current.slot)
    }

    /// Gives back a buffer whose last reader is on the compute stream.
    ///
    /// # Errors
    /// Those of [`Runtime::release`].
    pub fn release(&mut self, slot: Slot<D>) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        self.runtime.release(&compute, slot)
    }

    fn start_gather(&mut self, weight: WeightId) -> Result<Gathered<D>, RuntimeError> {
        let (compute, gather) = (self.runtime.compute().clone(), self.gather.clone());
        let now = self.runtime.mark(&compute)?;
        self.runtime.wait(&gather, &now)?;
        self.gather_used = true;
        let (spec, group, value) = {
            let weight = &self.weights[weight.0];
            (weight.gathered_spec(), weight.group.clone(), weight.value.clone())
        };
        let slot = self.runtime.request(&gather, spec)?;
        self.runtime.collective(&gather, &group, Collective::AllGather, &value, slot.view())?;
        let ready = self.runtime.mark(&gather)?;
        let runner = self.runtime.runner().map(str::to_owned);
        Ok(Gathered { weight, slot, ready: Some(ready), runner })
    }

    /// Starts the reduce-scatter of a gradient and finalizes the one before it.
    ///
    /// `write` enqueues on the compute stream what fills the first `rows` rows of the gradient; the padding below is
    /// zeroed here.
    ///
    /// # Errors
    /// Those of `write`, of requests and of the device.
    pub fn reduce(
        &mut self,
        weight: WeightId,
        write: impl FnOnce(&mut Runtime<D>, &View<D::Memory>) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        let (compute, reduce) = (self.runtime.compute().clone(), self.reduce.clone());
        let (wgrad, output, group, shard, kind) = {
            let weight = &self.weights[weight.0];
            (weight.wgrad_spec(), weight.output_spec(), weight.group.clone(), weight.shard, weight.chain)
        };
        let input = self.runtime.request(&compute, wgrad)?;
        let padding = shard.padded_elements() - shard.elements();
        if padding > 0 {
            let tail = input.view().slice(shard.elements(), padding)?;
            self.runtime
                .enqueue(&compute, Op::new(Kernel::Fill { value: 0.0 }, "zero padding", vec![tail])?)?;
        }
        let rows = input.view().slice(0, shard.elements())?;
        write(&mut self.runtime, &rows)?;
        let written = self.runtime.mark(&compute)?;
        self.runtime.wait(&reduce, &written)?;
        self.reduce_used = true;
        let output = self.runtime.request(&reduce, output)?;
        self.runtime.collective(&reduce, &group, Collective::ReduceScatter, input.view(), output.view())?;
        self.runtime.release(&reduce, input)?;
        let done = self.runtime.mark(&reduce)?;
        let before = self.chain(kind).reducing.replace(Reducing { weight, output, done });
        self.finalize(before)
    }

    fn finalize(&mut self, reducing: Option<Reducing<D>>) -> Result<(), RuntimeError> {
        let Some(Reducing { weight, output, done }) = reducing else { return Ok(()) };
        let compute = self.runtime.compute().clone();
        self.runtime.wait(&compute, &done)?;
        let (main_grad, parts, name) = {
            let weight = &self.weights[weight.0];
            (weight.main_grad.clone(), weight.shard.parts, weight.name.clone())
        };
        // The mean over the group, after the sum.
        let scale = 1.0 / parts as f32;
        let op = Op::new(
            Kernel::AddScaled { scale },
            format!("{name} into main_grad"),
            vec![output.view().clone(), main_grad],
        )?;
        self.runtime.enqueue(&compute, op)?;
        self.runtime.release(&compute, output)?;
        match self.runtime.runner().filter(|_| self.runtime.is_capturing()) {
            Some(runner) => self.captured_ready.entry(runner.to_owned()).or_default().push(weight),
            None => self.became_ready(weight),
        }
        Ok(())
    }

    /// Finalizes the last gradient of an eager backward: nothing comes after it.
    ///
    /// # Errors
    /// Those of the device.
    pub fn finish_backward(&mut self) -> Result<(), RuntimeError> {
        let last = self.eager.reducing.take();
        self.finalize(last)
    }

    /// The end of a runner's body: stage 1 drains the runner's own all-gathers and marks completion, stage 2
    /// drains its own reduce-scatters. It waits for nothing that the runner did not start.
    ///
    /// # Errors
    /// Those of the device.
    fn end_runner(&mut self) -> Result<(), RuntimeError> {
        let compute = self.runtime.compute().clone();
        if let Some(mut gathered) = self.graphed.gathered.take() {
            if let Some(ready) = gathered.ready.take() {
                self.runtime.wait(&compute, &ready)?;
            }
            self.graphed.gathered = Some(gathered);
        }
        if self.gather_used {
            let end = self.runtime.mark(&self.gather.clone())?;
            self.runtime.wait(&compute, &end)?;
        }
        self.runtime.complete()?;
        let last = self.graphed.reducing.take();
        self.finalize(last)?;
        if self.reduce_used {
            let end = self.runtime.mark(&self.reduce.clone())?;
            self.runtime.wait(&compute, &end)?;
        }
        Ok(())
    }

    /// Runs `body` eagerly as the discovery of a runner, and ends it in two stages.
    ///
    /// # Errors
    /// Those of `body` and of [`sessile_runtime::discover`]. What an earlier runner prefetched for this one is gone then:
    /// discover all runners anew, after [`Runtime::restart_discovery`].
    pub fn discover<H, E>(
        holder: &mut H,
        runner: &str,
        body: impl FnOnce(&mut H) -> Result<(), E>,
    ) -> Result<(), E>
    where
        H: HasRuntime<D> + AsMut<Gtp<D>>,
        E: From<RuntimeError>,
    {
        let outcome = sessile_runtime::discover(holder, runner, |holder| Self::run(holder, body));
        if outcome.is_err() {
            let gtp = holder.as_mut();
            (gtp.graphed.gathered, gtp.graphed.reducing) = (None, None);
        }
        outcome
    }

    /// Captures `body` as the graph of a runner, ended in two stages.
    ///
    /// # Errors
    /// Those of `body` and of [`sessile_runtime::capture`]. What an earlier runner prefetched for this one is kept, so
    /// that it can be captured again.
    pub fn capture<H, E>(
        holder: &mut H,
        runner: &str,
        body: impl FnOnce(&mut H) -> Result<(), E>,
    ) -> Result<(), E>
    where
        H: HasRuntime<D> + AsMut<Gtp<D>>,
        E: From<RuntimeError>,
    {
        let prefetched = holder.as_mut().graphed.gathered.as_ref().and_then(Gathered::share);
        let outcome = sessile_runtime::capture(holder, runner, |holder| Self::run(holder, body));
        if outcome.is_err() {
            let gtp = holder.as_mut();
            gtp.imports.remove(runner);
            gtp.captured_ready.remove(runner);
            gtp.graphed.gathered = prefetched;
            gtp.graphed.reducing = None;
        }
        outcome
    }

    fn run<H: AsMut<Gtp<D>>, E: From<RuntimeError>>(
        holder: &mut H,
        body: impl FnOnce(&mut H) -> Result<(), E>,
    ) -> Result<(), E> {
        let gtp = holder.as_mut();
        (gtp.gather_used, gtp.reduce_used) = (false, false);
        body(holder)?;
        Ok(holder.as_mut().end_runner()?)
    }

    /// To be called once the optimizer's work is enqueued: what was gathered before is out of date. Passes that end as
    /// they should leave nothing gathered, so this matters only after one that was given up.
    pub fn weights_changed(&mut self) {
        self.changed = true;
        self.eager.gathered = None;
        self.graphed.gathered = None;
    }

    /// Replays a runner. If the launch is not the next one of the sealed order, or the first since the weights changed,
    /// the weights that an earlier runner would have prefetched for it are gathered first.
    ///
    /// # Errors
    /// Those of [`Runtime::replay`].
    pub fn replay(&mut self, runner: &str) -> Result<Order, RuntimeError> {
        if self.changed || !self.runtime.in_order(runner)? {
            self.runtime.join()?;
            let main = self.runtime.main().clone();
            for Import { weight, view } in self.imports.get(runner).cloned().unwrap_or_default() {
                let (group, value) = {
                    let weight = &self.weights[weight.0];
                    (weight.group.clone(), weight.value.clone())
                };
                self.runtime.collective(&main, &group, Collective::AllGather, &value, &view)?;
            }
        }
        let order = self.runtime.replay(runner)?;
        self.changed = false;
        for weight in self.captured_ready.get(runner).cloned().unwrap_or_default() {
            self.became_ready(weight);
        }
        Ok(order)
    }

    fn became_ready(&mut self, weight: WeightId) {
        self.ready[weight.0] += 1;
        self.runtime.device().note(Note::Ready(&self.weights[weight.0].name));
    }
}

fn persistent<D: Device>(
    device: &D,
    label: &str,
    elements: u64,
    dtype: DType,
) -> Result<View<D::Memory>, DeviceError> {
    let memory = device.alloc(elements * dtype.size(), &sessile_plan::Domain::Default, label)?;
    View::whole(&memory, dtype)
}

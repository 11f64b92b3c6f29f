//! The stack itself on one rank.

use half::bf16;
use sessile_gtp::{ChainKind, Gtp, Pass, ReduceScatter, Repeat, WeightId, WeightSpec};
use sessile_hal::{Beta, Comm, Device, Kernel, Op, View};
use sessile_plan::DType;
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};
use sha2::{Digest, Sha256};

use super::{Comms, GROUPS, StackConfig, Variant};
use crate::{
    buffers::buffer,
    linear::{dgrad_gemm, gathered, run, wgrad_gemm},
};

/// Elements of each gradient that are digested: hashing all of large ones takes longer than all that is measured.
const DIGESTED: u64 = 1 << 18;

/// Layers, their inputs and gradients.
pub(super) struct Stack<D: Device> {
    gtp: Gtp<D>,
    variant: Variant,
    layers: Vec<Layer<D>>,
    /// Gradients between layers, in turns.
    dy: [View<D::Memory>; 2],
    tokens: u64,
    hidden: u64,
}

struct Layer<D: Device> {
    runner: String,
    weight: WeightId,
    /// What the forward had as input, bf16 `[tokens, hidden]`.
    x: View<D::Memory>,
    /// The whole weight, where it is not gathered.
    whole: Option<View<D::Memory>>,
    /// The gradient, where it is not reduced.
    dw: Option<View<D::Memory>>,
}

impl<D: Device> HasRuntime<D> for Stack<D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        self.gtp.runtime()
    }
}

impl<D: Device> AsMut<Gtp<D>> for Stack<D> {
    fn as_mut(&mut self) -> &mut Gtp<D> {
        &mut self.gtp
    }
}

impl<D: Device> Stack<D> {
    pub(super) fn new(
        device: &D,
        comms: &Comms<D>,
        config: &StackConfig,
        kind: ReduceScatter,
        variant: Variant,
    ) -> Result<Self, RuntimeError> {
        let StackConfig { hidden, tokens, .. } = *config;
        let mut runtime = Runtime::new(device.clone(), comms.world.clone())?;
        runtime.set_fencing(variant.fencing())?;
        let mut gtp = Gtp::new(runtime);
        let groups = GROUPS
            .iter()
            .zip(&comms.groups)
            .map(|(name, comm)| gtp.add_group(name, comm.clone(), kind))
            .collect::<Result<Vec<_>, _>>()?;
        let chain = if variant.is_graphed() { ChainKind::Graphed } else { ChainKind::Eager };
        let elements = hidden * tokens;
        let mut layers = Vec::new();
        // Two gradients in turns, as nothing reads them.
        let spare = [0, 1]
            .into_iter()
            .filter(|_| !variant.reduces())
            .map(|at| buffer(device, &format!("dw{at}"), hidden * hidden, config.wgrad_dtype))
            .collect::<Result<Vec<_>, _>>()?;
        for at in 0..config.layers {
            let name = format!("layer{at}");
            let weight = gtp.add_weight(&WeightSpec {
                name: &name,
                rows: hidden,
                cols: hidden,
                group: groups[at as usize % groups.len()],
                chain,
                wgrad_dtype: config.wgrad_dtype,
                experts: None,
                uses: 1,
                repeat: Repeat::Distinct,
            })?;
            let value = gtp.weight(weight).parts[0].value.clone();
            let scale = 1.0 / (hidden as f32).sqrt();
            let rank = u64::from(device.rank());
            fill(gtp.runtime(), &value, u64::from(at) << 32 | rank, scale)?;
            let x = buffer(device, &format!("x{at}"), elements, DType::Bf16)?;
            fill(gtp.runtime(), &x, 1 << 40 | u64::from(at) << 8 | rank, 1.0)?;
            let whole = match variant.gathers() {
                true => None,
                false => {
                    let whole = buffer(device, &format!("whole{at}"), hidden * hidden, DType::Bf16)?;
                    fill(gtp.runtime(), &whole, u64::from(at) << 32, scale)?;
                    Some(whole)
                }
            };
            let dw = spare.get(at as usize % 2).cloned();
            layers.push(Layer { runner: format!("{name}.backward"), weight, x, whole, dw });
        }
        let dy = [0, 1].map(|at| buffer(device, &format!("dy{at}"), elements, DType::Bf16));
        let [first, second] = dy;
        let dy = [first?, second?];
        let order: Vec<WeightId> = layers.iter().rev().map(|layer| layer.weight).collect();
        gtp.set_order(Pass::Backward, &order);
        let mut stack = Stack { gtp, variant, layers, dy, tokens, hidden };
        stack.reset(device.rank())?;
        Ok(stack)
    }

    /// The same gradients of the output again, and no gradients of weights.
    fn reset(&mut self, rank: u32) -> Result<(), RuntimeError> {
        fill(self.gtp.runtime(), &self.dy[0], 1 << 41 | u64::from(rank), 1e-3)?;
        self.gtp.begin_step()
    }

    /// Captures if there is something to capture, and makes one step from the start, whose gradients are digested.
    pub(super) fn prepare(&mut self) -> Result<String, RuntimeError> {
        let device = self.gtp.runtime_ref().device().clone();
        if self.variant.is_graphed() {
            self.pass(|stack, at| {
                let runner = stack.layers[at].runner.clone();
                Gtp::discover(stack, &runner, |stack| stack.layer(at))
            })?;
            self.gtp.runtime().join()?;
            let options = self.variant.plan_options();
            self.gtp.runtime().seal("bench", &options)?;
            self.pass(|stack, at| {
                let runner = stack.layers[at].runner.clone();
                Gtp::capture(stack, &runner, |stack| stack.layer(at))
            })?;
            self.reset(device.rank())?;
        }
        self.step()?;
        if !self.variant.reduces() {
            self.wait()?;
            return Ok(String::new());
        }
        let main = self.gtp.runtime_ref().main().clone();
        let mut hash = Sha256::new();
        for weight in self.gtp.weights() {
            for grad in weight.main_grads() {
                hash.update(device.read(&main, &grad.slice(0, grad.elements().min(DIGESTED))?)?);
            }
        }
        // Of all ranks, so that each knows of a difference on any.
        let mut all = Sha256::new();
        for digest in self.gtp.runtime_ref().world().exchange(&hash.finalize())? {
            all.update(digest);
        }
        Ok(all.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// The backward once. Does not wait for the device.
    pub(super) fn step(&mut self) -> Result<(), RuntimeError> {
        if self.variant.is_graphed() {
            self.gtp.begin_pass(Pass::Backward);
            for layer in self.layers.iter().rev() {
                self.gtp.replay(&layer.runner)?;
            }
        } else {
            self.pass(Stack::layer)?;
        }
        self.gtp.runtime().join()
    }

    /// Gives up graphs and arenas.
    pub(super) fn end(mut self) -> Result<(), RuntimeError> {
        self.wait()?;
        if self.variant.is_graphed() { self.gtp.runtime().release_plan() } else { Ok(()) }
    }

    /// Waits for all that was enqueued.
    pub(super) fn wait(&self) -> Result<(), RuntimeError> {
        let runtime = self.gtp.runtime_ref();
        Ok(runtime.device().wait_stream(runtime.main())?)
    }

    /// Bytes of buffers of collectives, and fences.
    pub(super) fn storage(&self) -> (u64, u64) {
        let runtime = self.gtp.runtime_ref();
        match runtime.plan() {
            Some(plan) => (plan.bytes(), plan.fences.len() as u64),
            None => (runtime.eager_bytes(), 0),
        }
    }

    fn pass(
        &mut self,
        mut run: impl FnMut(&mut Self, usize) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        self.gtp.begin_pass(Pass::Backward);
        for at in (0..self.layers.len()).rev() {
            run(self, at)?;
        }
        self.gtp.finish_backward()
    }

    fn layer(&mut self, at: usize) -> Result<(), RuntimeError> {
        let Stack { gtp, layers, dy, tokens, hidden, .. } = self;
        let (tokens, hidden) = (*tokens, *hidden);
        let layer = &layers[at];
        // The last layer reads the first.
        let turn = (layers.len() - 1 - at) % 2;
        let (dy, dx) = (&dy[turn], &dy[1 - turn]);
        let dgrad = dgrad_gemm(tokens, hidden, hidden, Beta::Overwrite);
        match &layer.whole {
            Some(whole) => run(gtp, dgrad, "dgrad", &[dy, whole, dx])?,
            None => gathered(gtp, layer.weight, Pass::Backward, |gtp, whole| {
                run(gtp, dgrad, "dgrad", &[dy, &whole.matrix(0)?, dx])
            })?,
        }
        let wgrad = wgrad_gemm(tokens, hidden, hidden);
        match &layer.dw {
            Some(dw) => run(gtp, wgrad, "wgrad", &[dy, &layer.x, dw]),
            None => gtp.reduce(layer.weight, |runtime, dw| {
                crate::linear::enqueue(runtime, wgrad, "wgrad", &[dy, &layer.x, &dw[0]])
            }),
        }
    }
}

/// Elements that are drawn; the rest of a buffer repeats them.
const DRAWN: u64 = 1 << 16;

/// Fills a bf16 view with normal-like values: sums of a few uniform ones.
fn fill<D: Device>(
    runtime: &mut Runtime<D>,
    view: &View<D::Memory>,
    seed: u64,
    scale: f32,
) -> Result<(), RuntimeError> {
    let mut draw = fastrand::Rng::with_seed(seed);
    let mut filled = view.elements().min(DRAWN);
    let mut bytes = Vec::new();
    for _ in 0..filled {
        let value = (0..3).map(|_| draw.f32() - 0.5).sum::<f32>() * 2.0 * scale;
        bytes.extend_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
    let main = runtime.main().clone();
    runtime.device().write(&main, &view.slice(0, filled)?, &bytes)?;
    while filled < view.elements() {
        let more = filled.min(view.elements() - filled);
        let (from, to) = (view.slice(0, more)?, view.slice(filled, more)?);
        runtime.enqueue(&main, Op::new(Kernel::Copy, "repeat", vec![from, to])?)?;
        filled += more;
    }
    Ok(())
}

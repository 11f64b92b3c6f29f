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
    /// In order of the backward.
    runners: Vec<Runner>,
    /// Gradients that no node of a graph writes.
    unwritten: Vec<View<D::Memory>>,
    /// Gradients between layers, in turns.
    dy: [View<D::Memory>; 2],
    tokens: u64,
    hidden: u64,
}

/// Layers that run as one.
#[derive(Clone)]
struct Runner {
    name: String,
    layers: Vec<usize>,
}

struct Layer<D: Device> {
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
            let whole = match variant {
                Variant::Compute => {
                    let whole = buffer(device, &format!("whole{at}"), hidden * hidden, DType::Bf16)?;
                    fill(gtp.runtime(), &whole, u64::from(at) << 32, scale)?;
                    Some(whole)
                }
                _ => None,
            };
            let dw = spare.get(at as usize % 2).cloned();
            layers.push(Layer { weight, x, whole, dw });
        }
        let dy = [0, 1].map(|at| buffer(device, &format!("dy{at}"), elements, DType::Bf16));
        let [first, second] = dy;
        let dy = [first?, second?];
        let order: Vec<WeightId> = layers.iter().rev().map(|layer| layer.weight).collect();
        gtp.set_order(Pass::Backward, &order);
        let backward = (0..layers.len()).rev();
        let runners = match variant {
            Variant::Reduce => vec![Runner { name: "backward".to_owned(), layers: backward.collect() }],
            _ => {
                backward.map(|at| Runner { name: format!("layer{at}.backward"), layers: vec![at] }).collect()
            }
        };
        let mut stack = Stack { gtp, variant, layers, runners, unwritten: Vec::new(), dy, tokens, hidden };
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
            self.pass(|stack, runner| Gtp::discover(stack, &runner.name, |stack| stack.run(runner)))?;
            self.gtp.runtime().join()?;
            let options = self.variant.plan_options();
            self.gtp.runtime().seal("bench", &options)?;
            self.pass(|stack, runner| Gtp::capture(stack, &runner.name, |stack| stack.run(runner)))?;
            for gradient in self.unwritten.drain(..) {
                zero(&device, self.gtp.runtime_ref().main(), &gradient)?;
            }
            self.reset(device.rank())?;
        }
        self.step()?;
        if !self.variant.trains() {
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
            for runner in &self.runners {
                self.gtp.replay(&runner.name)?;
            }
        } else {
            self.pass(Stack::run)?;
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
        mut run: impl FnMut(&mut Self, &Runner) -> Result<(), RuntimeError>,
    ) -> Result<(), RuntimeError> {
        self.gtp.begin_pass(Pass::Backward);
        for runner in self.runners.clone() {
            run(self, &runner)?;
        }
        self.gtp.finish_backward()
    }

    fn run(&mut self, runner: &Runner) -> Result<(), RuntimeError> {
        runner.layers.iter().try_for_each(|&at| self.layer(at))
    }

    fn layer(&mut self, at: usize) -> Result<(), RuntimeError> {
        let Stack { gtp, variant, layers, unwritten, dy, tokens, hidden, .. } = self;
        let (tokens, hidden) = (*tokens, *hidden);
        let layer = &layers[at];
        if !variant.computes() {
            gtp.reduce(layer.weight, |runtime, dw| {
                // Written once, before the graph runs, as it is not to be timed.
                if runtime.is_capturing() {
                    unwritten.push(dw[0].clone());
                    return Ok(());
                }
                zero(runtime.device(), runtime.compute(), &dw[0])
            })?;
            // So that it ends with its addition before the next one starts.
            return gtp.drain(ChainKind::Graphed);
        }
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

/// By the device alone: the runtime would miss in the capture what it noted in the discovery.
fn zero<D: Device>(device: &D, stream: &D::Stream, view: &View<D::Memory>) -> Result<(), RuntimeError> {
    device.enqueue(stream, Op::new(Kernel::Fill { value: 0.0 }, "zero", vec![view.clone()])?)?;
    Ok(())
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

#[cfg(test)]
mod tests {
    use sessile_gtp::RankLayout;
    use sessile_host::{CostModel, Data, World, WorldOptions};

    use super::*;

    /// On the virtual clock: a reduce-scatter, a pause of no length, its addition, the next one.
    #[test]
    fn reduce_scatters_alone_wait_for_the_addition_of_the_one_before() {
        let config =
            StackConfig { layers: 4, hidden: 64, tokens: 8, wgrad_dtype: DType::Bf16, steps: 1, rounds: 1 };
        let works = [(ReduceScatter::Ring, 2), (ReduceScatter::Fp32A2a, 3), (ReduceScatter::OneShot, 1)];
        for (kind, works) in works {
            let world = World::new(WorldOptions::simulated(2, CostModel::default(), Data::ShapeOnly));
            let results = world.run(|device| {
                let layout = RankLayout::new(2, 2).expect("divides");
                let comms = Comms::make(&device, &[layout])?;
                let mut stack = Stack::new(&device, &comms, &config, kind, Variant::Reduce)?;
                assert_eq!(stack.prepare()?, "", "no gradients to compare");
                device.take_spans();
                stack.step()?;
                stack.wait()?;
                let spans = device.take_spans();
                stack.end()?;
                Ok::<_, RuntimeError>(spans)
            });
            for spans in results {
                let spans = spans.expect("runs");
                assert_eq!(spans.len(), 4 * works, "{kind}: {spans:?}");
                for pair in spans.windows(2) {
                    assert_eq!(pair[0].end, pair[1].begin, "{kind}: {spans:?}");
                }
            }
        }
    }
}

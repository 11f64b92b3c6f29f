//! What each simulated rank runs: one backward, the sums over replicas, the optimizer. The same storage runtime and the same
//! sharded weights as a training run, on memory without data.

use std::collections::BTreeSet;

use sessile_gtp::{ChainKind, GroupId, Gtp, Pass, Repeat, WeightId, WeightSpec};
use sessile_hal::{AdamW, Beta, Collective, Device, Kernel, Transfer, View};
use sessile_plan::DType;
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};

use super::{config::SimulateConfig, shapes::GroupShape};
use crate::{
    buffers::buffer,
    config::GraphScope,
    linear::{dgrad_gemm, enqueue, run, wgrad_gemm},
};

/// One use of a weight in the backward.
struct Use {
    weight: WeightId,
    tokens: u64,
}

/// What one runner does.
struct Unit {
    name: String,
    uses: Vec<Use>,
}

/// Memory of the optimizer, and of everything its replicas sum.
struct State<D: Device> {
    main_grad: View<D::Memory>,
    value: View<D::Memory>,
    master: View<D::Memory>,
    moments: [View<D::Memory>; 2],
}

/// One rank.
pub(super) struct Program<D: Device> {
    gtp: Gtp<D>,
    units: Vec<Unit>,
    replicas: Vec<(GroupId, String)>,
    states: Vec<(GroupId, State<D>)>,
    /// Stand for activations, their gradients, and whole weights where none are gathered.
    scratch: [View<D::Memory>; 4],
    with_gathered: bool,
}

impl<D: Device> HasRuntime<D> for Program<D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        self.gtp.runtime()
    }
}

impl<D: Device> AsMut<Gtp<D>> for Program<D> {
    fn as_mut(&mut self) -> &mut Gtp<D> {
        &mut self.gtp
    }
}

/// A group's part that `rank` is in, its members, and the ranks with equal shards.
///
/// ```text
///  size 2, stride 2, 8 ranks    rank      0 1 2 3 | 4 5 6 7
///                               group     0 1 0 1 | 2 3 2 3      {0,2} {1,3} {4,6} {5,7}
///                               replicas  0 1 2 3 | 0 1 2 3      {0,4} {1,5} {2,6} {3,7}
/// ```
fn members(group: &GroupShape, rank: u32, ranks: u32) -> (u32, Vec<u32>, Vec<u32>) {
    let GroupShape { size, stride, .. } = *group;
    let span = size * stride;
    let (block, within) = (rank / span, rank % span);
    let first = block * span + within % stride;
    let peers = (0..size).map(|at| first + at * stride).collect();
    let replicas = (0..ranks / span).map(|at| at * span + within).collect();
    (block * stride + within % stride, peers, replicas)
}

impl<D: Device> Program<D> {
    /// Builds a rank. Collective.
    ///
    /// # Errors
    /// Those of the device.
    pub(super) fn new(config: &SimulateConfig, device: &D) -> Result<Self, RuntimeError> {
        let rank = device.rank();
        let everyone: Vec<u32> = (0..config.ranks).collect();
        let world = device.communicator("world", &everyone)?;
        let mut gtp = Gtp::new(Runtime::new(device.clone(), world)?);
        let mut groups = Vec::new();
        let mut replicas = Vec::new();
        for shape in &config.model.groups {
            let (part, peers, equals) = members(shape, rank, config.ranks);
            let comm = device.communicator(&format!("{}.{part}", shape.name), &peers)?;
            let kind = config.kind(shape).expect("SimulateConfig::check was called").kind;
            let group = gtp.add_group(&shape.name, comm, kind)?;
            let name = format!("{} replicas", shape.name);
            let within = rank % (shape.size * shape.stride);
            let comm = device.communicator(&format!("{name}.{within}"), &equals)?;
            gtp.runtime().add_group(&name, comm);
            groups.push(group);
            if equals.len() > 1 {
                replicas.push((group, name));
            }
        }
        let mut built =
            Builder { config, groups: &groups, units: Vec::new(), order: Vec::new(), extents: [1; 4] };
        for (layer, shape) in config.model.named_layers() {
            built.layer(&mut gtp, &layer, shape)?;
        }
        let Builder { units, order, extents, .. } = built;
        gtp.set_order(Pass::Backward, &order);
        let labels = ["dy", "x", "dx", "weight"];
        let scratch = [0, 1, 2, 3].map(|at| buffer(device, labels[at], extents[at], DType::Bf16));
        let [dy, x, dx, weight] = scratch;
        let (dy, x, dx, weight) = (dy?, x?, dx?, weight?);
        let states = states(&gtp, device)?;
        // What is read before the program writes it has come from elsewhere: a forward, a checkpoint.
        let given = states.iter().flat_map(|(_, state)| {
            let [m, v] = &state.moments;
            [&state.value, &state.master, m, v]
        });
        for view in [&dy, &x, &weight].into_iter().chain(given) {
            run(&mut gtp, Kernel::Fill { value: 0.0 }, "given", &[view])?;
        }
        let with_gathered = config.with_gathered;
        Ok(Program { gtp, units, replicas, states, scratch: [dy, x, dx, weight], with_gathered })
    }

    pub(super) fn gtp(&self) -> &Gtp<D> {
        &self.gtp
    }

    /// Zeroes what the backward adds into.
    pub(super) fn begin_step(&mut self) -> Result<(), RuntimeError> {
        self.gtp.begin_step()?;
        self.gtp.begin_pass(Pass::Backward);
        Ok(())
    }

    /// The backward, eagerly, noting what it asks for.
    pub(super) fn discover(&mut self) -> Result<(), RuntimeError> {
        for at in 0..self.units.len() {
            let name = self.units[at].name.clone();
            Gtp::discover(self, &name, |program| program.body(at))?;
        }
        self.gtp.runtime().join()
    }

    /// Captures every runner.
    pub(super) fn capture(&mut self) -> Result<(), RuntimeError> {
        self.gtp.begin_pass(Pass::Backward);
        let mut captured = BTreeSet::new();
        for at in 0..self.units.len() {
            let name = self.units[at].name.clone();
            if captured.insert(name.clone()) {
                Gtp::capture(self, &name, |program| program.body(at))?;
            }
        }
        Ok(())
    }

    /// The backward, from its graphs, to the end of what it started.
    pub(super) fn replay(&mut self) -> Result<(), RuntimeError> {
        for at in 0..self.units.len() {
            let name = self.units[at].name.clone();
            self.gtp.replay(&name)?;
        }
        self.gtp.runtime().join()?;
        self.gtp.finish_step()
    }

    /// Sums gradients over replicas: one batch a group.
    pub(super) fn sync(&mut self) -> Result<(), RuntimeError> {
        for (group, name) in self.replicas.clone() {
            let grads = self.states.iter().filter(|(of, _)| *of == group).map(|(_, state)| &state.main_grad);
            let batch: Vec<_> =
                grads.map(|grad| Transfer { send: grad.clone(), recv: grad.clone() }).collect();
            let main = self.gtp.runtime_ref().main().clone();
            self.gtp.runtime().collective_batch(&main, &name, Collective::AllReduce, &batch)?;
        }
        Ok(())
    }

    /// Steps the optimizer.
    pub(super) fn optimize(&mut self) -> Result<(), RuntimeError> {
        let settings = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 1 };
        for (_, state) in &self.states {
            let State { main_grad, value, master, moments: [m, v] } = state;
            run(&mut self.gtp, Kernel::AdamW(settings), "adamw", &[main_grad, master, m, v, value])?;
        }
        self.gtp.weights_changed();
        Ok(())
    }

    fn body(&mut self, unit: usize) -> Result<(), RuntimeError> {
        let Program { gtp, units, scratch: [dy, x, dx, stand_in], with_gathered, .. } = self;
        for Use { weight, tokens } in &units[unit].uses {
            let (weight, tokens) = (*weight, *tokens);
            let of = gtp.weight(weight);
            let (rows, cols, name) = (of.shard.rows, of.shard.cols, of.name.clone());
            let parts: Vec<u64> = (0..of.parts.len() as u64).collect();
            let part = |view: &View<D::Memory>, at: u64, elements: u64| view.slice(at * elements, elements);
            let gathered = if *with_gathered { Some(gtp.materialize(weight, Pass::Backward)?) } else { None };
            for (&at, index) in parts.iter().zip(0..) {
                let whole = match &gathered {
                    Some(gathered) => gathered.matrix(index)?,
                    None => part(stand_in, at, rows * cols)?,
                };
                let (dy, dx) = (part(dy, at, tokens * rows)?, part(dx, at, tokens * cols)?);
                let gemm = dgrad_gemm(tokens, rows, cols, Beta::Overwrite);
                run(gtp, gemm, &format!("{name} dgrad"), &[&dy, &whole, &dx])?;
            }
            if let Some(gathered) = gathered {
                gtp.release(gathered)?;
            }
            gtp.reduce(weight, |runtime, dw| {
                for (&at, dw) in parts.iter().zip(dw) {
                    let (dy, x) = (part(dy, at, tokens * rows)?, part(x, at, tokens * cols)?);
                    let gemm = wgrad_gemm(tokens, rows, cols);
                    enqueue(runtime, gemm, &format!("{name} wgrad"), &[&dy, &x, dw])?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Adds weights layer by layer.
struct Builder<'a> {
    config: &'a SimulateConfig,
    groups: &'a [GroupId],
    units: Vec<Unit>,
    order: Vec<WeightId>,
    /// Most elements of dy, x, dx and a whole weight.
    extents: [u64; 4],
}

impl Builder<'_> {
    fn layer<D: Device>(
        &mut self,
        gtp: &mut Gtp<D>,
        layer: &str,
        shape: &super::shapes::LayerShape,
    ) -> Result<(), RuntimeError> {
        let config = self.config;
        if config.scope == GraphScope::Layer {
            self.units.push(Unit { name: format!("{layer}.backward"), uses: Vec::new() });
        }
        for module in &shape.modules {
            let module_name = format!("{layer}.{}", module.name);
            if config.scope == GraphScope::Module {
                self.units.push(Unit { name: format!("{module_name}.backward"), uses: Vec::new() });
            }
            for shape in &module.weights {
                let at = config.model.group_of(shape).expect("ModelShape::check was called");
                let weight = gtp.add_weight(&WeightSpec {
                    name: &format!("{module_name}.{}", shape.name),
                    rows: shape.rows,
                    cols: shape.cols,
                    group: self.groups[at],
                    chain: ChainKind::Graphed,
                    wgrad_dtype: config.dtype(shape),
                    experts: shape.experts,
                    uses: shape.uses,
                    repeat: Repeat::Drain,
                })?;
                let tokens = config.tokens(shape);
                let parts = u64::from(shape.experts.unwrap_or(1));
                let most =
                    [tokens * shape.rows, tokens * shape.cols, tokens * shape.cols, shape.rows * shape.cols];
                for (extent, needed) in self.extents.iter_mut().zip(most) {
                    *extent = needed.saturating_mul(parts).max(*extent);
                }
                for _ in 0..shape.uses {
                    self.order.push(weight);
                    if let Some(unit) = self.units.last_mut() {
                        unit.uses.push(Use { weight, tokens });
                    }
                }
            }
        }
        Ok(())
    }
}

fn states<D: Device>(gtp: &Gtp<D>, device: &D) -> Result<Vec<(GroupId, State<D>)>, RuntimeError> {
    let mut states = Vec::new();
    for weight in gtp.weights() {
        for part in &weight.parts {
            let new = |what: &str| {
                let elements = part.main_grad.elements();
                buffer(device, &format!("{} {what}", part.name), elements, DType::F32)
            };
            let state = State {
                main_grad: part.main_grad.clone(),
                value: part.value.clone(),
                master: new("master")?,
                moments: [new("m")?, new("v")?],
            };
            states.push((weight.group, state));
        }
    }
    Ok(states)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_stride_and_replicas_follow_block_by_block() {
        let group = GroupShape { name: "dense".into(), size: 2, stride: 2 };
        assert_eq!(members(&group, 5, 8), (3, vec![5, 7], vec![1, 5]));
        assert_eq!(members(&group, 0, 8), (0, vec![0, 2], vec![0, 4]));
        let parts: Vec<u32> = (0..8).map(|rank| members(&group, rank, 8).0).collect();
        assert_eq!(parts, [0, 1, 0, 1, 2, 3, 2, 3]);
    }
}

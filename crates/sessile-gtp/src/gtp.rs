//! Sharded weights of one rank.

use std::collections::BTreeMap;

use sessile_hal::{Comm, Device, DeviceError, Kernel, Note, Op, View};
use sessile_plan::{DType, Domain};
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};

use crate::{
    ChainKind, Group, GroupId, Part, Pass, ReduceScatter, Shard, Weight, WeightId, WeightSpec,
    chain::{Chain, Order},
    runner::{Captured, Import},
};

/// Sharded weights of one rank, over its storage runtime.
///
/// ```text
///  add_group*  add_weight*  set_order    then, a step:
///  begin_step ─▶ begin_pass, materialize.. release ─▶ begin_pass, materialize.. release, reduce ─▶ finish_backward
///             ─▶ Runtime::join ─▶ finish_step ─▶ the optimizer ─▶ weights_changed
/// ```
///
/// Inside [`Gtp::discover`] and [`Gtp::capture`] the same calls make a runner.
pub struct Gtp<D: Device> {
    pub(crate) runtime: Runtime<D>,
    pub(crate) groups: Vec<Group<D>>,
    pub(crate) weights: Vec<Weight<D>>,
    pub(crate) eager: Chain<D>,
    pub(crate) graphed: Chain<D>,
    /// By the runner that finds them.
    pub(crate) imports: BTreeMap<String, Vec<Import<D>>>,
    /// By runner.
    pub(crate) captured: BTreeMap<String, Captured>,
    pub(crate) ready: Vec<u64>,
    /// Uses in the local sums of this step, by weight.
    pub(crate) local: Vec<u64>,
    /// Whether weights changed since the last launch.
    pub(crate) changed: bool,
}

impl<D: Device> HasRuntime<D> for Gtp<D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        &mut self.runtime
    }
}

impl<D: Device> AsMut<Gtp<D>> for Gtp<D> {
    fn as_mut(&mut self) -> &mut Gtp<D> {
        self
    }
}

impl<D: Device> Gtp<D> {
    /// No weights yet, over a runtime.
    pub fn new(runtime: Runtime<D>) -> Self {
        Gtp {
            runtime,
            groups: Vec::new(),
            weights: Vec::new(),
            eager: Chain::new(),
            graphed: Chain::new(),
            imports: BTreeMap::new(),
            captured: BTreeMap::new(),
            ready: Vec::new(),
            local: Vec::new(),
            changed: false,
        }
    }

    /// The runtime.
    pub fn runtime_ref(&self) -> &Runtime<D> {
        &self.runtime
    }

    /// Adds a group that weights can be sharded over. Its gathers and reduce-scatters have streams of their own, so groups
    /// never wait for each other.
    ///
    /// # Errors
    /// Those of the device.
    pub fn add_group(
        &mut self,
        name: &str,
        comm: D::Comm,
        kind: ReduceScatter,
    ) -> Result<GroupId, RuntimeError> {
        let device = self.runtime.device();
        let gather = device.stream(&format!("gather {name}"))?;
        let reduce = device.stream(&format!("reduce {name}"))?;
        let size = comm.size();
        self.runtime.add_group(name, comm);
        self.groups.push(Group {
            name: name.to_owned(),
            size,
            kind,
            gather,
            reduce,
            gather_used: false,
            reduce_used: false,
        });
        Ok(GroupId(self.groups.len() - 1))
    }

    /// Adds a weight. Its values hold nothing until they are written.
    ///
    /// # Errors
    /// Those of the device.
    pub fn add_weight(&mut self, spec: &WeightSpec<'_>) -> Result<WeightId, RuntimeError> {
        let id = WeightId(self.weights.len());
        let parts = u64::from(self.groups[spec.group.0].size);
        let shard = Shard { rows: spec.rows, cols: spec.cols, parts };
        let mut weight = Weight {
            name: spec.name.to_owned(),
            shard,
            group: spec.group,
            chain: spec.chain,
            wgrad_dtype: spec.wgrad_dtype,
            uses: spec.uses,
            repeat: spec.repeat,
            parts: Vec::new(),
        };
        let experts: Vec<Option<u32>> = match spec.experts {
            None => vec![None],
            Some(experts) => (0..experts.max(1)).map(Some).collect(),
        };
        let device = self.runtime.device();
        for expert in experts {
            let name = match expert {
                None => spec.name.to_owned(),
                Some(expert) => format!("{}.{expert}", spec.name),
            };
            let new =
                |what: &str, elements, dtype| persistent(device, &format!("{name} {what}"), elements, dtype);
            let value = new("shard", shard.shard_elements(), DType::Bf16)?;
            let main_grad = new("main_grad", shard.shard_elements(), DType::F32)?;
            device.note(Note::Accumulator(main_grad.memory()));
            let sum = match weight.reduces_once() {
                true => Some(new("local sum", shard.padded_elements(), DType::F32)?),
                false => None,
            };
            if let Some(sum) = &sum {
                let zero = Op::new(Kernel::Fill { value: 0.0 }, "zero local sum", vec![sum.clone()])?;
                device.enqueue(self.runtime.main(), zero)?;
            }
            weight.parts.push(Part { name, expert, value, main_grad, sum });
        }
        self.weights.push(weight);
        self.ready.push(0);
        self.local.push(0);
        Ok(id)
    }

    /// Sets the order in which a pass materializes weights, of both chains together; a weight that is used more than once
    /// appears as often. What comes next in a weight's own chain is gathered ahead.
    pub fn set_order(&mut self, pass: Pass, uses: &[WeightId]) {
        for kind in [ChainKind::Eager, ChainKind::Graphed] {
            let own = uses.iter().copied().filter(|weight| self.weights[weight.0].chain == kind).collect();
            *self.chain(kind).order(pass) = Order::new(own);
        }
    }

    /// Says that a pass begins at the start of its order.
    pub fn begin_pass(&mut self, pass: Pass) {
        for kind in [ChainKind::Eager, ChainKind::Graphed] {
            self.chain(kind).order(pass).restart();
        }
    }

    /// A weight.
    pub fn weight(&self, id: WeightId) -> &Weight<D> {
        &self.weights[id.0]
    }

    /// All weights, in the order they were added.
    pub fn weights(&self) -> &[Weight<D>] {
        &self.weights
    }

    /// A group.
    pub fn group(&self, id: GroupId) -> &Group<D> {
        &self.groups[id.0]
    }

    /// All groups, in the order they were added.
    pub fn groups(&self) -> &[Group<D>] {
        &self.groups
    }

    /// How often each weight's gradient became ready, in the order the weights were added.
    pub fn ready(&self) -> &[u64] {
        &self.ready
    }

    pub(crate) fn chain(&mut self, kind: ChainKind) -> &mut Chain<D> {
        match kind {
            ChainKind::Eager => &mut self.eager,
            ChainKind::Graphed => &mut self.graphed,
        }
    }

    pub(crate) fn group_of(&self, weight: WeightId) -> &Group<D> {
        &self.groups[self.weights[weight.0].group.0]
    }

    pub(crate) fn group_of_mut(&mut self, weight: WeightId) -> &mut Group<D> {
        &mut self.groups[self.weights[weight.0].group.0]
    }
}

fn persistent<D: Device>(
    device: &D,
    label: &str,
    elements: u64,
    dtype: DType,
) -> Result<View<D::Memory>, DeviceError> {
    let memory = device.alloc(elements * dtype.size(), &Domain::Default, label)?;
    View::whole(&memory, dtype)
}

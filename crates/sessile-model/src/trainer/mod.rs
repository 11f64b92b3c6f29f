//! One rank of a training run: parameters, a step, and the switch from eager to graphs.

mod runners;
mod step;

use sessile_gtp::{Gtp, Pass};
use sessile_hal::{Comm, Device, View};
use sessile_plan::DType;
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};

use crate::{
    buffers::{Activations, activations, buffer},
    config::{ConfigError, DENSE, EXPERT, TrainConfig},
    data::Sampler,
    module::{Extents, Norm},
    network::{Network, build},
    optimizer::{Optimizer, Replicas},
    unit::{Unit, units},
};

/// How runners execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// Eagerly, and nothing is noted.
    Eager,
    /// Eagerly, noting what runners ask for.
    Discover,
    /// From their graphs.
    Replay,
}

/// One rank of a run.
pub struct Trainer<'a, D: Device> {
    config: &'a TrainConfig,
    gtp: Gtp<D>,
    replicas: Replicas<D>,
    network: Network,
    units: Vec<Unit>,
    graphed: bool,
    norms: Vec<Norm<D>>,
    optimizer: Optimizer<D>,
    /// One for each sequence length.
    shapes: Vec<Extents>,
    /// By sequence length, and micro-batch in flight.
    acts: Vec<Vec<Activations<D>>>,
    /// By micro-batch, u32 `[longest]`.
    tokens: Vec<View<D::Memory>>,
    /// By micro-batch and prediction.
    targets: Vec<Vec<View<D::Memory>>>,
    /// f32 `[microbatches, predictions]`.
    losses: View<D::Memory>,
    sampler: Sampler<'a>,
    step: u32,
    /// Sequence length of this step, as an index.
    shape: usize,
}

impl<D: Device> HasRuntime<D> for Trainer<'_, D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        self.gtp.runtime()
    }
}

impl<D: Device> AsMut<Gtp<D>> for Trainer<'_, D> {
    fn as_mut(&mut self) -> &mut Gtp<D> {
        &mut self.gtp
    }
}

impl<'a, D: Device> Trainer<'a, D> {
    /// Builds the model on this rank's device. Collective. `graphed` says whether runners will be captured.
    ///
    /// # Errors
    /// Those of the device.
    ///
    /// # Panics
    /// If [`TrainConfig::check`] refuses the configuration.
    pub fn new(
        config: &'a TrainConfig,
        device: D,
        text: &'a [u8],
        graphed: bool,
    ) -> Result<Self, RuntimeError> {
        let rank = device.rank();
        let everyone: Vec<u32> = (0..config.ranks).collect();
        let world = device.communicator("world", &everyone)?;
        let mut gtp = Gtp::new(Runtime::new(device.clone(), world)?);
        let groups = Groups::make(config, &device, &mut gtp)?;
        let network = build(config, &mut gtp, (groups.dense, groups.expert), graphed)?;
        let shapes: Vec<_> = config.seq.iter().map(|&seq| Extents::new(config, seq)).collect();
        let slots = (0..config.microbatches_in_flight)
            .map(|slot| activations(&device, &shapes, &network.modules, network.predicts_from.len(), slot))
            .collect::<Result<Vec<_>, _>>()?;
        let new = |label: String, elements, dtype| buffer(&device, &label, elements, dtype);
        let norms = (0..network.norms)
            .map(|at| {
                Ok(Norm {
                    value: new(format!("norm{at}"), config.hidden, DType::F32)?,
                    main_grad: new(format!("norm{at} main_grad"), config.hidden, DType::F32)?,
                })
            })
            .collect::<Result<Vec<_>, RuntimeError>>()?;
        let longest = config.longest() * config.batch;
        let predictions = network.predicts_from.len() as u64;
        let ids = |what: &str, mb: u32| new(format!("{what} {mb}"), longest, DType::U32);
        let tokens = (0..config.microbatches).map(|mb| ids("tokens", mb)).collect::<Result<Vec<_>, _>>()?;
        let targets = (0..config.microbatches)
            .map(|mb| (0..predictions).map(|at| ids(&format!("targets {at} of"), mb)).collect())
            .collect::<Result<Vec<_>, _>>()?;
        let optimizer = Optimizer::new(&gtp, norms.len(), config.hidden)?;
        optimizer.initialize(config, &gtp, &norms)?;
        Ok(Trainer {
            config,
            replicas: groups.replicas,
            units: units(config, &network.modules, graphed),
            graphed,
            network,
            norms,
            optimizer,
            shapes,
            acts: by_shape(slots),
            tokens,
            targets,
            losses: new("losses".into(), u64::from(config.microbatches) * predictions, DType::F32)?,
            sampler: Sampler::new(text, config.seed, rank.into()),
            gtp,
            step: 0,
            shape: 0,
        })
    }

    /// The sharded weights.
    pub fn gtp(&self) -> &Gtp<D> {
        &self.gtp
    }

    /// The storage runtime.
    pub fn runtime_mut(&mut self) -> &mut Runtime<D> {
        self.gtp.runtime()
    }

    /// Units (modules or layers) in the order in which a pass runs them.
    pub fn unit_order(&self, pass: Pass) -> Vec<usize> {
        let forward = 0..self.units.len();
        match pass {
            Pass::Forward => forward.collect(),
            Pass::Backward => forward.rev().collect(),
        }
    }
}

/// From slots that hold each shape to shapes that hold each slot.
fn by_shape<T>(slots: Vec<Vec<T>>) -> Vec<Vec<T>> {
    let mut shapes: Vec<Vec<T>> = Vec::new();
    for slot in slots {
        for (at, of_shape) in slot.into_iter().enumerate() {
            if at == shapes.len() {
                shapes.push(Vec::new());
            }
            shapes[at].push(of_shape);
        }
    }
    shapes
}

/// The groups that weights are sharded over, and those of equal shards.
struct Groups<D: Device> {
    dense: sessile_gtp::GroupId,
    expert: Option<sessile_gtp::GroupId>,
    replicas: Replicas<D>,
}

impl<D: Device> Groups<D> {
    fn make(config: &TrainConfig, device: &D, gtp: &mut Gtp<D>) -> Result<Self, RuntimeError> {
        const CHECKED: &str = "TrainConfig::check was called";
        let registers = device.limits().window_align > 0;
        let rank = device.rank();
        let mut make = |name: &str, layout: Result<sessile_gtp::RankLayout, ConfigError>, kind| {
            let layout = layout.expect(CHECKED);
            let choice: Result<sessile_gtp::Choice, ConfigError> = kind;
            let group =
                device.communicator(&format!("{name}.{}", layout.group_of(rank)), &layout.group(rank))?;
            let part = group.rank();
            let id = gtp.add_group(name, group, choice.expect(CHECKED).kind)?;
            let replicas = format!("{name} replicas.{part}");
            let replicas = device.communicator(&replicas, &layout.replica_group(rank))?;
            Ok::<_, RuntimeError>((id, replicas))
        };
        let (dense, dense_replicas) = make(DENSE, config.dense_layout(), config.dense_kind(registers))?;
        let mut replicas = vec![dense_replicas];
        let mut expert = None;
        if config.experts > 0 {
            let (id, comm) = make(EXPERT, config.expert_layout(), config.expert_kind(registers))?;
            expert = Some(id);
            replicas.push(comm);
        }
        Ok(Groups { dense, expert, replicas: Replicas(replicas) })
    }
}

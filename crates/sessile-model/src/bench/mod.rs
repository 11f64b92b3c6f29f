//! What graphs and overlap are worth: the backward of a stack of linear layers with sharded weights, executed in several
//! ways from the same inputs.
//!
//! | variant | execution | reduce-scatters |
//! |---|---|---|
//! | `eager` | op by op | run beside compute |
//! | `serial` | a graph a layer | each ends before the next graph starts |
//! | `depth_1` | a graph a layer | planned at depth 1, which makes launches serial |
//! | `depth_2` | a graph a layer | run on into the next graphs |
//! | `depth_2_borders` | a graph a layer | as `depth_2`, and a graph waits for its fences, if any, before it starts |
//! | `no_reduce` | as `serial` | none: gradients stay where they are written |
//! | `compute` | as `serial` | none, and weights are whole: no collective at all |
//! | `reduce` | one graph | one after the other, each with its addition; nothing else runs |
//!
//! `no_reduce`, `compute` and `reduce` compute no sharded gradient; they are what the others are measured against, and what the
//! cost model predicts them from ([`Apart`]).

mod costs;
mod prediction;
mod stack;

use std::time::{Duration, Instant};

use serde::Serialize;
use sessile_gtp::{RankLayout, ReduceScatter};
use sessile_hal::Device;
use sessile_plan::{DType, LaunchOrder, PlanOptions};
use sessile_runtime::{Fencing, RuntimeError};

pub use self::costs::{HostCosts, host_costs};
pub use self::prediction::{Apart, FITS, Prediction};
use self::stack::Stack;

/// Sizes of the stack.
#[derive(Clone, Debug)]
pub struct StackConfig {
    /// Layers.
    pub layers: u32,
    /// Rows and columns of each weight.
    pub hidden: u64,
    /// Tokens of each rank.
    pub tokens: u64,
    /// Dtype of gradients on the wire.
    pub wgrad_dtype: DType,
    /// Steps of a round, between two waits of the host.
    pub steps: u32,
    /// Rounds that are timed, after one that is not.
    pub rounds: u32,
}

/// A way to execute the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Variant {
    /// Op by op.
    Eager,
    /// Graphs, one after the other.
    Serial,
    /// Graphs planned at depth 1.
    #[serde(rename = "depth_1")]
    Depth1,
    /// Graphs whose reduce-scatters run on.
    #[serde(rename = "depth_2")]
    Depth2,
    /// The same, with fences at the borders of graphs.
    #[serde(rename = "depth_2_borders")]
    Depth2Borders,
    /// Graphs without reduce-scatters.
    NoReduce,
    /// Graphs without collectives.
    Compute,
    /// Reduce-scatters alone.
    Reduce,
}

impl Variant {
    /// All of them, in the order in which they run.
    pub const ALL: [Variant; 8] = [
        Variant::Compute,
        Variant::Reduce,
        Variant::NoReduce,
        Variant::Eager,
        Variant::Serial,
        Variant::Depth1,
        Variant::Depth2,
        Variant::Depth2Borders,
    ];

    /// Its name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Eager => "eager",
            Variant::Serial => "serial",
            Variant::Depth1 => "depth_1",
            Variant::Depth2 => "depth_2",
            Variant::Depth2Borders => "depth_2_borders",
            Variant::NoReduce => "no_reduce",
            Variant::Compute => "compute",
            Variant::Reduce => "reduce",
        }
    }

    fn is_graphed(self) -> bool {
        self != Variant::Eager
    }

    fn computes(self) -> bool {
        self != Variant::Reduce
    }

    fn reduces(self) -> bool {
        !matches!(self, Variant::Compute | Variant::NoReduce)
    }

    /// Whether it ends with gradients.
    fn trains(self) -> bool {
        self.computes() && self.reduces()
    }

    fn fencing(self) -> Fencing {
        if self == Variant::Depth2Borders { Fencing::Borders } else { Fencing::Inside }
    }

    fn plan_options(self) -> PlanOptions {
        let depth = if self == Variant::Depth1 { 1 } else { 2 };
        let overlapped = matches!(self, Variant::Depth1 | Variant::Depth2 | Variant::Depth2Borders);
        let launch_order = if overlapped { LaunchOrder::Overlapped } else { LaunchOrder::Serial };
        PlanOptions { depth, launch_order, ..PlanOptions::default() }
    }
}

/// What one variant took on this rank.
#[derive(Clone, Debug, Serialize)]
pub struct Timing {
    /// Which.
    pub variant: Variant,
    /// Nanoseconds of a step: median over rounds.
    pub step_ns: u64,
    /// The quickest round.
    pub least_ns: u64,
    /// The slowest.
    pub most_ns: u64,
    /// Nanoseconds that the host spent in one replay, or in one layer's calls if eager: median over rounds.
    pub host_ns: u64,
    /// Bytes of arenas; of eager pools if eager.
    pub buffer_bytes: u64,
    /// Fences of the plan.
    pub fences: u64,
    /// Digest of the gradients of all ranks after one step, of long ones their beginning; empty if there are none.
    pub digest: String,
}

/// The communicators that all measurements share: they are slow to make.
pub struct Comms<D: Device> {
    world: D::Comm,
    /// Layers take the groups in turns.
    groups: Vec<D::Comm>,
}

/// Names of groups, of dense weights and of experts.
const GROUPS: [&str; 2] = ["dense", "expert"];

impl<D: Device> Comms<D> {
    /// Makes them: that of the job, and one for each layout, at most two. Collective over the job.
    ///
    /// # Errors
    /// Those of the device.
    pub fn make(device: &D, layouts: &[RankLayout]) -> Result<Self, RuntimeError> {
        let everyone: Vec<u32> = (0..device.world_size()).collect();
        let world = device.communicator("world", &everyone)?;
        let groups = GROUPS.iter().zip(layouts).map(|(name, layout)| {
            let rank = device.rank();
            device.communicator(&format!("{name}.{}", layout.group_of(rank)), &layout.group(rank))
        });
        Ok(Comms { world, groups: groups.collect::<Result<_, _>>()? })
    }

    /// That of the job.
    pub fn world(&self) -> &D::Comm {
        &self.world
    }
}

/// Runs variants on this rank, a round of each in turn, so that a change of the device's clocks meets all of them. Collective
/// over the job. Each is a program of its own, with a plan that is sealed while others get ready: a log of more than one has
/// allocations after a seal.
///
/// # Errors
/// Those of the runtime.
pub fn bench_stack<D: Device>(
    device: &D,
    comms: &Comms<D>,
    config: &StackConfig,
    kind: ReduceScatter,
    variants: &[Variant],
    observe: &dyn Fn(Variant),
) -> Result<Vec<Timing>, RuntimeError> {
    let mut timed = Vec::new();
    for &variant in variants {
        observe(variant);
        timed.push(Timed::new(Stack::new(device, comms, config, kind, variant)?, variant)?);
    }
    // The first one is not counted.
    for round in 0..=config.rounds {
        for timed in &mut timed {
            timed.round(config, round > 0)?;
        }
    }
    timed.into_iter().map(Timed::end).collect()
}

/// A variant, ready to run, and what its rounds took.
struct Timed<D: Device> {
    stack: Stack<D>,
    variant: Variant,
    digest: String,
    /// Nanoseconds of a step, and of the host in a replay.
    rounds: Vec<u64>,
    hosts: Vec<u64>,
}

impl<D: Device> Timed<D> {
    fn new(mut stack: Stack<D>, variant: Variant) -> Result<Self, RuntimeError> {
        let digest = stack.prepare()?;
        Ok(Timed { stack, variant, digest, rounds: Vec::new(), hosts: Vec::new() })
    }

    fn round(&mut self, config: &StackConfig, counts: bool) -> Result<(), RuntimeError> {
        self.stack.wait()?;
        let begin = Instant::now();
        let mut host = Duration::ZERO;
        for step in 0..config.steps {
            let launched = Instant::now();
            self.stack.step()?;
            // Later steps may wait for room in the device's queues.
            if step == 0 {
                host = launched.elapsed();
            }
        }
        self.stack.wait()?;
        if counts {
            self.rounds.push(nanoseconds(begin.elapsed()) / u64::from(config.steps));
            self.hosts.push(nanoseconds(host) / u64::from(config.layers));
        }
        Ok(())
    }

    fn end(mut self) -> Result<Timing, RuntimeError> {
        self.rounds.sort_unstable();
        self.hosts.sort_unstable();
        let (buffer_bytes, fences) = self.stack.storage();
        let Timed { stack, variant, digest, rounds, hosts } = self;
        stack.end()?;
        Ok(Timing {
            variant,
            step_ns: rounds[rounds.len() / 2],
            least_ns: rounds[0],
            most_ns: rounds[rounds.len() - 1],
            host_ns: hosts[hosts.len() / 2],
            buffer_bytes,
            fences,
            digest,
        })
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

//! What the tests share: worlds with short deadlines, a runtime for each rank, requests, logs.

pub(crate) mod program;
pub(crate) mod spy;

use std::time::{Duration, Instant};

use sessile_hal::{Comm, Device, DeviceError, Kernel, Op, View};
use sessile_host::{HostDevice, Mode, Order, RankFailure, World, WorldOptions};
use sessile_plan::{DType, Domain, RequestSpec, Role};
use sessile_runtime::log::{Log, LogLevel, RankLog, Recorded};
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};

/// A device that logs.
pub(crate) type Dev = Recorded<HostDevice>;

/// The result of a rank's program.
pub(crate) type Outcome<T> = Result<T, RuntimeError>;

/// No named wait of a test takes longer.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// For tests in which a peer never comes: how long the others wait for it.
pub(crate) const SHORT_DEADLINE: Duration = Duration::from_secs(1);

/// The two orders that look for missing fences.
pub(crate) const ADVERSARIES: [Order; 2] = [Order::WritersEarly, Order::ReadersEarly];

pub(crate) fn world(ranks: u32, mode: Mode) -> World {
    World::new(WorldOptions { ranks, mode, deadline: DEADLINE, ..WorldOptions::default() })
}

pub(crate) fn threads(ranks: u32) -> World {
    world(ranks, Mode::Threads { workers: 2 })
}

pub(crate) fn impatient(ranks: u32) -> World {
    let mode = Mode::Threads { workers: 2 };
    World::new(WorldOptions { ranks, mode, deadline: SHORT_DEADLINE, ..WorldOptions::default() })
}

/// The group of all ranks, as tests name it.
pub(crate) const GROUP: &str = "gtp";

/// A runtime with one stream beside the main one and one group of all ranks.
pub(crate) struct Lab<D: Device = Dev> {
    pub(crate) runtime: Runtime<D>,
    pub(crate) side: D::Stream,
}

impl<D: Device> HasRuntime<D> for Lab<D> {
    fn runtime(&mut self) -> &mut Runtime<D> {
        &mut self.runtime
    }
}

impl<D: Device> Lab<D> {
    pub(crate) fn new(device: D) -> Outcome<Self> {
        let all: Vec<u32> = (0..device.world_size()).collect();
        let world = device.communicator("world", &all)?;
        let group = device.communicator(GROUP, &all)?;
        let side = device.stream("side")?;
        let mut runtime = Runtime::new(device, world)?;
        runtime.add_group(GROUP, group);
        Ok(Lab { runtime, side })
    }

    /// Asks for a buffer on the compute stream, fills it, and releases it there.
    pub(crate) fn touch(&mut self, spec: &RequestSpec, value: f32) -> Outcome<()> {
        let compute = self.runtime.compute().clone();
        let slot = self.runtime.request(&compute, spec.clone())?;
        self.runtime.enqueue(&compute, fill(slot.view(), value)?)?;
        self.runtime.release(&compute, slot)
    }
}

impl Lab {
    /// A laboratory on a device that logs.
    pub(crate) fn logged(device: HostDevice) -> Outcome<Self> {
        Lab::new(Recorded::new(device, LogLevel::On))
    }
}

/// A gradient of `elements` in the default domain.
pub(crate) fn spec(weight: &str, dtype: DType, elements: u64) -> RequestSpec {
    RequestSpec {
        weight: weight.to_owned(),
        role: Role::WgradInput,
        dtype,
        shape: vec![elements],
        unsharded_shape: vec![elements],
        domain: Domain::Default,
        group: Some(GROUP.to_owned()),
        expert: None,
        accumulates_into: None,
    }
}

pub(crate) fn fill<M: sessile_hal::Memory>(view: &View<M>, value: f32) -> Result<Op<M>, DeviceError> {
    Op::new(Kernel::Fill { value }, "fill", vec![view.clone()])
}

/// Memory outside any plan, all of one type.
pub(crate) fn persistent<D: Device>(
    device: &D,
    label: &str,
    elements: u64,
) -> Result<View<D::Memory>, DeviceError> {
    let memory = device.alloc(elements * 4, &Domain::Default, label)?;
    View::whole(&memory, DType::F32)
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The results of all ranks, or the first failure.
#[track_caller]
pub(crate) fn all_well<T, E: std::fmt::Display>(results: Vec<Result<T, RankFailure<E>>>) -> Vec<T> {
    results
        .into_iter()
        .map(|result| match result {
            Ok(value) => value,
            Err(failure) => panic!("{failure}"),
        })
        .collect()
}

/// The errors of all ranks.
#[track_caller]
pub(crate) fn all_failed<T>(results: Vec<Result<T, RankFailure<RuntimeError>>>) -> Vec<RuntimeError> {
    results
        .into_iter()
        .enumerate()
        .map(|(rank, result)| match result {
            Err(RankFailure::Failed { error, .. }) => error,
            Err(failure) => panic!("{failure}"),
            Ok(_) => panic!("rank {rank} did not fail"),
        })
        .collect()
}

/// The job's log, with arenas and graphs named as the runner they belong to.
pub(crate) fn job_log(ranks: Vec<RankLog>) -> Log {
    Log::from_ranks(ranks)
}

/// Runs `body` and fails if it took longer than `limit`.
#[track_caller]
pub(crate) fn within<T>(limit: Duration, body: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let value = body();
    let took = begun.elapsed();
    assert!(took < limit, "took {took:?}, more than {limit:?}");
    value
}

/// World rank of a communicator's own member.
pub(crate) fn own_rank(comm: &impl Comm) -> u32 {
    comm.ranks()[comm.rank() as usize]
}

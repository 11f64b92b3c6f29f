//! What the exhibits are built with.

use std::time::Duration;

use sessile_hal::{Collective, Comm, Device, DeviceError, Kernel, Op, View};
use sessile_host::{HostComm, HostDevice, HostMemory, Mode, Order, World, WorldOptions};
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec, Role};
use sessile_runtime::check::{Report, check};
use sessile_runtime::log::{Log, LogLevel, RankLog, Recorded};
use sessile_runtime::{HasRuntime, Runtime, RuntimeError, capture, discover};

use super::Seen;

pub(super) type Dev = Recorded<HostDevice>;
pub(super) type Memory = HostMemory;
pub(super) type Outcome<T> = Result<T, RuntimeError>;

/// The group of all ranks.
pub(super) const GROUP: &str = "gtp";

/// No exhibit waits longer for a peer that never comes.
pub(super) const PATIENCE: Duration = Duration::from_millis(400);

/// Two workers a rank, impatient.
pub(super) fn threads(ranks: u32) -> WorldOptions {
    WorldOptions { deadline: PATIENCE, ..WorldOptions::threads(ranks, 2 * ranks as usize) }
}

/// A legal order that runs writers as early as it may.
pub(super) fn writers_early(ranks: u32) -> WorldOptions {
    WorldOptions { mode: Mode::Scheduled { seed: 1, order: Order::WritersEarly }, ..threads(ranks) }
}

/// A legal order that runs readers as early as it may.
pub(super) fn readers_early(ranks: u32) -> WorldOptions {
    WorldOptions { mode: Mode::Scheduled { seed: 1, order: Order::ReadersEarly }, ..threads(ranks) }
}

/// One program a rank; its results, failures as text.
pub(super) fn on_ranks<T: Send>(
    options: WorldOptions,
    program: impl Fn(HostDevice) -> Outcome<T> + Sync,
) -> Vec<Result<T, String>> {
    let results = World::new(options).run(program);
    results.into_iter().map(|result| result.map_err(|failure| failure.to_string())).collect()
}

/// As [`on_ranks`], where every rank must succeed.
pub(super) fn well<T: Send>(
    options: WorldOptions,
    program: impl Fn(HostDevice) -> Outcome<T> + Sync,
) -> Result<Vec<T>, String> {
    on_ranks(options, program).into_iter().collect()
}

/// The first rank's failure, if all ranks failed.
pub(super) fn all_failed<T>(results: Vec<Result<T, String>>) -> Result<String, String> {
    let ranks = results.len();
    let errors: Vec<String> = results.into_iter().filter_map(Result::err).collect();
    if errors.len() < ranks {
        return Err(format!("only {} of {ranks} ranks failed", errors.len()));
    }
    Ok(errors.into_iter().next().unwrap_or_default())
}

/// Right if the value is what it should be.
pub(super) fn judge(what: &str, found: f32, expected: f32) -> Result<Seen, String> {
    let right = found.to_bits() == expected.to_bits();
    let text = format!("{what} {found}");
    Ok(if right { Seen::Right(text) } else { Seen::Wrong(format!("{text}, not {expected}")) })
}

/// A runtime with one stream beside the main one and one group of all ranks.
pub(super) struct Lab {
    pub(super) runtime: Runtime<Dev>,
    pub(super) device: Dev,
    pub(super) main: <Dev as Device>::Stream,
    pub(super) side: <Dev as Device>::Stream,
}

impl HasRuntime<Dev> for Lab {
    fn runtime(&mut self) -> &mut Runtime<Dev> {
        &mut self.runtime
    }
}

impl Lab {
    pub(super) fn new(device: HostDevice) -> Outcome<Lab> {
        let device = Recorded::new(device, LogLevel::On);
        let all: Vec<u32> = (0..device.world_size()).collect();
        let world = device.communicator("world", &all)?;
        let group = device.communicator(GROUP, &all)?;
        let side = device.stream("side")?;
        let mut runtime = Runtime::new(device.clone(), world)?;
        runtime.add_group(GROUP, group);
        let main = runtime.main().clone();
        Ok(Lab { runtime, device, main, side })
    }

    pub(super) fn ranks(&self) -> u64 {
        u64::from(self.device.world_size())
    }

    /// Discovers, seals and captures one runner.
    pub(super) fn capture(&mut self, body: impl Fn(&mut Lab) -> Outcome<()>) -> Outcome<()> {
        discover(self, "layer", &body)?;
        self.runtime.seal("museum", &PlanOptions::default())?;
        capture(self, "layer", &body)
    }

    pub(super) fn enqueue(
        &mut self,
        stream: &<Dev as Device>::Stream,
        kernel: Kernel,
        views: Vec<View<Memory>>,
    ) -> Outcome<()> {
        let name = kernel.name();
        self.runtime.enqueue(stream, Op::new(kernel, name, views)?).map(drop)
    }

    pub(super) fn fill(&mut self, view: &View<Memory>, value: f32) -> Outcome<()> {
        let compute = self.runtime.compute().clone();
        self.enqueue(&compute, Kernel::Fill { value }, vec![view.clone()])
    }

    /// Makes `to` wait for what `from` has so far.
    pub(super) fn edge(
        &mut self,
        from: &<Dev as Device>::Stream,
        to: &<Dev as Device>::Stream,
    ) -> Outcome<()> {
        let marker = self.runtime.mark(from)?;
        self.runtime.wait(to, &marker)
    }

    /// Waits for everything and reads the first number.
    pub(super) fn first(&mut self, view: &View<Memory>) -> Outcome<f32> {
        self.runtime.join()?;
        self.device.wait_stream(&self.side)?;
        Ok(floats(&self.device.read(&self.main, view)?)[0])
    }
}

pub(super) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]])).collect()
}

pub(super) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// FP32 memory that holds `value`.
pub(super) fn buffer<D: Device>(device: &D, elements: u64, value: f32) -> Outcome<View<D::Memory>> {
    let memory = device.alloc(elements * 4, &Domain::Default, "buffer")?;
    let view = View::whole(&memory, DType::F32)?;
    let stream = device.stream("upload")?;
    device.write(&stream, &view, &bytes(&vec![value; elements as usize]))?;
    Ok(view)
}

/// Memory of `comm`'s domain, not registered.
pub(super) fn window_memory<D: Device>(
    device: &D,
    comm: &D::Comm,
    size: u64,
) -> Result<D::Memory, DeviceError> {
    device.alloc(size, &Domain::Symmetric(comm.name().to_owned()), "window")
}

pub(super) fn everyone(device: &HostDevice, name: &str) -> Result<HostComm, DeviceError> {
    let ranks: Vec<u32> = (0..device.world_size()).collect();
    device.communicator(name, &ranks)
}

/// A request of FP32 elements.
pub(super) fn spec(weight: &str, role: Role, elements: u64) -> RequestSpec {
    RequestSpec {
        weight: weight.to_owned(),
        role,
        dtype: DType::F32,
        shape: vec![elements],
        unsharded_shape: vec![elements],
        domain: Domain::Default,
        group: Some(GROUP.to_owned()),
        expert: None,
        accumulates_into: None,
    }
}

/// The same in the group's registered memory.
pub(super) fn symmetric(weight: &str, elements: u64) -> RequestSpec {
    RequestSpec { domain: Domain::Symmetric(GROUP.into()), ..spec(weight, Role::WgradInput, elements) }
}

/// What the checker says of a job.
pub(super) fn report(logs: Vec<RankLog>) -> Report {
    check(&Log::from_ranks(logs))
}

/// The first finding of this code.
pub(super) fn finding(report: &Report, code: &str) -> Option<String> {
    report.violations.iter().find(|violation| violation.reason.code() == code).map(|violation| {
        format!("the checker reports {}: {}", violation.reason.code(), short(&violation.to_string()))
    })
}

/// The beginning of a text, for a table.
pub(super) fn short(text: &str) -> String {
    let all: Vec<char> = text.chars().collect();
    if all.len() <= 150 { text.to_owned() } else { format!("{}…", all[..148].iter().collect::<String>()) }
}

pub(super) const ONE_SHOT: Collective = Collective::ReduceScatterAccumulate { scale: 1.0 };

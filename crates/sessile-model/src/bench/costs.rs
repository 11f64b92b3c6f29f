//! What the host spends on a planned view and on a replay, beside the bare launch of a graph.

use std::time::Instant;

use serde::Serialize;
use sessile_hal::{Device, Kernel, Op};
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec, Role};
use sessile_runtime::{Runtime, RuntimeError, capture, discover};

use super::nanoseconds;
use crate::buffers::buffer;

/// Requests of the runner whose views are timed.
const VIEWS: usize = 512;
/// Runners whose launches are timed: fewer than may be outstanding.
const RUNNERS: usize = 16;
/// Times that each is timed.
const ROUNDS: usize = 101;

/// Nanoseconds of the host: medians.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct HostCosts {
    /// A request in capture, without fences.
    pub view_request_ns: u64,
    /// Launch of a graph of one small kernel by the device alone.
    pub bare_launch_ns: u64,
    /// Replay of the same graphs by the runtime, with fences inside.
    pub replay_ns: u64,
}

fn spec(weight: String, elements: u64) -> RequestSpec {
    RequestSpec {
        weight,
        role: Role::WgradInput,
        dtype: DType::F32,
        shape: vec![elements],
        unsharded_shape: vec![elements],
        domain: Domain::Default,
        group: None,
        expert: None,
        accumulates_into: None,
    }
}

fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
}

/// Measures on this rank. Collective over the job.
///
/// # Errors
/// Those of the runtime.
pub fn host_costs<D: Device>(device: &D, world: &D::Comm) -> Result<HostCosts, RuntimeError> {
    let (bare_launch_ns, replay_ns) = launches(Runtime::new(device.clone(), world.clone())?)?;
    let view_request_ns = views(Runtime::new(device.clone(), world.clone())?)?;
    Ok(HostCosts { view_request_ns, bare_launch_ns, replay_ns })
}

/// One request in capture.
fn views<D: Device>(mut runtime: Runtime<D>) -> Result<u64, RuntimeError> {
    let target = buffer(runtime.device(), "views", 64, DType::F32)?;
    let mut times = Vec::new();
    let mut body = |runtime: &mut Runtime<D>| {
        let stream = runtime.compute().clone();
        let fill = Op::new(Kernel::Fill { value: 0.0 }, "fill", vec![target.clone()])?;
        runtime.enqueue(&stream, fill)?;
        for at in 0..VIEWS {
            let spec = spec(format!("weight {at}"), 64);
            let begin = Instant::now();
            let slot = runtime.request(&stream, spec)?;
            times.push(nanoseconds(begin.elapsed()));
            runtime.release(&stream, slot)?;
        }
        Ok::<_, RuntimeError>(())
    };
    discover(&mut runtime, "views", &mut body)?;
    runtime.seal("views", &PlanOptions::default())?;
    capture(&mut runtime, "views", &mut body)?;
    Ok(median(times.split_off(VIEWS)))
}

/// A launch alone, and a replay.
fn launches<D: Device>(mut runtime: Runtime<D>) -> Result<(u64, u64), RuntimeError> {
    let device = runtime.device().clone();
    let names: Vec<String> = (0..RUNNERS).map(|at| format!("runner {at}")).collect();
    let side = device.stream("reduce")?;
    let body = |runtime: &mut Runtime<D>, name: &str| {
        let compute = runtime.compute().clone();
        let slot = runtime.request(&compute, spec(name.to_owned(), 4096))?;
        let fill = Op::new(Kernel::Fill { value: 0.0 }, "fill", vec![slot.view().clone()])?;
        runtime.enqueue(&compute, fill.clone())?;
        let filled = runtime.mark(&compute)?;
        runtime.complete()?;
        runtime.wait(&side, &filled)?;
        runtime.enqueue(&side, fill)?;
        runtime.release(&side, slot)?;
        let end = runtime.mark(&side)?;
        runtime.wait(&compute, &end)
    };
    for name in &names {
        discover(&mut runtime, name, |runtime| body(runtime, name))?;
    }
    runtime.seal("launches", &PlanOptions::default())?;
    for name in &names {
        capture(&mut runtime, name, |runtime| body(runtime, name))?;
    }
    let (mut bare, mut replays) = (Vec::new(), Vec::new());
    let per_launch = |begin: Instant| nanoseconds(begin.elapsed()) / RUNNERS as u64;
    for _ in 0..ROUNDS {
        device.wait_stream(runtime.main())?;
        let begin = Instant::now();
        for graph in names.iter().filter_map(|name| runtime.graph(name)) {
            device.launch(graph, runtime.main())?;
        }
        bare.push(per_launch(begin));
        device.wait_stream(runtime.main())?;
        let begin = Instant::now();
        for name in &names {
            runtime.replay(name)?;
        }
        replays.push(per_launch(begin));
        runtime.join()?;
    }
    device.wait_stream(runtime.main())?;
    Ok((median(bare), median(replays)))
}

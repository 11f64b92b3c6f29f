//! A role of your own: an activation checkpoint that the graph owns. It is planned, sealed, captured and checked like the
//! buffers of gathers and reduce-scatters, through the same call.
//!
//! `cargo run --release -p sessile-gtp --example own_role`

use sessile_hal::{Device, Kernel, Op, View};
use sessile_host::{World, WorldOptions};
use sessile_plan::{DType, Domain, PlanOptions, RequestSpec, Role};
use sessile_runtime::{Runtime, RuntimeError, capture, discover};

/// Saves `x`, changes it in place, and adds what was saved.
fn body<D: Device>(runtime: &mut Runtime<D>, x: &View<D::Memory>) -> Result<(), RuntimeError> {
    let compute = runtime.compute().clone();
    let checkpoint = runtime.request(
        &compute,
        RequestSpec {
            weight: "layer0".into(),
            role: Role::User("activation_checkpoint".into()),
            dtype: DType::F32,
            shape: vec![x.elements()],
            unsharded_shape: vec![x.elements()],
            domain: Domain::Default,
            group: None,
            expert: None,
            accumulates_into: None,
        },
    )?;
    let saved = checkpoint.view().clone();
    runtime.enqueue(&compute, Op::new(Kernel::Copy, "save", vec![x.clone(), saved.clone()])?)?;
    runtime.enqueue(&compute, Op::new(Kernel::Scale { factor: 3.0 }, "in place", vec![x.clone()])?)?;
    runtime.enqueue(&compute, Op::new(Kernel::Add, "from the checkpoint", vec![saved, x.clone()])?)?;
    runtime.release(&compute, checkpoint)
}

/// Discovers, seals, captures and replays it; gives `x`, which was 1, and the roles of the plan.
pub(crate) fn run() -> Result<(Vec<f32>, Vec<String>), RuntimeError> {
    let results = World::new(WorldOptions::threads(1, 1)).run(|device| -> Result<_, RuntimeError> {
        let x = View::whole(&device.alloc(16, &Domain::Default, "x")?, DType::F32)?;
        let world = device.communicator("world", &[0])?;
        let mut runtime = Runtime::new(device.clone(), world)?;
        let main = runtime.main().clone();
        device.write(&main, &x, &1.0f32.to_le_bytes().repeat(4))?;
        discover(&mut runtime, "layer0", |runtime| body(runtime, &x))?;
        runtime.seal("own role", &PlanOptions::default())?;
        capture(&mut runtime, "layer0", |runtime| body(runtime, &x))?;
        runtime.replay("layer0")?;
        runtime.join()?;
        let bytes = device.read(&main, &x)?;
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let trace = runtime.trace().expect("sealed just now");
        Ok((values, trace.requests().map(|(_, request)| request.spec.to_string()).collect()))
    });
    results.into_iter().next().expect("one rank").map_err(|failure| match failure {
        sessile_host::RankFailure::Failed { error, .. } => error,
        other => panic!("{other}"),
    })
}

#[expect(clippy::print_stdout, reason = "an example shows what it found")]
#[allow(dead_code, reason = "a test includes this file for `run`")]
fn main() -> Result<(), RuntimeError> {
    let (x, requests) = run()?;
    println!("x is {x:?} after the discovery and one replay; the plan holds: {}", requests.join(", "));
    Ok(())
}

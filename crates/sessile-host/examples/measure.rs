//! Measures the device: GEMM throughput of one worker, and what a task costs. Not a benchmark of a model.
#![allow(clippy::print_stdout, reason = "a table for people")]

use std::time::Instant;

use sessile_hal::{Attention, Beta, Device, DeviceError, Gemm, Kernel, Op, Transpose, View};
use sessile_host::{HostDevice, HostMemory, Order, World, WorldOptions};
use sessile_plan::{DType, Domain};

fn view(device: &HostDevice, elements: u64, dtype: DType) -> Result<View<HostMemory>, DeviceError> {
    let memory = device.alloc(elements * dtype.size(), &Domain::Default, "operand")?;
    let view = View::whole(&memory, dtype)?;
    let stream = device.stream("upload")?;
    device.enqueue(&stream, Op::new(Kernel::Fill { value: 0.5 }, "fill", vec![view.clone()])?)?;
    device.wait_stream(&stream)?;
    Ok(view)
}

/// Seconds that `count` runs of an operation take.
fn time(device: &HostDevice, op: &Op<HostMemory>, count: u32) -> Result<f64, DeviceError> {
    let stream = device.stream("s")?;
    device.enqueue(&stream, op.clone())?;
    device.wait_stream(&stream)?;
    let begun = Instant::now();
    for _ in 0..count {
        device.enqueue(&stream, op.clone())?;
    }
    device.wait_stream(&stream)?;
    Ok(begun.elapsed().as_secs_f64() / f64::from(count))
}

fn main() -> Result<(), DeviceError> {
    let device = World::new(WorldOptions::threads(1, 1)).device(0);
    for (a, b) in
        [(Transpose::No, Transpose::No), (Transpose::No, Transpose::Yes), (Transpose::Yes, Transpose::No)]
    {
        for n in [128u64, 256, 512, 1024] {
            let gemm = Gemm { m: n, n, k: n, a, b, beta: Beta::Overwrite };
            let dtypes = [DType::Bf16, DType::Bf16, DType::Bf16];
            let views = dtypes.into_iter().map(|d| view(&device, n * n, d)).collect::<Result<_, _>>()?;
            let seconds = time(&device, &Op::new(Kernel::Gemm(gemm), "gemm", views)?, 20)?;
            println!("gemm bf16 {n}³ {a:?}/{b:?}: {:.1} GFLOP/s", 2e-9 * (n * n * n) as f64 / seconds);
        }
    }
    let shape = Attention { batch: 4, seq: 128, heads: 4, head_dim: 32 };
    let (tokens, hidden) = (4 * 128, 128);
    let qkv = view(&device, tokens * 3 * hidden, DType::Bf16)?;
    let (out, lse) = (view(&device, tokens * hidden, DType::Bf16)?, view(&device, tokens * 4, DType::F32)?);
    let forward =
        Op::new(Kernel::AttentionForward(shape), "fwd", vec![qkv.clone(), out.clone(), lse.clone()])?;
    println!("attention forward {shape:?}: {:.2} ms", 1e3 * time(&device, &forward, 20)?);
    let (dout, dqkv) =
        (view(&device, tokens * hidden, DType::Bf16)?, view(&device, tokens * 3 * hidden, DType::Bf16)?);
    let backward = Op::new(Kernel::AttentionBackward(shape), "bwd", vec![dout, qkv, out, lse, dqkv])?;
    println!("attention backward: {:.2} ms", 1e3 * time(&device, &backward, 20)?);

    for (name, options) in [
        ("1 worker", WorldOptions::threads(1, 1)),
        ("2 workers", WorldOptions::threads(1, 2)),
        ("scheduler, random", WorldOptions::scheduled(1, 0, Order::Random)),
        ("scheduler, writers early", WorldOptions::scheduled(1, 0, Order::WritersEarly)),
    ] {
        let device = World::new(options).device(0);
        let x = view(&device, 1, DType::F32)?;
        let op = Op::new(Kernel::Scale { factor: 1.0 }, "scale", vec![x])?;
        println!("empty task, {name}: {:.2} µs", 1e6 * time(&device, &op, 4000)?);
        let stream = device.stream("s")?;
        device.begin_capture(&stream)?;
        for _ in 0..100 {
            device.enqueue(&stream, op.clone())?;
        }
        let graph = device.end_capture(&stream)?;
        let begun = Instant::now();
        for _ in 0..40 {
            device.launch(&graph, &stream)?;
        }
        device.wait_stream(&stream)?;
        println!("node of a launch, {name}: {:.2} µs", 1e6 * begun.elapsed().as_secs_f64() / 4000.0);
    }
    Ok(())
}

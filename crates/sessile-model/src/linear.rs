//! Products with sharded weights.

use sessile_gtp::{Gathered, Gtp, Pass, WeightId};
use sessile_hal::{Beta, Device, Gemm, Kernel, Op, Transpose, View};
use sessile_runtime::{HasRuntime, Runtime, RuntimeError};

/// Enqueues `kernel` on the compute stream.
pub(crate) fn run<D: Device>(
    gtp: &mut Gtp<D>,
    kernel: Kernel,
    label: &str,
    views: &[&View<D::Memory>],
) -> Result<(), RuntimeError> {
    enqueue(gtp.runtime(), kernel, label, views)
}

/// As [`run`], where only the runtime is at hand.
pub(crate) fn enqueue<D: Device>(
    runtime: &mut Runtime<D>,
    kernel: Kernel,
    label: &str,
    views: &[&View<D::Memory>],
) -> Result<(), RuntimeError> {
    let op = Op::new(kernel, label, views.iter().map(|&view| view.clone()).collect())?;
    let compute = runtime.compute().clone();
    runtime.enqueue(&compute, op)?;
    Ok(())
}

/// `y[tokens, out] = x[tokens, in] · Wᵀ`.
pub(crate) fn forward_gemm(tokens: u64, rows: u64, cols: u64) -> Kernel {
    Kernel::Gemm(Gemm {
        m: tokens,
        n: rows,
        k: cols,
        a: Transpose::No,
        b: Transpose::Yes,
        beta: Beta::Overwrite,
    })
}

/// `dx[tokens, in] = dy[tokens, out] · W`, or added to it.
pub(crate) fn dgrad_gemm(tokens: u64, rows: u64, cols: u64, beta: Beta) -> Kernel {
    Kernel::Gemm(Gemm { m: tokens, n: cols, k: rows, a: Transpose::No, b: Transpose::No, beta })
}

/// `dW[out, in] = dyᵀ · x`.
pub(crate) fn wgrad_gemm(tokens: u64, rows: u64, cols: u64) -> Kernel {
    Kernel::Gemm(Gemm {
        m: rows,
        n: cols,
        k: tokens,
        a: Transpose::Yes,
        b: Transpose::No,
        beta: Beta::Overwrite,
    })
}

/// `y[tokens, out] = x[tokens, in] · Wᵀ`.
pub(crate) fn linear<D: Device>(
    gtp: &mut Gtp<D>,
    weight: WeightId,
    label: &str,
    x: &View<D::Memory>,
    y: &View<D::Memory>,
    tokens: u64,
) -> Result<(), RuntimeError> {
    let shard = gtp.weight(weight).shard;
    gathered(gtp, weight, Pass::Forward, |gtp, whole| {
        run(gtp, forward_gemm(tokens, shard.rows, shard.cols), label, &[x, &whole.matrix(0)?, y])
    })
}

/// `dx[tokens, in] = dy[tokens, out] · W`, then `dW[out, in] = dyᵀ · x` into the weight's reduce-scatter.
pub(crate) fn linear_backward<D: Device>(
    gtp: &mut Gtp<D>,
    weight: WeightId,
    label: &str,
    dy: &View<D::Memory>,
    x: &View<D::Memory>,
    (dx, beta): (&View<D::Memory>, Beta),
    tokens: u64,
) -> Result<(), RuntimeError> {
    let shard = gtp.weight(weight).shard;
    gathered(gtp, weight, Pass::Backward, |gtp, whole| {
        let dgrad = dgrad_gemm(tokens, shard.rows, shard.cols, beta);
        run(gtp, dgrad, &format!("{label} dgrad"), &[dy, &whole.matrix(0)?, dx])
    })?;
    gtp.reduce(weight, |runtime, dw| {
        let wgrad = wgrad_gemm(tokens, shard.rows, shard.cols);
        enqueue(runtime, wgrad, &format!("{label} wgrad"), &[dy, x, &dw[0]])
    })
}

/// Gathers a weight for `body`, and gives it back.
pub(crate) fn gathered<D: Device>(
    gtp: &mut Gtp<D>,
    weight: WeightId,
    pass: Pass,
    body: impl FnOnce(&mut Gtp<D>, &Gathered<D>) -> Result<(), RuntimeError>,
) -> Result<(), RuntimeError> {
    let whole = gtp.materialize(weight, pass)?;
    body(gtp, &whole)?;
    gtp.release(whole)
}

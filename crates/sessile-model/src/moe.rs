//! A mixture of experts. Every expert computes all tokens of the micro-batch, and the gates, most of them 0, weigh what it
//! gives: shapes do not depend on the routing, so a graph can hold them. An expert without tokens has a gradient of
//! zeros, which is reduced like any other: all ranks do the same.

use sessile_gtp::{Gtp, Pass};
use sessile_hal::{Beta, Combine, Device, DeviceError, Kernel, View};
use sessile_runtime::RuntimeError;

use crate::{
    buffers::{Activations, Experts},
    linear::{dgrad_gemm, enqueue, forward_gemm, gathered, linear, linear_backward, run, wgrad_gemm},
    module::{Extents, Module},
};

/// Part `expert` of a buffer that holds one part for each.
fn part<D: Device>(
    view: &View<D::Memory>,
    expert: u64,
    experts: u64,
) -> Result<View<D::Memory>, DeviceError> {
    let elements = view.elements() / experts;
    view.slice(expert * elements, elements)
}

fn combine(extents: Extents) -> Combine {
    Combine { tokens: extents.tokens, experts: extents.experts, hidden: extents.hidden }
}

pub(crate) fn forward<D: Device>(
    module: &Module,
    gtp: &mut Gtp<D>,
    extents: Extents,
    x: &View<D::Memory>,
    saved: &Experts<D>,
    out: &View<D::Memory>,
) -> Result<(), RuntimeError> {
    let Extents { tokens, experts, top_k, .. } = extents;
    let name = module.name();
    if let Some(router) = module.router {
        linear(gtp, router, &format!("{name} router"), x, &saved.logits, tokens)?;
    }
    let kernel = Kernel::RouterForward { tokens, experts, top_k };
    run(gtp, kernel, &format!("{name} gates"), &[&saved.logits, &saved.gates])?;
    let (up, down) = (gtp.weight(module.up).shard, gtp.weight(module.down).shard);
    gathered(gtp, module.up, Pass::Forward, |gtp, whole| {
        for (expert, at) in (0..experts).zip(0..) {
            let (w, y) = (whole.matrix(at)?, part::<D>(&saved.before, expert, experts)?);
            run(gtp, forward_gemm(tokens, up.rows, up.cols), &format!("{name} up {expert}"), &[x, &w, &y])?;
        }
        Ok(())
    })?;
    run(gtp, Kernel::SquaredReluForward, &name, &[&saved.before, &saved.after])?;
    gathered(gtp, module.down, Pass::Forward, |gtp, whole| {
        for (expert, at) in (0..experts).zip(0..) {
            let (w, x) = (whole.matrix(at)?, part::<D>(&saved.after, expert, experts)?);
            let y = part::<D>(&saved.given, expert, experts)?;
            let gemm = forward_gemm(tokens, down.rows, down.cols);
            run(gtp, gemm, &format!("{name} down {expert}"), &[&x, &w, &y])?;
        }
        Ok(())
    })?;
    let kernel = Kernel::CombineForward(combine(extents));
    run(gtp, kernel, &format!("{name} combine"), &[&saved.gates, &saved.given, out])
}

/// From `narrow[0]`, the gradient of the result, to `narrow[1]`, that of `x`.
pub(crate) fn backward<D: Device>(
    module: &Module,
    gtp: &mut Gtp<D>,
    extents: Extents,
    x: &View<D::Memory>,
    saved: &Experts<D>,
    acts: &Activations<D>,
) -> Result<(), RuntimeError> {
    let Extents { tokens, experts, .. } = extents;
    let Some(scratch) = &acts.experts else { return Ok(()) };
    let [dy, dx] = &acts.narrow;
    let name = module.name();
    let each = |view: &View<D::Memory>, expert| part::<D>(view, expert, experts);
    let views = [dy, &saved.gates, &saved.given, &scratch.given, &scratch.gates];
    run(gtp, Kernel::CombineBackward(combine(extents)), &format!("{name} combine backward"), &views)?;

    let down = gtp.weight(module.down).shard;
    gathered(gtp, module.down, Pass::Backward, |gtp, whole| {
        for (expert, at) in (0..experts).zip(0..) {
            let (w, dafter) = (whole.matrix(at)?, each(&scratch.after, expert)?);
            let gemm = dgrad_gemm(tokens, down.rows, down.cols, Beta::Overwrite);
            let views = [&each(&scratch.given, expert)?, &w, &dafter];
            run(gtp, gemm, &format!("{name} down {expert} dgrad"), &views)?;
        }
        Ok(())
    })?;
    gtp.reduce(module.down, |runtime, dw| {
        for (expert, dw) in (0..experts).zip(dw) {
            let (dgiven, after) = (each(&scratch.given, expert)?, each(&saved.after, expert)?);
            let gemm = wgrad_gemm(tokens, down.rows, down.cols);
            enqueue(runtime, gemm, &format!("{name} down {expert} wgrad"), &[&dgiven, &after, dw])?;
        }
        Ok(())
    })?;
    run(gtp, Kernel::SquaredReluBackward, &name, &[&scratch.after, &saved.before, &scratch.before])?;

    let up = gtp.weight(module.up).shard;
    gathered(gtp, module.up, Pass::Backward, |gtp, whole| {
        for (expert, at) in (0..experts).zip(0..) {
            let (w, dbefore) = (whole.matrix(at)?, each(&scratch.before, expert)?);
            let beta = if expert == 0 { Beta::Overwrite } else { Beta::Accumulate };
            let gemm = dgrad_gemm(tokens, up.rows, up.cols, beta);
            run(gtp, gemm, &format!("{name} up {expert} dgrad"), &[&dbefore, &w, &scratch.dx])?;
        }
        Ok(())
    })?;
    gtp.reduce(module.up, |runtime, dw| {
        for (expert, dw) in (0..experts).zip(dw) {
            let dbefore = each(&scratch.before, expert)?;
            let gemm = wgrad_gemm(tokens, up.rows, up.cols);
            enqueue(runtime, gemm, &format!("{name} up {expert} wgrad"), &[&dbefore, x, dw])?;
        }
        Ok(())
    })?;

    let kernel = Kernel::RouterBackward { tokens, experts };
    run(gtp, kernel, &format!("{name} gates backward"), &[&scratch.gates, &saved.gates, &scratch.logits])?;
    if let Some(router) = module.router {
        let label = format!("{name} router");
        linear_backward(gtp, router, &label, &scratch.logits, x, (&scratch.dx, Beta::Accumulate), tokens)?;
    }
    run(gtp, Kernel::Cast, &format!("{name} dx"), &[&scratch.dx, dx])
}

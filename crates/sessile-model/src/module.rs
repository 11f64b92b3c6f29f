//! Attention and MLP modules: forward and backward as sequences of operations.

use sessile_gtp::{Gtp, Pass, WeightId};
use sessile_hal::{Attention, Beta, Device, Gemm, Kernel, Op, Transpose, View};
use sessile_runtime::{HasRuntime, RuntimeError};

use crate::{
    buffers::{Activations, Saved},
    config::ModuleKind,
};

/// Added to the mean square before the root.
pub(crate) const NORM_EPS: f32 = 1e-5;

/// One attention or MLP module.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) kind: ModuleKind,
    pub(crate) layer: u32,
    /// Position among all modules; indexes residuals and saved activations.
    pub(crate) index: usize,
    /// Index of its norm weight.
    pub(crate) norm: usize,
    /// `[3·hidden, hidden]` or `[ffn, hidden]`.
    pub(crate) up: WeightId,
    /// `[hidden, hidden]` or `[hidden, ffn]`.
    pub(crate) down: WeightId,
}

/// Extents that all modules share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub(crate) tokens: u64,
    pub(crate) hidden: u64,
    pub(crate) ffn: u64,
    pub(crate) attention: Attention,
}

/// A replicated norm weight and its gradient, f32 `[hidden]`.
pub(crate) struct Norm<D: Device> {
    pub(crate) value: View<D::Memory>,
    pub(crate) main_grad: View<D::Memory>,
}

/// Enqueues `kernel` on the compute stream.
pub(crate) fn run<D: Device>(
    gtp: &mut Gtp<D>,
    kernel: Kernel,
    label: &str,
    views: &[&View<D::Memory>],
) -> Result<(), RuntimeError> {
    let op = Op::new(kernel, label, views.iter().map(|&view| view.clone()).collect())?;
    let runtime = gtp.runtime();
    let compute = runtime.compute().clone();
    runtime.enqueue(&compute, op)?;
    Ok(())
}

/// `y[tokens, out] = x[tokens, in] · Wᵀ`.
fn linear<D: Device>(
    gtp: &mut Gtp<D>,
    weight: WeightId,
    label: &str,
    x: &View<D::Memory>,
    y: &View<D::Memory>,
    tokens: u64,
) -> Result<(), RuntimeError> {
    let shard = gtp.weight(weight).shard;
    let slot = gtp.materialize(weight, Pass::Forward)?;
    let value = slot.view().slice(0, shard.elements())?;
    let gemm = Gemm {
        m: tokens,
        n: shard.rows,
        k: shard.cols,
        a: Transpose::No,
        b: Transpose::Yes,
        beta: Beta::Overwrite,
    };
    run(gtp, Kernel::Gemm(gemm), label, &[x, &value, y])?;
    gtp.release(slot)
}

/// `dx[tokens, in] = dy[tokens, out] · W`, then `dW[out, in] = dyᵀ · x` into the weight's reduce-scatter.
pub(crate) fn linear_backward<D: Device>(
    gtp: &mut Gtp<D>,
    weight: WeightId,
    label: &str,
    dy: &View<D::Memory>,
    x: &View<D::Memory>,
    dx: &View<D::Memory>,
    tokens: u64,
) -> Result<(), RuntimeError> {
    let shard = gtp.weight(weight).shard;
    let slot = gtp.materialize(weight, Pass::Backward)?;
    let value = slot.view().slice(0, shard.elements())?;
    let dgrad = Gemm {
        m: tokens,
        n: shard.cols,
        k: shard.rows,
        a: Transpose::No,
        b: Transpose::No,
        beta: Beta::Overwrite,
    };
    run(gtp, Kernel::Gemm(dgrad), &format!("{label} dgrad"), &[dy, &value, dx])?;
    gtp.release(slot)?;
    let wgrad = Gemm {
        m: shard.rows,
        n: shard.cols,
        k: tokens,
        a: Transpose::Yes,
        b: Transpose::No,
        beta: Beta::Overwrite,
    };
    let label = format!("{label} wgrad");
    gtp.reduce(weight, |runtime, dw| {
        let op = Op::new(Kernel::Gemm(wgrad), label, vec![dy.clone(), x.clone(), dw.clone()])?;
        let compute = runtime.compute().clone();
        runtime.enqueue(&compute, op)?;
        Ok(())
    })
}

impl Module {
    /// Name of the module in runners and weights.
    pub(crate) fn name(&self) -> String {
        format!("layer{}.{}", self.layer, kind_name(self.kind))
    }

    /// `residual[i + 1] = residual[i] + module(residual[i])`.
    pub(crate) fn forward<D: Device>(
        &self,
        gtp: &mut Gtp<D>,
        extents: Extents,
        norm: &Norm<D>,
        acts: &Activations<D>,
    ) -> Result<(), RuntimeError> {
        let Extents { tokens, hidden, attention, .. } = extents;
        let saved: &Saved<D> = &acts.saved[self.index];
        let (x, y) = (&acts.residual[self.index], &acts.residual[self.index + 1]);
        let name = self.name();
        let norm_kernel = Kernel::RmsNormForward { rows: tokens, cols: hidden, eps: NORM_EPS };
        run(gtp, norm_kernel, &format!("{name} norm"), &[x, &norm.value, &saved.normed, &saved.rstd])?;
        linear(gtp, self.up, &format!("{name} up"), &saved.normed, &saved.wide, tokens)?;
        match (self.kind, &saved.lse) {
            (ModuleKind::Attention, Some(lse)) => {
                run(gtp, Kernel::AttentionForward(attention), &name, &[&saved.wide, &saved.inner, lse])?;
            }
            _ => run(gtp, Kernel::SquaredReluForward, &name, &[&saved.wide, &saved.inner])?,
        }
        linear(gtp, self.down, &format!("{name} down"), &saved.inner, &acts.narrow[0], tokens)?;
        run(gtp, Kernel::Copy, &format!("{name} residual"), &[x, y])?;
        run(gtp, Kernel::Add, &format!("{name} residual add"), &[&acts.narrow[0], y])
    }

    /// Turns `dresidual` from the gradient after the module into the one before it.
    pub(crate) fn backward<D: Device>(
        &self,
        gtp: &mut Gtp<D>,
        extents: Extents,
        norm: &Norm<D>,
        acts: &Activations<D>,
    ) -> Result<(), RuntimeError> {
        let Extents { tokens, hidden, ffn, attention } = extents;
        let saved: &Saved<D> = &acts.saved[self.index];
        let x = &acts.residual[self.index];
        let name = self.name();
        let (wide, inner) = match self.kind {
            ModuleKind::Attention => (3 * hidden, hidden),
            ModuleKind::Mlp => (ffn, ffn),
        };
        let [dy, dnormed] = &acts.narrow;
        let dinner = acts.wide[0].slice(0, tokens * inner)?;
        let dwide = acts.wide[1].slice(0, tokens * wide)?;
        run(gtp, Kernel::Cast, &format!("{name} dy"), &[&acts.dresidual, dy])?;
        linear_backward(gtp, self.down, &format!("{name} down"), dy, &saved.inner, &dinner, tokens)?;
        match (self.kind, &saved.lse) {
            (ModuleKind::Attention, Some(lse)) => {
                let label = format!("{name} backward");
                let views = [&dinner, &saved.wide, &saved.inner, lse, &dwide];
                run(gtp, Kernel::AttentionBackward(attention), &label, &views)?;
            }
            _ => {
                run(gtp, Kernel::SquaredReluBackward, &name, &[&dinner, &saved.wide, &dwide])?;
            }
        }
        linear_backward(gtp, self.up, &format!("{name} up"), &dwide, &saved.normed, dnormed, tokens)?;
        let kernel = Kernel::RmsNormBackward { rows: tokens, cols: hidden };
        let views = [dnormed, x, &norm.value, &saved.rstd, &acts.dresidual, &norm.main_grad];
        run(gtp, kernel, &format!("{name} norm backward"), &views)
    }
}

/// Name of a kind, as on the command line.
pub(crate) fn kind_name(kind: ModuleKind) -> &'static str {
    match kind {
        ModuleKind::Attention => "attention",
        ModuleKind::Mlp => "mlp",
    }
}

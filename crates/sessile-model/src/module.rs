//! Attention, MLP and mixture-of-experts modules: forward and backward as sequences of operations.

use sessile_gtp::{Gtp, WeightId};
use sessile_hal::{Attention, Beta, Device, Kernel, View};
use sessile_runtime::RuntimeError;

use crate::{
    buffers::{Activations, Inner, Saved},
    config::{ModuleKind, TrainConfig},
    linear::{linear, linear_backward, run},
    moe,
};

/// Added to the mean square before the root.
pub(crate) const NORM_EPS: f32 = 1e-5;

/// One module at one place of the network.
#[derive(Clone, Debug)]
pub(crate) struct Module {
    pub(crate) kind: ModuleKind,
    /// Its layer, as `layer3` or `mtp1`.
    pub(crate) layer: String,
    /// Position among all modules; indexes residuals and saved activations.
    pub(crate) index: usize,
    /// Index of its norm weight.
    pub(crate) norm: usize,
    /// `[experts, hidden]`, of a mixture of experts.
    pub(crate) router: Option<WeightId>,
    /// `[3·hidden, hidden]`, or `[ffn, hidden]` of the MLP or of each expert.
    pub(crate) up: WeightId,
    /// `[hidden, hidden]`, or `[hidden, ffn]` of the MLP or of each expert.
    pub(crate) down: WeightId,
    /// A prediction that reads its output, whose gradient is not yet in the residual's when its backward begins.
    pub(crate) predicts: Option<usize>,
}

/// Extents that all modules share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub(crate) tokens: u64,
    pub(crate) hidden: u64,
    pub(crate) ffn: u64,
    pub(crate) experts: u64,
    pub(crate) top_k: u64,
    pub(crate) attention: Attention,
}

impl Extents {
    /// Those of sequences of `seq` tokens.
    pub(crate) fn new(config: &TrainConfig, seq: u64) -> Self {
        Extents {
            tokens: seq * config.batch,
            hidden: config.hidden,
            ffn: config.ffn,
            experts: config.experts.into(),
            top_k: config.top_k.into(),
            attention: Attention {
                batch: config.batch,
                seq,
                heads: config.heads,
                head_dim: config.hidden / config.heads,
            },
        }
    }
}

/// A replicated norm weight and its gradient, f32 `[hidden]`.
pub(crate) struct Norm<D: Device> {
    pub(crate) value: View<D::Memory>,
    pub(crate) main_grad: View<D::Memory>,
}

impl Module {
    /// Its name in runners.
    pub(crate) fn name(&self) -> String {
        format!("{}.{}", self.layer, kind_name(self.kind))
    }

    /// Its weights in the order in which a forward uses them.
    pub(crate) fn weights(&self) -> impl DoubleEndedIterator<Item = WeightId> {
        self.router.into_iter().chain([self.up, self.down])
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
        let out = &acts.narrow[0];
        match &saved.inner {
            Inner::Attention { qkv, out: mixed, lse } => {
                linear(gtp, self.up, &format!("{name} up"), &saved.normed, qkv, tokens)?;
                run(gtp, Kernel::AttentionForward(attention), &name, &[qkv, mixed, lse])?;
                linear(gtp, self.down, &format!("{name} down"), mixed, out, tokens)?;
            }
            Inner::Mlp { before, after } => {
                linear(gtp, self.up, &format!("{name} up"), &saved.normed, before, tokens)?;
                run(gtp, Kernel::SquaredReluForward, &name, &[before, after])?;
                linear(gtp, self.down, &format!("{name} down"), after, out, tokens)?;
            }
            Inner::Moe(experts) => moe::forward(self, gtp, extents, &saved.normed, experts, out)?,
        }
        run(gtp, Kernel::Copy, &format!("{name} residual"), &[x, y])?;
        run(gtp, Kernel::Add, &format!("{name} residual add"), &[out, y])
    }

    /// Turns `dresidual` from the gradient after the module into the one before it.
    pub(crate) fn backward<D: Device>(
        &self,
        gtp: &mut Gtp<D>,
        extents: Extents,
        norm: &Norm<D>,
        acts: &Activations<D>,
    ) -> Result<(), RuntimeError> {
        let Extents { tokens, hidden, ffn, attention, .. } = extents;
        let saved: &Saved<D> = &acts.saved[self.index];
        let name = self.name();
        if let Some(prediction) = self.predicts {
            let views = [&acts.predictions[prediction].dresidual, &acts.dresidual];
            run(gtp, Kernel::Add, &format!("{name} gradient of its prediction"), &views)?;
        }
        let [dy, dnormed] = &acts.narrow;
        run(gtp, Kernel::Cast, &format!("{name} dy"), &[&acts.dresidual, dy])?;
        let scratch = |inner: u64, wide: u64| -> Result<_, RuntimeError> {
            Ok((acts.wide[0].slice(0, tokens * inner)?, acts.wide[1].slice(0, tokens * wide)?))
        };
        let (up, down) = (format!("{name} up"), format!("{name} down"));
        match &saved.inner {
            Inner::Attention { qkv, out, lse } => {
                let (dout, dqkv) = scratch(hidden, 3 * hidden)?;
                linear_backward(gtp, self.down, &down, dy, out, (&dout, Beta::Overwrite), tokens)?;
                let views = [&dout, qkv, out, lse, &dqkv];
                run(gtp, Kernel::AttentionBackward(attention), &format!("{name} backward"), &views)?;
                linear_backward(gtp, self.up, &up, &dqkv, &saved.normed, (dnormed, Beta::Overwrite), tokens)?;
            }
            Inner::Mlp { before, after } => {
                let (dafter, dbefore) = scratch(ffn, ffn)?;
                linear_backward(gtp, self.down, &down, dy, after, (&dafter, Beta::Overwrite), tokens)?;
                run(gtp, Kernel::SquaredReluBackward, &name, &[&dafter, before, &dbefore])?;
                let dx = (dnormed, Beta::Overwrite);
                linear_backward(gtp, self.up, &up, &dbefore, &saved.normed, dx, tokens)?;
            }
            Inner::Moe(experts) => moe::backward(self, gtp, extents, &saved.normed, experts, acts)?,
        }
        let kernel = Kernel::RmsNormBackward { rows: tokens, cols: hidden };
        let x = &acts.residual[self.index];
        let views = [dnormed, x, &norm.value, &saved.rstd, &acts.dresidual, &norm.main_grad];
        run(gtp, kernel, &format!("{name} norm backward"), &views)
    }
}

/// Name of a kind, as on the command line.
pub(crate) fn kind_name(kind: ModuleKind) -> &'static str {
    match kind {
        ModuleKind::Attention => "attention",
        ModuleKind::Mlp => "mlp",
        ModuleKind::Moe => "moe",
    }
}

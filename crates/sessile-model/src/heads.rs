//! What is before the first module and behind the last: embedding, final norm, output layer, loss.

use sessile_gtp::{Gtp, Pass};
use sessile_hal::{Beta, Device, Kernel};
use sessile_runtime::RuntimeError;

use crate::{
    buffers::Activations,
    config::{TrainConfig, VOCAB},
    linear::{enqueue, gathered, linear, linear_backward, run},
    module::{Extents, NORM_EPS, Norm},
    network::Network,
};

/// Share that predictions beyond the next token have in the loss, all together.
const FURTHER: f64 = 0.3;

/// Weight of a prediction in the loss.
pub(crate) fn loss_weight(config: &TrainConfig, prediction: usize) -> f64 {
    if prediction == 0 { 1.0 } else { FURTHER / f64::from(config.mtp) }
}

pub(crate) fn embedding_forward<D: Device>(
    network: &Network,
    gtp: &mut Gtp<D>,
    extents: Extents,
    acts: &Activations<D>,
) -> Result<(), RuntimeError> {
    let Extents { tokens, hidden, .. } = extents;
    gathered(gtp, network.embedding, Pass::Forward, |gtp, table| {
        let kernel = Kernel::EmbeddingForward { tokens, hidden, vocab: VOCAB };
        run(gtp, kernel, "embedding", &[&acts.ids, &table.matrix(0)?, &acts.residual[0]])
    })
}

pub(crate) fn embedding_backward<D: Device>(
    network: &Network,
    gtp: &mut Gtp<D>,
    extents: Extents,
    acts: &Activations<D>,
) -> Result<(), RuntimeError> {
    let Extents { tokens, hidden, .. } = extents;
    gtp.reduce(network.embedding, |runtime, dtable| {
        let kernel = Kernel::EmbeddingBackward { tokens, hidden, vocab: VOCAB };
        enqueue(runtime, kernel, "embedding backward", &[&acts.ids, &acts.dresidual, &dtable[0]])
    })
}

/// Every prediction: its loss and the gradient of its logits.
pub(crate) fn forward<D: Device>(
    config: &TrainConfig,
    network: &Network,
    gtp: &mut Gtp<D>,
    extents: Extents,
    norm: &Norm<D>,
    acts: &Activations<D>,
) -> Result<(), RuntimeError> {
    let Extents { tokens, hidden, .. } = extents;
    for (at, (prediction, &from)) in acts.predictions.iter().zip(&network.predicts_from).enumerate() {
        let kernel = Kernel::RmsNormForward { rows: tokens, cols: hidden, eps: NORM_EPS };
        let views = [&acts.residual[from], &norm.value, &prediction.normed, &prediction.rstd];
        run(gtp, kernel, "final norm", &views)?;
        linear(gtp, network.output, "logits", &prediction.normed, &acts.logits, tokens)?;
        let scale = (loss_weight(config, at) / f64::from(config.microbatches)) as f32;
        let kernel = Kernel::CrossEntropy { rows: tokens, classes: VOCAB, scale };
        let views = [&acts.logits, &prediction.targets, &prediction.loss, &prediction.dlogits];
        run(gtp, kernel, "loss", &views)?;
    }
    Ok(())
}

/// From the gradient of the logits to that of the residuals which the predictions read, the last one first.
pub(crate) fn backward<D: Device>(
    network: &Network,
    gtp: &mut Gtp<D>,
    extents: Extents,
    norm: &Norm<D>,
    acts: &Activations<D>,
) -> Result<(), RuntimeError> {
    let Extents { tokens, hidden, .. } = extents;
    let [_, dnormed] = &acts.narrow;
    for (prediction, &from) in acts.predictions.iter().zip(&network.predicts_from).rev() {
        let (dlogits, normed, dx) = (&prediction.dlogits, &prediction.normed, (dnormed, Beta::Overwrite));
        linear_backward(gtp, network.output, "output", dlogits, normed, dx, tokens)?;
        run(gtp, Kernel::Fill { value: 0.0 }, "zero dresidual", &[&prediction.dresidual])?;
        let kernel = Kernel::RmsNormBackward { rows: tokens, cols: hidden };
        let (x, dx) = (&acts.residual[from], &prediction.dresidual);
        let views = [dnormed, x, &norm.value, &prediction.rstd, dx, &norm.main_grad];
        run(gtp, kernel, "final norm backward", &views)?;
    }
    Ok(())
}

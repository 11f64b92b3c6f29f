//! Persistent buffers of the model: parameters, activations that backward reads, gradients.

use std::cell::{Cell, RefCell};

use sessile_hal::{Device, DeviceError, View};
use sessile_plan::{DType, Domain};

use crate::{
    config::{ModuleKind, VOCAB},
    module::{Extents, Module},
};

/// Allocates one buffer that lives as long as the model.
///
/// # Errors
/// Those of the device.
pub(crate) fn buffer<D: Device>(
    device: &D,
    label: &str,
    elements: u64,
    dtype: DType,
) -> Result<View<D::Memory>, DeviceError> {
    let memory = device.alloc(elements * dtype.size(), &Domain::Default, label)?;
    View::whole(&memory, dtype)
}

/// Activations of one module that its backward reads.
pub(crate) struct Saved<D: Device> {
    /// Normalized input, bf16 `[tokens, hidden]`.
    pub(crate) normed: View<D::Memory>,
    /// Reciprocal root mean square, f32 `[tokens]`.
    pub(crate) rstd: View<D::Memory>,
    pub(crate) inner: Inner<D>,
}

/// What each kind of module saves besides.
pub(crate) enum Inner<D: Device> {
    Attention {
        /// Queries, keys, values, bf16 `[tokens, 3·hidden]`.
        qkv: View<D::Memory>,
        /// bf16 `[tokens, hidden]`.
        out: View<D::Memory>,
        /// Log-sum-exp, f32 `[batch, heads, seq]`.
        lse: View<D::Memory>,
    },
    /// Both sides of the activation, bf16 `[tokens, ffn]`.
    Mlp {
        before: View<D::Memory>,
        after: View<D::Memory>,
    },
    Moe(Experts<D>),
}

/// What a mixture of experts saves.
pub(crate) struct Experts<D: Device> {
    /// f32 `[tokens, experts]`.
    pub(crate) logits: View<D::Memory>,
    pub(crate) gates: View<D::Memory>,
    /// Both sides of the activation, bf16 `[experts, tokens, ffn]`.
    pub(crate) before: View<D::Memory>,
    pub(crate) after: View<D::Memory>,
    /// What the experts give, bf16 `[experts, tokens, hidden]`.
    pub(crate) given: View<D::Memory>,
}

/// Gradients inside a mixture of experts, scratch of its backward.
pub(crate) struct ExpertScratch<D: Device> {
    /// f32 `[tokens, experts]`.
    pub(crate) gates: View<D::Memory>,
    /// bf16 `[tokens, experts]`.
    pub(crate) logits: View<D::Memory>,
    /// bf16 `[experts, tokens, ffn]`.
    pub(crate) before: View<D::Memory>,
    pub(crate) after: View<D::Memory>,
    /// bf16 `[experts, tokens, hidden]`.
    pub(crate) given: View<D::Memory>,
    /// Sum over experts and router, f32 `[tokens, hidden]`.
    pub(crate) dx: View<D::Memory>,
}

/// One prediction: of the next token, or of one further on.
pub(crate) struct Prediction<D: Device> {
    /// Final norm: output, bf16 `[tokens, hidden]`, and reciprocal root mean square, f32 `[tokens]`.
    pub(crate) normed: View<D::Memory>,
    pub(crate) rstd: View<D::Memory>,
    /// Tokens to predict, u32 `[tokens]`.
    pub(crate) targets: View<D::Memory>,
    /// Gradient of the logits, bf16 `[tokens, vocab]`.
    pub(crate) dlogits: View<D::Memory>,
    /// Gradient of the residual stream that it reads, f32 `[tokens, hidden]`.
    pub(crate) dresidual: View<D::Memory>,
    /// f32 `[1]`.
    pub(crate) loss: View<D::Memory>,
}

/// Everything one micro-batch in flight owns. Of several sequence lengths each has its own views of the same memory.
pub(crate) struct Activations<D: Device> {
    /// u32 `[tokens]`.
    pub(crate) ids: View<D::Memory>,
    /// Residual stream before each module and after the last, f32 `[tokens, hidden]`.
    pub(crate) residual: Vec<View<D::Memory>>,
    /// One entry a module.
    pub(crate) saved: Vec<Saved<D>>,
    /// Of the next token, and those further on.
    pub(crate) predictions: Vec<Prediction<D>>,
    /// f32 `[tokens, vocab]`.
    pub(crate) logits: View<D::Memory>,
    /// Gradient of the residual stream, f32 `[tokens, hidden]`, updated in place; that of the last prediction, too.
    pub(crate) dresidual: View<D::Memory>,
    /// Scratch of a module: bf16 `[tokens, hidden]` twice, `[tokens, wide]` twice.
    pub(crate) narrow: [View<D::Memory>; 2],
    pub(crate) wide: [View<D::Memory>; 2],
    /// Scratch of a mixture of experts, if there is one.
    pub(crate) experts: Option<ExpertScratch<D>>,
}

/// Allocates what one micro-batch in flight owns, for the longest of `shapes`, and cuts views for each.
///
/// # Errors
/// Those of the device.
pub(crate) fn activations<D: Device>(
    device: &D,
    shapes: &[Extents],
    modules: &[Module],
    predictions: usize,
    slot: u32,
) -> Result<Vec<Activations<D>>, DeviceError> {
    let longest = shapes.iter().map(|extents| extents.tokens).max().unwrap_or(0);
    let memories: RefCell<Vec<View<D::Memory>>> = RefCell::default();
    let all = shapes.iter().map(|&extents| {
        let taken = Cell::new(0);
        // Every shape asks for the same buffers in the same order; the first allocates them.
        let new = |label: &str, a_token: u64, dtype: DType| {
            let mut memories = memories.borrow_mut();
            if taken.get() == memories.len() {
                memories.push(buffer(device, &format!("{label} slot{slot}"), a_token * longest, dtype)?);
            }
            taken.set(taken.get() + 1);
            memories[taken.get() - 1].slice(0, a_token * extents.tokens)
        };
        cut(extents, modules, predictions, &new)
    });
    all.collect()
}

/// Gives a buffer of so many elements a token.
type New<'a, D> = dyn Fn(&str, u64, DType) -> Result<View<<D as Device>::Memory>, DeviceError> + 'a;

fn cut<D: Device>(
    extents: Extents,
    modules: &[Module],
    predictions: usize,
    new: &New<'_, D>,
) -> Result<Activations<D>, DeviceError> {
    let Extents { hidden, ffn, experts, .. } = extents;
    let (bf16, f32) = (DType::Bf16, DType::F32);
    let residual = (0..=modules.len())
        .map(|at| new(&format!("residual{at}"), hidden, f32))
        .collect::<Result<Vec<_>, _>>()?;
    let saved = modules.iter().map(|module| saved(extents, module, new)).collect::<Result<_, _>>()?;
    let dresidual = new("dresidual", hidden, f32)?;
    let predict = |at: usize| {
        let last = at + 1 == predictions;
        Ok(Prediction {
            normed: new(&format!("final normed {at}"), hidden, bf16)?,
            rstd: new(&format!("final rstd {at}"), 1, f32)?,
            targets: new(&format!("targets {at}"), 1, DType::U32)?,
            dlogits: new(&format!("dlogits {at}"), VOCAB, bf16)?,
            dresidual: match last {
                true => dresidual.clone(),
                false => new(&format!("dresidual of prediction {at}"), hidden, f32)?,
            },
            loss: new(&format!("loss {at}"), 1, f32)?.slice(0, 1)?,
        })
    };
    let predictions = (0..predictions).map(predict).collect::<Result<_, DeviceError>>()?;
    let scratch = || {
        Ok(ExpertScratch {
            gates: new("expert dgates", experts, f32)?,
            logits: new("expert dlogits", experts, bf16)?,
            before: new("expert dbefore", experts * ffn, bf16)?,
            after: new("expert dafter", experts * ffn, bf16)?,
            given: new("expert dgiven", experts * hidden, bf16)?,
            dx: new("expert dx", hidden, f32)?,
        })
    };
    let any_moe = modules.iter().any(|module| module.kind == ModuleKind::Moe);
    let wide = ffn.max(3 * hidden);
    Ok(Activations {
        ids: new("ids", 1, DType::U32)?,
        residual,
        saved,
        predictions,
        logits: new("logits", VOCAB, f32)?,
        dresidual,
        narrow: [new("narrow 0", hidden, bf16)?, new("narrow 1", hidden, bf16)?],
        wide: [new("wide 0", wide, bf16)?, new("wide 1", wide, bf16)?],
        experts: any_moe.then(scratch).transpose()?,
    })
}

fn saved<D: Device>(extents: Extents, module: &Module, new: &New<'_, D>) -> Result<Saved<D>, DeviceError> {
    let Extents { hidden, ffn, experts, attention, .. } = extents;
    let (bf16, f32) = (DType::Bf16, DType::F32);
    let name = module.name();
    let new = |what: &str, a_token, dtype| new(&format!("{name} {what}"), a_token, dtype);
    let inner = match module.kind {
        ModuleKind::Attention => Inner::Attention {
            qkv: new("qkv", 3 * hidden, bf16)?,
            out: new("out", hidden, bf16)?,
            lse: new("lse", attention.heads, f32)?,
        },
        ModuleKind::Mlp => Inner::Mlp { before: new("before", ffn, bf16)?, after: new("after", ffn, bf16)? },
        ModuleKind::Moe => Inner::Moe(Experts {
            logits: new("logits", experts, f32)?,
            gates: new("gates", experts, f32)?,
            before: new("before", experts * ffn, bf16)?,
            after: new("after", experts * ffn, bf16)?,
            given: new("given", experts * hidden, bf16)?,
        }),
    };
    Ok(Saved { normed: new("normed", hidden, bf16)?, rstd: new("rstd", 1, f32)?, inner })
}

/// Writes floats into a buffer. Blocks the host.
///
/// # Errors
/// Those of the device.
pub(crate) fn write_f32<D: Device>(
    device: &D,
    stream: &D::Stream,
    view: &View<D::Memory>,
    values: &[f32],
) -> Result<(), DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    device.write(stream, view, &bytes)
}

/// Writes integers into a buffer. Blocks the host.
///
/// # Errors
/// Those of the device.
pub(crate) fn write_u32<D: Device>(
    device: &D,
    stream: &D::Stream,
    view: &View<D::Memory>,
    values: &[u32],
) -> Result<(), DeviceError> {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    device.write(stream, view, &bytes)
}

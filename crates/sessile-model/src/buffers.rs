//! Persistent buffers of the model: parameters, activations that backward reads, gradients.

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

/// Activations of one attention or MLP module that its backward reads.
pub(crate) struct Saved<D: Device> {
    /// Normalized input, bf16 `[tokens, hidden]`.
    pub(crate) normed: View<D::Memory>,
    /// Reciprocal root mean square, f32 `[tokens]`.
    pub(crate) rstd: View<D::Memory>,
    /// `[tokens, 3·hidden]` queries, keys, values, or `[tokens, ffn]` before the activation; bf16.
    pub(crate) wide: View<D::Memory>,
    /// `[tokens, hidden]` attention output, or `[tokens, ffn]` after the activation; bf16.
    pub(crate) inner: View<D::Memory>,
    /// Log-sum-exp of attention, f32 `[batch, heads, seq]`.
    pub(crate) lse: Option<View<D::Memory>>,
}

/// Everything one micro-batch in flight owns.
pub(crate) struct Activations<D: Device> {
    /// Residual stream before each module and after the last, f32 `[tokens, hidden]`.
    pub(crate) residual: Vec<View<D::Memory>>,
    /// One entry a module.
    pub(crate) saved: Vec<Saved<D>>,
    /// Final norm: output and reciprocal root mean square.
    pub(crate) final_normed: View<D::Memory>,
    pub(crate) final_rstd: View<D::Memory>,
    /// Gradient of the logits, bf16 `[tokens, vocab]`.
    pub(crate) dlogits: View<D::Memory>,
    /// Logits, f32.
    pub(crate) logits: View<D::Memory>,
    /// Gradient of the residual stream, f32 `[tokens, hidden]`, updated in place.
    pub(crate) dresidual: View<D::Memory>,
    /// Scratch of a module: bf16 `[tokens, hidden]` twice, `[tokens, wide]` twice.
    pub(crate) narrow: [View<D::Memory>; 2],
    pub(crate) wide: [View<D::Memory>; 2],
}

/// Allocates what one micro-batch in flight owns.
///
/// # Errors
/// Those of the device.
pub(crate) fn activations<D: Device>(
    device: &D,
    extents: Extents,
    modules: &[Module],
    slot: u32,
) -> Result<Activations<D>, DeviceError> {
    let Extents { tokens, hidden, ffn, attention } = extents;
    let new = |label: &str, elements, dtype| buffer(device, &format!("{label} slot{slot}"), elements, dtype);
    let residual = (0..=modules.len())
        .map(|at| new(&format!("residual{at}"), tokens * hidden, DType::F32))
        .collect::<Result<Vec<_>, _>>()?;
    let saved = modules
        .iter()
        .map(|module| {
            let name = module.name();
            let (wide, inner, lse) = match module.kind {
                ModuleKind::Attention => {
                    let lse = attention.batch * attention.heads * attention.seq;
                    (3 * hidden, hidden, Some(new(&format!("{name} lse"), lse, DType::F32)?))
                }
                ModuleKind::Mlp => (ffn, ffn, None),
            };
            Ok(Saved {
                normed: new(&format!("{name} normed"), tokens * hidden, DType::Bf16)?,
                rstd: new(&format!("{name} rstd"), tokens, DType::F32)?,
                wide: new(&format!("{name} wide"), tokens * wide, DType::Bf16)?,
                inner: new(&format!("{name} inner"), tokens * inner, DType::Bf16)?,
                lse,
            })
        })
        .collect::<Result<Vec<_>, DeviceError>>()?;
    let wide = tokens * ffn.max(3 * hidden);
    Ok(Activations {
        residual,
        saved,
        final_normed: new("final normed", tokens * hidden, DType::Bf16)?,
        final_rstd: new("final rstd", tokens, DType::F32)?,
        dlogits: new("dlogits", tokens * VOCAB, DType::Bf16)?,
        logits: new("logits", tokens * VOCAB, DType::F32)?,
        dresidual: new("dresidual", tokens * hidden, DType::F32)?,
        narrow: [
            new("narrow 0", tokens * hidden, DType::Bf16)?,
            new("narrow 1", tokens * hidden, DType::Bf16)?,
        ],
        wide: [new("wide 0", wide, DType::Bf16)?, new("wide 1", wide, DType::Bf16)?],
    })
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

//! Persistent buffers of the model: parameters, activations that backward reads, gradients.

use sessile_hal::{Device, DeviceError, View};
use sessile_plan::{DType, Domain};

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

//! What happens when one backward uses a weight more than once.

use serde::{Deserialize, Serialize};

/// What happens when one backward uses a weight more than once. The gradient is the sum of all uses under each policy;
/// rounding may differ between policies, never between eager execution and graphs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Repeat {
    /// Every use has buffers of its own, and they are in flight at once.
    Distinct,
    /// The reduce-scatter in flight is finished first, and its buffers serve the next use.
    #[default]
    Drain,
    /// Uses are added up locally in FP32, over all micro-batches of the step, and reduced once at its end: one
    /// reduce-scatter for all uses, and an FP32 buffer as large as the whole weight.
    ReduceOnce,
}

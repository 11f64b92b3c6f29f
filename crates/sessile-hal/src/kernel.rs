//! What a device can compute, and the shapes each kernel needs.
//!
//! The arithmetic is pinned where gradients are compared bit for bit: sums run in a fixed order, products and
//! sums in [`Kernel::AddScaled`] are each rounded to nearest, never contracted.

use sessile_plan::DType;

use crate::Access;
use crate::Access::{Read, ReadWrite, Write};

/// Whether a matrix is used as stored (row-major) or transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transpose {
    /// As stored.
    No,
    /// Rows and columns swapped.
    Yes,
}

/// What happens to the old value of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beta {
    /// It is replaced.
    Overwrite,
    /// The result is added to it.
    Accumulate,
}

/// `C[m, n] = op(A)[m, k] · op(B)[k, n]`, all row-major, sums in FP32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Rows of C.
    pub m: u64,
    /// Columns of C.
    pub n: u64,
    /// Inner extent.
    pub k: u64,
    /// A is stored `[m, k]`, or `[k, m]` if transposed.
    pub a: Transpose,
    /// B is stored `[k, n]`, or `[n, k]` if transposed.
    pub b: Transpose,
    /// What happens to the old C.
    pub beta: Beta,
}

/// Causal self-attention over `batch` sequences. `qkv` is `[batch·seq, 3·heads·head_dim]`: all queries, keys,
/// values of a token side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attention {
    /// Sequences.
    pub batch: u64,
    /// Tokens of a sequence.
    pub seq: u64,
    /// Heads.
    pub heads: u64,
    /// Elements of a head.
    pub head_dim: u64,
}

/// What experts give for each token, weighed by gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Combine {
    /// Number of tokens.
    pub tokens: u64,
    /// Number of experts.
    pub experts: u64,
    /// Columns.
    pub hidden: u64,
}

/// One AdamW step with decoupled weight decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Step number from 1, for bias correction.
    pub step: u32,
}

/// A computation. Each variant's operands are listed in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Kernel {
    /// `dst` (any dtype): every element becomes `value` (converted).
    Fill {
        /// The value.
        value: f32,
    },
    /// `src`, `dst`: same dtype and size.
    Copy,
    /// `src`, `dst`: bf16 to f32 or back (round to nearest even), same number of elements.
    Cast,
    /// `a`, `b`, `c`: a and b of one float dtype, c of any.
    Gemm(Gemm),
    /// `src` (bf16 or f32), `dst` f32: `dst += src`.
    Add,
    /// `src` (bf16 or f32), `dst` f32: `dst = dst + (scale * src)`, each operation rounded.
    AddScaled {
        /// The factor.
        scale: f32,
    },
    /// `src` (bf16 or f32) `[parts, n]`, `dst` f32 `[n]`: the sum of the parts in FP32, in order from part 0.
    SumParts {
        /// How many.
        parts: u64,
    },
    /// `dst` f32: `dst *= factor`.
    Scale {
        /// The factor.
        factor: f32,
    },
    /// `ids` u32 `[tokens]`, `table` bf16 (at least `vocab` rows of `hidden`), `out` f32 `[tokens, hidden]`.
    EmbeddingForward {
        /// Number of tokens.
        tokens: u64,
        /// Columns.
        hidden: u64,
        /// Valid ids are below this.
        vocab: u64,
    },
    /// `ids` u32 `[tokens]`, `dx` f32 `[tokens, hidden]`, `dtable` bf16 or f32 `[vocab, hidden]`: overwritten by
    /// the sum over tokens, in token order.
    EmbeddingBackward {
        /// Number of tokens.
        tokens: u64,
        /// Columns.
        hidden: u64,
        /// Rows of `dtable`.
        vocab: u64,
    },
    /// `x` f32 `[rows, cols]`, `weight` f32 `[cols]`, `y` bf16 `[rows, cols]`, `rstd` f32 `[rows]`.
    RmsNormForward {
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
        /// Added to the mean square.
        eps: f32,
    },
    /// `dy` bf16 `[rows, cols]`, `x` f32, `weight` f32, `rstd` f32, `dx` f32 (added to), `dweight` f32 (added to).
    RmsNormBackward {
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
    },
    /// `qkv` bf16, `out` bf16 `[tokens, heads·head_dim]`, `lse` f32 `[batch, heads, seq]`.
    AttentionForward(Attention),
    /// `dout` bf16, `qkv` bf16, `out` bf16, `lse` f32, `dqkv` bf16.
    AttentionBackward(Attention),
    /// `x` bf16, `y` bf16: `y = max(x, 0)²`.
    SquaredReluForward,
    /// `dy` bf16, `x` bf16, `dx` bf16.
    SquaredReluBackward,
    /// `logits` f32 `[tokens, experts]`, `gates` f32 `[tokens, experts]`: softmax over each row's `top_k` largest logits (of
    /// equal ones the first), 0 elsewhere.
    RouterForward {
        /// Rows.
        tokens: u64,
        /// Columns.
        experts: u64,
        /// Experts of a token, 1 to `experts`.
        top_k: u64,
    },
    /// `dgates` f32, `gates` f32, `dlogits` bf16: all `[tokens, experts]`; 0 where the gate is.
    RouterBackward {
        /// Rows.
        tokens: u64,
        /// Columns.
        experts: u64,
    },
    /// `gates` f32 `[tokens, experts]`, `y` bf16 `[experts, tokens, hidden]`, `out` bf16 `[tokens, hidden]`: the sum of
    /// gate times `y` over the experts whose gate is not 0, in FP32, in order of expert.
    CombineForward(Combine),
    /// `dout` bf16 `[tokens, hidden]`, `gates` f32, `y` bf16, `dy` bf16 `[experts, tokens, hidden]`, `dgates` f32
    /// `[tokens, experts]`: where a gate is 0, both gradients are.
    CombineBackward(Combine),
    /// `logits` f32 `[rows, classes]`, `targets` u32 `[rows]`, `loss` f32 `[1]` (mean over rows), `dlogits` bf16
    /// `[rows, classes]` (gradient of the mean, times `scale`).
    CrossEntropy {
        /// Rows.
        rows: u64,
        /// Columns.
        classes: u64,
        /// Factor on the gradient.
        scale: f32,
    },
    /// `grad` f32, `master` f32, `m` f32, `v` f32, `weight` bf16 (written from `master`): equal sizes.
    AdamW(AdamW),
    /// As [`Kernel::AdamW`] without the bf16 copy: `grad`, `master`, `m`, `v`.
    AdamWF32(AdamW),
    /// No operands: occupies its stream for about this long. For tests that widen a race window.
    Spin {
        /// How long.
        micros: u64,
    },
}

impl Kernel {
    /// Short name, as timelines show it.
    pub fn name(&self) -> &'static str {
        match self {
            Kernel::Fill { .. } => "fill",
            Kernel::Copy => "copy",
            Kernel::Cast => "cast",
            Kernel::Gemm(_) => "gemm",
            Kernel::Add => "add",
            Kernel::AddScaled { .. } => "add_scaled",
            Kernel::SumParts { .. } => "sum_parts",
            Kernel::Scale { .. } => "scale",
            Kernel::EmbeddingForward { .. } => "embedding_forward",
            Kernel::EmbeddingBackward { .. } => "embedding_backward",
            Kernel::RmsNormForward { .. } => "rms_norm_forward",
            Kernel::RmsNormBackward { .. } => "rms_norm_backward",
            Kernel::AttentionForward(_) => "attention_forward",
            Kernel::AttentionBackward(_) => "attention_backward",
            Kernel::SquaredReluForward => "squared_relu_forward",
            Kernel::SquaredReluBackward => "squared_relu_backward",
            Kernel::RouterForward { .. } => "router_forward",
            Kernel::RouterBackward { .. } => "router_backward",
            Kernel::CombineForward(_) => "combine_forward",
            Kernel::CombineBackward(_) => "combine_backward",
            Kernel::CrossEntropy { .. } => "cross_entropy",
            Kernel::AdamW(_) => "adamw",
            Kernel::AdamWF32(_) => "adamw_f32",
            Kernel::Spin { .. } => "spin",
        }
    }

    /// Checks dtypes and sizes of the operands; gives their accesses, or what was expected.
    pub(crate) fn check(&self, given: &[(DType, u64)]) -> Result<Vec<Access>, String> {
        use DType::{Bf16, F32, U32};
        let float = |at: usize| given.get(at).map(|g| g.0).filter(|d| *d != U32).unwrap_or(F32);
        let size = |at: usize| given.get(at).map_or(0, |g| g.1);
        // (dtype, elements, access) of each operand
        let expected: Vec<(DType, u64, Access)> = match *self {
            Kernel::Fill { .. } => vec![(given.first().map_or(F32, |g| g.0), size(0), Write)],
            Kernel::Copy => {
                let dtype = given.first().map_or(F32, |g| g.0);
                vec![(dtype, size(0), Read), (dtype, size(0), Write)]
            }
            Kernel::Cast => {
                let from = float(0);
                vec![(from, size(0), Read), (if from == Bf16 { F32 } else { Bf16 }, size(0), Write)]
            }
            Kernel::Gemm(g) => {
                let (a, b, c) = (product(&[g.m, g.k])?, product(&[g.k, g.n])?, product(&[g.m, g.n])?);
                let access = if g.beta == Beta::Accumulate { ReadWrite } else { Write };
                vec![(float(0), a, Read), (float(0), b, Read), (float(2), c, access)]
            }
            Kernel::Add | Kernel::AddScaled { .. } => {
                vec![(float(0), size(0), Read), (F32, size(0), ReadWrite)]
            }
            Kernel::SumParts { parts } => {
                if parts == 0 {
                    return Err("one part or more".to_owned());
                }
                vec![(float(0), product(&[parts, size(1)])?, Read), (F32, size(1), Write)]
            }
            Kernel::Scale { .. } => vec![(F32, size(0), ReadWrite)],
            Kernel::EmbeddingForward { tokens, hidden, vocab } => {
                let table = product(&[vocab, hidden])?;
                vec![(U32, tokens, Read), (Bf16, table, Read), (F32, product(&[tokens, hidden])?, Write)]
            }
            Kernel::EmbeddingBackward { tokens, hidden, vocab } => vec![
                (U32, tokens, Read),
                (F32, product(&[tokens, hidden])?, Read),
                (float(2), product(&[vocab, hidden])?, Write),
            ],
            Kernel::RmsNormForward { rows, cols, .. } => {
                let all = product(&[rows, cols])?;
                vec![(F32, all, Read), (F32, cols, Read), (Bf16, all, Write), (F32, rows, Write)]
            }
            Kernel::RmsNormBackward { rows, cols } => {
                let all = product(&[rows, cols])?;
                vec![
                    (Bf16, all, Read),
                    (F32, all, Read),
                    (F32, cols, Read),
                    (F32, rows, Read),
                    (F32, all, ReadWrite),
                    (F32, cols, ReadWrite),
                ]
            }
            Kernel::AttentionForward(a) => {
                let (out, lse) =
                    (product(&[a.batch, a.seq, a.heads, a.head_dim])?, product(&[a.batch, a.heads, a.seq])?);
                vec![(Bf16, product(&[3, out])?, Read), (Bf16, out, Write), (F32, lse, Write)]
            }
            Kernel::AttentionBackward(a) => {
                let (out, lse) =
                    (product(&[a.batch, a.seq, a.heads, a.head_dim])?, product(&[a.batch, a.heads, a.seq])?);
                let qkv = product(&[3, out])?;
                vec![
                    (Bf16, out, Read),
                    (Bf16, qkv, Read),
                    (Bf16, out, Read),
                    (F32, lse, Read),
                    (Bf16, qkv, Write),
                ]
            }
            Kernel::SquaredReluForward => vec![(Bf16, size(0), Read), (Bf16, size(0), Write)],
            Kernel::SquaredReluBackward => {
                vec![(Bf16, size(0), Read), (Bf16, size(0), Read), (Bf16, size(0), Write)]
            }
            Kernel::RouterForward { tokens, experts, top_k } => {
                if top_k == 0 || top_k > experts {
                    return Err(format!("top_k of 1 to {experts}"));
                }
                let all = product(&[tokens, experts])?;
                vec![(F32, all, Read), (F32, all, Write)]
            }
            Kernel::RouterBackward { tokens, experts } => {
                let all = product(&[tokens, experts])?;
                vec![(F32, all, Read), (F32, all, Read), (Bf16, all, Write)]
            }
            Kernel::CombineForward(c) => {
                let (gates, y, out) = c.sizes()?;
                vec![(F32, gates, Read), (Bf16, y, Read), (Bf16, out, Write)]
            }
            Kernel::CombineBackward(c) => {
                let (gates, y, out) = c.sizes()?;
                vec![
                    (Bf16, out, Read),
                    (F32, gates, Read),
                    (Bf16, y, Read),
                    (Bf16, y, Write),
                    (F32, gates, Write),
                ]
            }
            Kernel::CrossEntropy { rows, classes, .. } => {
                let all = product(&[rows, classes])?;
                vec![(F32, all, Read), (U32, rows, Read), (F32, 1, Write), (Bf16, all, Write)]
            }
            Kernel::AdamW(_) => {
                let n = size(0);
                vec![
                    (F32, n, Read),
                    (F32, n, ReadWrite),
                    (F32, n, ReadWrite),
                    (F32, n, ReadWrite),
                    (Bf16, n, Write),
                ]
            }
            Kernel::AdamWF32(_) => {
                let n = size(0);
                vec![(F32, n, Read), (F32, n, ReadWrite), (F32, n, ReadWrite), (F32, n, ReadWrite)]
            }
            Kernel::Spin { .. } => vec![],
        };
        let fits = expected.len() == given.len()
            && expected.iter().zip(given).all(|(want, have)| want.0 == have.0 && want.1 == have.1);
        if fits {
            Ok(expected.into_iter().map(|(_, _, access)| access).collect())
        } else {
            let want: Vec<String> = expected.iter().map(|(dtype, n, _)| format!("{dtype}[{n}]")).collect();
            Err(want.join(", "))
        }
    }
}

impl Combine {
    /// Elements of gates, of what the experts give, of the result.
    fn sizes(&self) -> Result<(u64, u64, u64), String> {
        let Combine { tokens, experts, hidden } = *self;
        Ok((product(&[tokens, experts])?, product(&[experts, tokens, hidden])?, product(&[tokens, hidden])?))
    }
}

fn product(extents: &[u64]) -> Result<u64, String> {
    extents
        .iter()
        .try_fold(1u64, |all, &extent| all.checked_mul(extent))
        .ok_or_else(|| format!("fewer than 2^64 elements in {extents:?}"))
}

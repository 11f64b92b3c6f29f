//! Requests: the buffers that a runner needs, as the discovery pass saw them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{format::at_most, limits::RANK_MAX};

/// Alignment of every view inside an arena, in bytes.
pub const VIEW_ALIGN: u64 = 256;

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// IEEE 754 single precision.
    F32,
    /// 32-bit unsigned integer (tokens, counters).
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> u64 {
        match self {
            DType::Bf16 => 2,
            DType::F32 | DType::U32 => 4,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::Bf16 => "bf16",
            DType::F32 => "f32",
            DType::U32 => "u32",
        })
    }
}

/// Where storage must come from.
///
/// Two communicators over the same ranks are two domains: the group's *name* identifies it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Domain {
    /// The device allocator.
    Default,
    /// Memory registered as a window with exactly this group's communicator.
    Symmetric(String),
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Domain::Default => f.write_str("default"),
            Domain::Symmetric(group) => write!(f, "symmetric({group})"),
        }
    }
}

/// What a buffer is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Padded reduce-scatter input: the wgrad GEMM writes it, its tail rows are zero.
    WgradInput,
    /// Output of an asynchronous reduce-scatter, in the wire dtype.
    RsOutput,
    /// Receive side of the FP32-accumulation all-to-all.
    A2aScratch,
    /// FP32 sum of the FP32-accumulation all-to-all, in place of `rs_output`.
    Fp32Output,
    /// All-gather output: a whole padded weight.
    GatheredWeight,
    /// A role the user named.
    User(String),
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::WgradInput => "wgrad_input",
            Role::RsOutput => "rs_output",
            Role::A2aScratch => "a2a_scratch",
            Role::Fp32Output => "fp32_output",
            Role::GatheredWeight => "gathered_weight",
            Role::User(name) => name,
        })
    }
}

/// Identity of a request inside one trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u32);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// What a capture must ask for again, in the same order, to get the planned view.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestSpec {
    /// The weight (or other owner) the buffer serves, for people.
    pub weight: String,
    /// What the buffer is for.
    pub role: Role,
    /// Element type.
    pub dtype: DType,
    /// Shape as allocated (padded).
    #[serde(deserialize_with = "at_most::<_, _, RANK_MAX>")]
    pub shape: Vec<u64>,
    /// Shape before padding and sharding. The `ring:N` baseline keys its slots by it.
    #[serde(deserialize_with = "at_most::<_, _, RANK_MAX>")]
    pub unsharded_shape: Vec<u64>,
    /// Where the bytes must come from.
    pub domain: Domain,
    /// The process group whose collective uses the buffer, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Which expert of a batch, for expert weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert: Option<u32>,
    /// The accumulator (a `main_grad`) that this buffer's last reader adds into. Requests that name the same
    /// accumulator must be used in launch order even where they share no bytes, so that additions happen in
    /// the same order as in eager execution.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accumulates_into: Option<String>,
}

impl RequestSpec {
    /// Logical bytes: elements times element size. `None` if that overflows `u64`.
    pub fn bytes(&self) -> Option<u64> {
        self.shape.iter().try_fold(self.dtype.size(), |bytes, &extent| bytes.checked_mul(extent))
    }

    /// Logical bytes rounded up to [`VIEW_ALIGN`]. `None` if that overflows `u64`.
    pub fn aligned_bytes(&self) -> Option<u64> {
        self.bytes()?.checked_next_multiple_of(VIEW_ALIGN)
    }
}

impl fmt::Display for RequestSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}{:?} in {}", self.weight, self.role, self.dtype, self.shape, self.domain)?;
        if let Some(expert) = self.expert {
            write!(f, " (expert {expert})")?;
        }
        Ok(())
    }
}

/// One buffer that a runner needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RequestForm")]
pub struct Request {
    /// Identity inside the trace.
    pub id: RequestId,
    /// What is asked for.
    #[serde(flatten)]
    pub spec: RequestSpec,
}

/// A request as it is read. Written out field by field, because serde lets unknown fields pass through `flatten`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestForm {
    id: RequestId,
    weight: String,
    role: Role,
    dtype: DType,
    #[serde(deserialize_with = "at_most::<_, _, RANK_MAX>")]
    shape: Vec<u64>,
    #[serde(deserialize_with = "at_most::<_, _, RANK_MAX>")]
    unsharded_shape: Vec<u64>,
    domain: Domain,
    #[serde(default)]
    group: Option<String>,
    #[serde(default)]
    expert: Option<u32>,
    #[serde(default)]
    accumulates_into: Option<String>,
}

impl From<RequestForm> for Request {
    fn from(form: RequestForm) -> Request {
        let RequestForm {
            id,
            weight,
            role,
            dtype,
            shape,
            unsharded_shape,
            domain,
            group,
            expert,
            accumulates_into,
        } = form;
        let spec = RequestSpec {
            weight,
            role,
            dtype,
            shape,
            unsharded_shape,
            domain,
            group,
            expert,
            accumulates_into,
        };
        Request { id, spec }
    }
}

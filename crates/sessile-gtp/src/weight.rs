//! A sharded weight and the storage it asks for.

use sessile_hal::{Device, View};
use sessile_plan::{DType, Domain, RequestSpec, Role};

use crate::{ChainKind, GroupId, Repeat, Shard, group::Group};

/// Index of a weight in its [`Gtp`](crate::Gtp).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub(crate) usize);

impl WeightId {
    /// Its place in [`Gtp::weights`](crate::Gtp::weights).
    pub fn index(self) -> usize {
        self.0
    }
}

/// A weight to be.
#[derive(Clone, Debug)]
pub struct WeightSpec<'a> {
    /// Unique name.
    pub name: &'a str,
    /// Rows of each matrix.
    pub rows: u64,
    /// Columns of each matrix.
    pub cols: u64,
    /// The group it is sharded over.
    pub group: GroupId,
    /// The chain it belongs to.
    pub chain: ChainKind,
    /// Dtype of its gradient on the wire.
    pub wgrad_dtype: DType,
    /// `None`: one matrix. Some: a matrix for each of so many experts, which are gathered and reduced as one batch.
    pub experts: Option<u32>,
    /// How often one runner uses it, or if it is eager one micro-batch's backward.
    pub uses: u32,
    /// What happens when it is used more than once.
    pub repeat: Repeat,
}

/// One matrix of a weight, of which this rank holds one shard.
#[derive(Debug)]
pub struct Part<D: Device> {
    /// Unique name: that of the weight, with the expert's number if it has any.
    pub name: String,
    /// The expert's number.
    pub expert: Option<u32>,
    /// This rank's shard, bf16 `[padded_rows / G, cols]`.
    pub value: View<D::Memory>,
    /// This rank's accumulated gradient, f32 `[padded_rows / G, cols]`.
    pub main_grad: View<D::Memory>,
    /// Local sum of its uses in a step, f32 `[padded_rows, cols]`; only with [`Repeat::ReduceOnce`].
    pub(crate) sum: Option<View<D::Memory>>,
}

/// One or more matrices `[rows, cols]` that travel together.
#[derive(Debug)]
pub struct Weight<D: Device> {
    /// Unique name.
    pub name: String,
    /// Geometry of each matrix.
    pub shard: Shard,
    /// The group it is sharded over.
    pub group: GroupId,
    /// The chain it belongs to.
    pub chain: ChainKind,
    /// Dtype of its gradient on the wire.
    pub wgrad_dtype: DType,
    /// How often one runner uses it, or if it is eager one micro-batch's backward.
    pub uses: u32,
    /// What happens when it is used more than once.
    pub repeat: Repeat,
    /// Its matrices: one, or one an expert.
    pub parts: Vec<Part<D>>,
}

impl<D: Device> Weight<D> {
    /// This rank's accumulated gradients, one a matrix.
    pub fn main_grads(&self) -> impl Iterator<Item = &View<D::Memory>> {
        self.parts.iter().map(|part| &part.main_grad)
    }

    /// Whether uses are added up locally and reduced at the end of the step.
    pub(crate) fn reduces_once(&self) -> bool {
        self.repeat == Repeat::ReduceOnce
    }

    /// Whether the buffers of one use serve the next.
    pub(crate) fn reuses_buffers(&self) -> bool {
        self.uses > 1 && self.repeat == Repeat::Drain
    }

    fn spec(&self, part: &Part<D>, role: Role, dtype: DType, rows: u64) -> RequestSpec {
        RequestSpec {
            weight: part.name.clone(),
            role,
            dtype,
            shape: vec![rows, self.shard.cols],
            unsharded_shape: vec![self.shard.rows, self.shard.cols],
            domain: Domain::Default,
            group: None,
            expert: part.expert,
            accumulates_into: None,
        }
    }

    /// All-gather output, bf16 `[padded_rows, cols]`. It needs no registered memory, but lies where the gradients do, so
    /// that both share bytes.
    pub(crate) fn gathered_spec(&self, part: &Part<D>, group: &Group<D>) -> RequestSpec {
        let spec = self.spec(part, Role::GatheredWeight, DType::Bf16, self.shard.padded_rows());
        let domain = group.kind.input_domain(&group.name);
        RequestSpec { domain, group: Some(group.name.clone()), ..spec }
    }

    /// Gradient of one use that is added up locally, in the wire dtype, `[padded_rows, cols]`.
    pub(crate) fn local_spec(&self, part: &Part<D>) -> RequestSpec {
        self.spec(part, Role::WgradInput, self.wgrad_dtype, self.shard.padded_rows())
    }

    /// Reduce-scatter input in the wire dtype, `[padded_rows, cols]`.
    pub(crate) fn input_spec(&self, part: &Part<D>, group: &Group<D>) -> RequestSpec {
        let domain = group.kind.input_domain(&group.name);
        RequestSpec { domain, group: Some(group.name.clone()), ..self.local_spec(part) }
    }

    /// Receive side of the all-to-all, in the wire dtype, `[padded_rows, cols]`.
    pub(crate) fn scratch_spec(&self, part: &Part<D>, group: &Group<D>) -> RequestSpec {
        let spec = self.spec(part, Role::A2aScratch, self.wgrad_dtype, self.shard.padded_rows());
        RequestSpec { group: Some(group.name.clone()), ..spec }
    }

    /// Sum of the all-to-all, f32 `[padded_rows / G, cols]`.
    pub(crate) fn fp32_spec(&self, part: &Part<D>) -> RequestSpec {
        let spec = self.spec(part, Role::Fp32Output, DType::F32, self.shard.shard_rows());
        RequestSpec { accumulates_into: Some(part.name.clone()), ..spec }
    }

    /// Reduce-scatter output in the wire dtype, `[padded_rows / G, cols]`.
    pub(crate) fn output_spec(&self, part: &Part<D>, group: &Group<D>) -> RequestSpec {
        let spec = self.spec(part, Role::RsOutput, self.wgrad_dtype, self.shard.shard_rows());
        RequestSpec {
            domain: group.kind.output_domain(&group.name),
            group: Some(group.name.clone()),
            accumulates_into: Some(part.name.clone()),
            ..spec
        }
    }
}

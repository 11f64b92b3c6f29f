//! A sharded weight and the storage it asks for.

use sessile_hal::{Device, View};
use sessile_plan::{DType, Domain, RequestSpec, Role};

use crate::{ChainKind, Shard};

/// Index of a weight in its [`Gtp`](crate::Gtp).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightId(pub usize);

/// One weight `[rows, cols]` of which this rank holds one shard.
#[derive(Debug)]
pub struct Weight<D: Device> {
    /// Unique name.
    pub name: String,
    /// Its geometry.
    pub shard: Shard,
    /// The group it is sharded over.
    pub group: String,
    /// The chain it belongs to.
    pub chain: ChainKind,
    /// Dtype of its gradient on the wire.
    pub wgrad_dtype: DType,
    /// This rank's shard, bf16 `[padded_rows / G, cols]`.
    pub value: View<D::Memory>,
    /// This rank's accumulated gradient, f32 `[padded_rows / G, cols]`.
    pub main_grad: View<D::Memory>,
}

impl<D: Device> Weight<D> {
    fn spec(&self, role: Role, dtype: DType, rows: u64) -> RequestSpec {
        RequestSpec {
            weight: self.name.clone(),
            role,
            dtype,
            shape: vec![rows, self.shard.cols],
            unsharded_shape: vec![self.shard.rows, self.shard.cols],
            domain: Domain::Default,
            group: Some(self.group.clone()),
            expert: None,
            accumulates_into: None,
        }
    }

    /// All-gather output, bf16 `[padded_rows, cols]`.
    pub(crate) fn gathered_spec(&self) -> RequestSpec {
        self.spec(Role::GatheredWeight, DType::Bf16, self.shard.padded_rows())
    }

    /// Reduce-scatter input in the wire dtype, `[padded_rows, cols]`.
    pub(crate) fn wgrad_spec(&self) -> RequestSpec {
        self.spec(Role::WgradInput, self.wgrad_dtype, self.shard.padded_rows())
    }

    /// Reduce-scatter output in the wire dtype, `[padded_rows / G, cols]`.
    pub(crate) fn output_spec(&self) -> RequestSpec {
        let mut spec = self.spec(Role::RsOutput, self.wgrad_dtype, self.shard.shard_rows());
        spec.accumulates_into = Some(self.name.clone());
        spec
    }
}

//! The order in which weights are gathered.
//!
//! Graphed and eager weights form chains of their own that never link: a graph cannot wait for a gather that eager
//! code started, nor the other way round.

use sessile_hal::Device;
use sessile_runtime::{Marker, Slot};

use crate::WeightId;

/// Whether a weight is used inside captured graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ChainKind {
    /// By eager code.
    Eager,
    /// By runners.
    Graphed,
}

/// Direction of a pass over the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Activations.
    Forward,
    /// Gradients.
    Backward,
}

/// A gather under way or done.
#[derive(Debug)]
pub(crate) struct Gathered<D: Device> {
    pub(crate) weight: WeightId,
    pub(crate) slot: Slot<D>,
    /// Recorded after the all-gather; `None` once a completion point has waited for it.
    pub(crate) ready: Option<Marker<D>>,
    /// The runner that started it.
    pub(crate) runner: Option<String>,
}

impl<D: Device> Gathered<D> {
    /// Another handle of a gather whose view is planned.
    pub(crate) fn share(&self) -> Option<Self> {
        Some(Gathered {
            weight: self.weight,
            slot: self.slot.share()?,
            ready: self.ready.clone(),
            runner: self.runner.clone(),
        })
    }
}

/// A reduce-scatter under way.
#[derive(Debug)]
pub(crate) struct Reducing<D: Device> {
    pub(crate) weight: WeightId,
    pub(crate) output: Slot<D>,
    pub(crate) done: Marker<D>,
}

/// One chain: the order of its weights, and what is in flight.
#[derive(Debug)]
pub(crate) struct Chain<D: Device> {
    pub(crate) forward: Vec<WeightId>,
    pub(crate) backward: Vec<WeightId>,
    pub(crate) gathered: Option<Gathered<D>>,
    pub(crate) reducing: Option<Reducing<D>>,
}

impl<D: Device> Chain<D> {
    pub(crate) fn new() -> Self {
        Chain { forward: Vec::new(), backward: Vec::new(), gathered: None, reducing: None }
    }

    /// The weight after `weight` in this pass.
    pub(crate) fn next(&self, pass: Pass, weight: WeightId) -> Option<WeightId> {
        let order = match pass {
            Pass::Forward => &self.forward,
            Pass::Backward => &self.backward,
        };
        let at = order.iter().position(|&other| other == weight)?;
        order.get(at + 1).copied()
    }
}

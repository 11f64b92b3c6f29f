//! The order in which weights are gathered.
//!
//! Graphed and eager weights form chains of their own that never link: a graph cannot wait for a gather that eager
//! code started, nor the other way round.

use std::collections::BTreeMap;

use sessile_hal::Device;
use sessile_runtime::{Marker, Slot};

use crate::{WeightId, reduce::Buffers};

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

/// A gather under way or done, a slot a matrix.
#[derive(Debug)]
pub(crate) struct Prefetched<D: Device> {
    pub(crate) weight: WeightId,
    pub(crate) slots: Vec<Slot<D>>,
    /// Recorded after the all-gather; `None` once a completion point has waited for it.
    pub(crate) ready: Option<Marker<D>>,
    /// The runner that started it.
    pub(crate) runner: Option<String>,
}

impl<D: Device> Prefetched<D> {
    /// Another handle of a gather whose views are planned.
    pub(crate) fn share(&self) -> Option<Self> {
        Some(Prefetched {
            weight: self.weight,
            slots: self.slots.iter().map(Slot::share).collect::<Option<_>>()?,
            ready: self.ready.clone(),
            runner: self.runner.clone(),
        })
    }
}

/// A reduce-scatter under way.
#[derive(Debug)]
pub(crate) struct Reducing<D: Device> {
    pub(crate) weight: WeightId,
    pub(crate) buffers: Buffers<D>,
    /// Whether the buffers serve a later use.
    pub(crate) kept: bool,
    pub(crate) done: Marker<D>,
}

/// The uses of weights in one pass, in order; a weight may appear more than once.
#[derive(Debug, Default)]
pub(crate) struct Order {
    uses: Vec<WeightId>,
    /// Index of the use that comes next.
    cursor: usize,
}

impl Order {
    pub(crate) fn new(uses: Vec<WeightId>) -> Self {
        Order { uses, cursor: 0 }
    }

    pub(crate) fn restart(&mut self) {
        self.cursor = 0;
    }

    /// Steps behind the next use of `weight`, wherever the pass stands, and gives the weight used after that.
    pub(crate) fn pass(&mut self, weight: WeightId) -> Option<WeightId> {
        let len = self.uses.len();
        let at = (0..len).map(|step| (self.cursor + step) % len).find(|&at| self.uses[at] == weight)?;
        self.cursor = at + 1;
        self.uses.get(self.cursor).copied()
    }
}

/// One chain: the order of its weights, and what is in flight.
#[derive(Debug)]
pub(crate) struct Chain<D: Device> {
    pub(crate) forward: Order,
    pub(crate) backward: Order,
    pub(crate) gathered: Option<Prefetched<D>>,
    pub(crate) reducing: Option<Reducing<D>>,
    /// Buffers of finished uses that serve the next one.
    pub(crate) kept: BTreeMap<WeightId, Buffers<D>>,
    /// Uses since the runner or eager backward began, of weights that are used more than once.
    pub(crate) uses: BTreeMap<WeightId, u32>,
}

impl<D: Device> Chain<D> {
    pub(crate) fn new() -> Self {
        Chain {
            forward: Order::default(),
            backward: Order::default(),
            gathered: None,
            reducing: None,
            kept: BTreeMap::new(),
            uses: BTreeMap::new(),
        }
    }

    pub(crate) fn order(&mut self, pass: Pass) -> &mut Order {
        match pass {
            Pass::Forward => &mut self.forward,
            Pass::Backward => &mut self.backward,
        }
    }

    /// Lets go of what a pass that failed left in flight.
    pub(crate) fn give_up(&mut self) {
        (self.gathered, self.reducing) = (None, None);
        self.kept.clear();
        self.uses.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_weight_is_found_at_its_next_use() {
        let [a, b, c] = [0, 1, 2].map(WeightId);
        let mut order = Order::new(vec![a, a, b, a, c]);
        assert_eq!(
            [a, a, b, a, c].map(|weight| order.pass(weight)),
            [Some(a), Some(b), Some(a), Some(c), None]
        );
        // The next pass begins anew, also after one that was given up.
        assert_eq!(order.pass(a), Some(a));
        assert_eq!(order.pass(c), None);
        assert_eq!(order.pass(b), Some(a));
        order.restart();
        assert_eq!(order.pass(a), Some(a));
        assert_eq!(order.pass(WeightId(9)), None);
        assert_eq!(Order::default().pass(a), None);
    }
}

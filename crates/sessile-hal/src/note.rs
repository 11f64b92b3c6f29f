//! What a device is told besides work: for those that keep a log. Devices themselves ignore it.

use crate::View;

/// A view that a plan gave to a runner.
#[derive(Clone, Debug)]
pub struct NotedView<M> {
    /// The request, for people.
    pub label: String,
    /// The bytes.
    pub view: View<M>,
    /// Bytes of the view that hold the tensor; the rest is padding, which a reduce-scatter must find zero.
    pub logical_bytes: u64,
}

/// Something that happened on this rank, in program order.
#[derive(Debug)]
pub enum Note<'a, M, G> {
    /// A training step begins. Steps of one name do the same work; what follows an empty name is compared with nothing.
    Step(&'a str),
    /// Eager work from here on is the discovery of this runner; `None`: of none.
    Discovering(Option<&'a str>),
    /// A plan was sealed over these arenas: from here on nothing is allocated in registered memory, nor registered.
    Sealed(&'a [M]),
    /// A runner was captured, with these views.
    Captured {
        /// Its name.
        runner: &'a str,
        /// Its graph.
        graph: &'a G,
        /// Its own views, and those of earlier runners that it uses.
        views: Vec<NotedView<M>>,
    },
    /// The sealed plan was given up; its views must not be used any more.
    Released,
    /// The order of additions into this allocation matters.
    Accumulator(&'a M),
    /// A weight's gradient became ready.
    Ready(&'a str),
}

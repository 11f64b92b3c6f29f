//! Tickets of enqueued work, and when it ran.

use std::fmt;

/// Number of an enqueue on one rank's device, in program order, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// When one operation ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The enqueue, or the launch of the graph.
    pub ticket: Ticket,
    /// The node of the launched graph.
    pub node: Option<u32>,
    /// Begin on the device's clock, in nanoseconds (or steps of a scheduler).
    pub begin: u64,
    /// End on the device's clock.
    pub end: u64,
}

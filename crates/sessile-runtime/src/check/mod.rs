//! The happens-before checker: reads an event log and reports every fault of order in it, and some of content.
//!
//! It shares no code with the planner or with any device's scheduler. It knows what was enqueued and the launch
//! semantics of the device contract (`sessile_hal`), and of plans only which views the log
//! says a graph was given: nothing of fences or durations.
//!
//! # The order it proves
//!
//! ```text
//!   host     ──●────────────●──────────●───────▶   program order; a wait or an exchange joins what it met
//!              │ enqueue     ▲ wait     │ exchange: all members' hosts meet
//!   stream 0 ──▼──[op]──[launch(──n0──n1──)]──▶   a launch: after the tail, before what follows;
//!                             ╲                    its nodes by their edges alone
//!   stream 1 ─────────────[record]··▶[wait]──▶    a wait follows the latest record enqueued before it
//!   peer     ──────────────(start)───(end)────▶   every member's start precedes every member's end
//! ```
//!
//! - An enqueue follows what the host had waited for, and the tail of its stream.
//! - Launches of one graph are serial, on any streams. A launch enqueues its nodes in node order, which is the order
//!   of capture: a wait node sees the latest record enqueued before it, by older entries or by an earlier node of its
//!   own graph. Never recorded: no edge.
//! - A rank's n-th collective of a communicator starts after its (n-1)-th ended; numbers go by enqueue order, nodes
//!   of a graph in node order at launch. Every member's start precedes every member's end; one member's end
//!   precedes no other member's end.
//! - An access belongs to its operation's own part, on its own rank, wherever the bytes are.
//!
//! # How, and why nothing slips past
//!
//! The log becomes a directed graph of *points* (`order`): operations, starts and ends of collectives, the meeting
//! of their parts, entry and exit of launches. Points are taken in a topological order (`engine`), each with a
//! *vector clock* over chains (`lanes`): entry c says how many operations of chain c have ended before the point
//! starts. A chain is a set of operations that are ordered one after the other: one stream's eager work, one host,
//! or one path through a graph, continued over its launches, since those are serial. So one number per chain tells
//! all that precedes: operation A, the k-th of its chain c, precedes B exactly if B's start clock has at least k at
//! c. For every byte (`bytes`) the accesses that may still matter are kept as *marks*; each new access is compared
//! with all of them.
//!
//! *Sound*: a pair is reported only if the clock says that neither precedes the other. B does not precede A, since
//! A came first in the topological order.
//!
//! *Complete*: for every byte and every operation B on it that conflicts with some earlier-taken operation
//! unordered with it, **B is reported with at least one partner on that byte**. A mark A is dropped in two cases
//! only. (1) A write W that A precedes came to the byte. If A is unordered with a later B, so is W: W before B would
//! put A before B, and B cannot precede W, which was taken first. And W conflicts with B whatever B does. (2) A
//! later access A' of the same chain and kind took its place; by the same argument A' is unordered with B, and it
//! conflicts with whatever A conflicts with. The substitute has a mark, or was dropped for a substitute of its own,
//! taken later still; so when B comes, one of them is there. Marks that race are never dropped for it.
//! Hence no fault means no unordered conflicting pair, and repairing what is reported and checking again ends with
//! none.
//!
//! # Rules besides order
//!
//! What bytes hold (`content`): nobody reads what was not written since its allocation, padding is zero at a
//! reduce-scatter, additions into an accumulator come in the order of the first step of the same name. What a rank's
//! program may do when (`program`): graphs keep to the views of their plan, nothing is registered after the seal, no
//! view is used after its plan, gradients become ready as often as in the first step. What windows are for
//! (`windows`): exactly their group, at equal places on all ranks. And what a graph waits for (`waits`): only graphs
//! with which it shares bytes behind the wait.
//!
//! # What it does not do
//!
//! It reports one pair of operations once, with a count, however often their graphs were replayed. Behind a reported
//! pair (W, B) there can be others (A, B) with A before W: repairing W may bring them up. It does not look at
//! values, and at padding only inside graphs, whose views the log names.

mod bytes;
mod content;
mod engine;
mod lanes;
mod order;
mod overlap;
mod program;
mod report;
mod tally;
mod waits;
mod windows;

pub use overlap::{Overlap, overlap};
pub use report::{Hazard, MemoryName, Operation, Reason, Report, Violation};

pub(crate) use lanes::cover;

use crate::log::Log;

/// Checks a log. Never panics: a log that is not well-formed, or too large, is a violation of its own.
pub fn check(log: &Log) -> Report {
    let mut report = Report::of(log);
    let order = log.validate().map_err(|error| Box::new(Reason::Malformed { text: error.to_string() }));
    match order.and_then(|()| order::Order::of(log)) {
        Ok(order) => engine::run(log, &order, &mut report),
        Err(reason) => report.violations.push(Violation { reason: *reason, count: 1 }),
    }
    report
}

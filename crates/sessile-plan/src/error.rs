//! Errors of reading traces and making plans.

use crate::request::RequestId;

/// What can go wrong between a trace and a plan. Every variant is caused by the input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A strategy's name was not understood.
    #[error("unknown strategy `{text}`: use sessile, generations:N, ring:N or per-request (N from 1 to 1024)")]
    UnknownStrategy {
        /// What was given, shortened.
        text: String,
    },
    /// The requests do not fit a ring of this many slots.
    #[error(
        "ring:{slots} cannot capture runner `{runner}`: it writes {writers} live inputs of one shape \
         ({first} is the first); use ring:{writers}, generations:N or sessile"
    )]
    RingTooSmall {
        /// Slots asked for.
        slots: u32,
        /// The runner that needs more.
        runner: String,
        /// Inputs of one shape that it writes.
        writers: u32,
        /// The first of them.
        first: RequestId,
    },
}

//! Tests of the event log, the happens-before checker, and timelines.

mod build;
mod contents;
mod counts;
mod hostile;
mod large;
mod lives;
mod naive;
mod random;
mod recorded;
mod rules;
mod schema;
mod timelines;

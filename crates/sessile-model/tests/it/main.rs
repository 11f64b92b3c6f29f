//! Training runs: eager and captured execution compared to the bit, fences taken away, orders changed.
#![allow(missing_docs, clippy::print_stdout, reason = "tests")]

mod bench;
mod cover;
mod equality;
mod fences;
mod kinds;
mod orders;
mod overlap;
mod padding;
mod refusal;
mod simulate;
mod support;

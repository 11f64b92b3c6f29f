//! All integration tests of sessile-plan, in one binary.
#![allow(clippy::print_stderr, reason = "counts and times are for whoever runs the tests")]

mod baselines;
mod digests;
mod errors;
mod exhaustive;
mod fences;
mod formats;
mod generate;
mod hostile;
mod models;
mod packing;
mod properties;
mod reasons;
mod repeats;
mod replay;
mod scale;
mod support;

//! What needs a GPU. Without one, each test says that it was skipped and why.

#![allow(clippy::print_stderr, reason = "a test says why it was skipped")]

mod collectives;
mod conformance;
mod kernels;
mod oneshot;
mod worlds;

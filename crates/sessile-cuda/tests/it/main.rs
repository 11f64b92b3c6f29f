//! What can be tested without a GPU.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test says why it was skipped, and what it measured"
)]

mod kernels;
mod ordering;
mod sass;

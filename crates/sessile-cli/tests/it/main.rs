//! The program as people meet it: exit status, stdout, stderr, files.
#![forbid(unsafe_code)]

mod bad_input;
mod bench_graphs;
mod check;
mod doctor;
mod help;
mod plan;
mod ranks;
mod report;
mod sandbox;
mod schema;
mod self_test;
mod simulate;
mod train;

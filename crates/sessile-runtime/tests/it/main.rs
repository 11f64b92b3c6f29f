//! Tests of the storage runtime on the CPU device: agreement, seal, capture, fenced replay, release, and what happens
//! when a step of it goes wrong.

mod agreement;
mod alternatives;
mod deviations;
mod drops;
mod eager_pool;
mod fences;
mod growth;
mod matching;
mod ownership;
mod phases;
mod random;
mod support;
mod symmetric;

//! Kinds of reduce-scatter, groups and repeated weights, on the CPU device.
#![allow(missing_docs, reason = "tests")]

mod groups;
mod kinds;
mod own_role;
mod repeat;
mod support;

//! Tests of the host device through its public face.

mod capture;
mod collectives;
mod failures;
mod host;
mod memory;
mod orders;
mod programs;
mod support;
mod virtual_clock;
mod windows;

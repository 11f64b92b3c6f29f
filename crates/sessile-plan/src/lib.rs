//! Plans of fixed-address buffers: requests, lifetimes, layout, fences, digest, formats, validator.
//!
//! This crate is arithmetic: no unsafe code, no input or output, no clock, no device. A plan is a pure
//! function of a [`Trace`] and [`PlanOptions`]: same input, same bytes, on every rank, machine and build.
#![forbid(unsafe_code)]

mod error;
mod options;
mod plan;
mod request;
mod trace;

pub use error::PlanError;
pub use options::{LaunchOrder, PlanOptions, StepCut, Strategy};
pub use plan::{Arena, Fence, PLAN_VERSION, Plan, View};
pub use request::{DType, Domain, Request, RequestId, RequestSpec, Role, VIEW_ALIGN};
pub use trace::{Point, PointKind, Runner, StreamIndex, TRACE_VERSION, Trace};

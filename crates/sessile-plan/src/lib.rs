//! Plans of fixed-address buffers: requests, lifetimes, layout, fences, digest, formats, validator.
//!
//! This crate is arithmetic: no unsafe code, no input or output, no clock, no device. A plan is a pure
//! function of a [`Trace`] and [`PlanOptions`]: same input, same bytes, on every rank, machine and build.
#![forbid(unsafe_code)]

mod baseline;
mod bound;
mod check;
mod digest;
mod error;
mod fences;
mod format;
mod layout;
mod lifetime;
pub mod limits;
mod options;
mod order;
mod plan;
mod planner;
mod request;
mod roster;
mod trace;
mod validate;

pub use baseline::{Baselines, baseline_bytes};
pub use bound::lower_bound;
pub use check::check_trace;
pub use digest::{request_hashes, runner_hash, trace_digest};
pub use error::{FormatError, PlanError, TraceError};
pub use format::{PLAN_SCHEMA, TRACE_SCHEMA, read_plan, read_trace, write_plan, write_trace};
pub use options::{LaunchOrder, PlanOptions, StepCut, Strategy};
pub use plan::{Arena, Fence, PLAN_VERSION, Plan, View};
pub use planner::plan;
pub use request::{DType, Domain, Request, RequestId, RequestSpec, Role, VIEW_ALIGN};
pub use trace::{Point, PointKind, Runner, StreamIndex, TRACE_VERSION, Trace};
pub use validate::{Party, Reason, Violation, validate};

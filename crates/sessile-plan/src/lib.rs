//! Plans of fixed-address buffers: requests, lifetimes, layout, fences, digest, formats, validator.
//!
//! This crate is arithmetic: no unsafe code, no input or output, no clock, no device. A plan is a pure
//! function of a [`Trace`] and [`PlanOptions`]: same input, same bytes, on every rank, machine and build.
//!
//! ```text
//!  address                                        four backwards of one request each, depth 2, step cut barrier
//!  1536 |         +-------+       +-------+
//!       |         | b     |       | d     |       b and d share bytes, a and c do: two launches apart
//!  1024 | +-------+-------+-------+-------+
//!       | | a     |       | c     |               fences: release of a -> acquire of c
//!       | |       |       |       |                       release of b -> acquire of d
//!     0 | +-------+       +-------+
//!         launch 0    1       2       3 ->         1536 bytes; the bound is 1536; generations:2 takes 1536
//! ```
//!
//! | module | noun |
//! |---|---|
//! | `request`, `trace`, `options`, `plan` | the words: what is asked for, recorded, chosen, answered |
//! | `check`, `limits` | what a trace must satisfy before anything rests on it |
//! | `roster` | the requests of a checked trace, numbered |
//! | `lifetime`, `bound` | who is live when, what conflicts, the least that can do |
//! | `baseline`, `layout` | offsets: the strategies to be measured against, and sessile's |
//! | `order`, `fences` | what happens before what, and the fences for the rest |
//! | `validate` | the independent check, which shares no code with the four rows above |
//! | `digest`, `format` | what ranks compare; JSON in and out |
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
pub use validate::{Launch, Party, Reason, Violation, validate};

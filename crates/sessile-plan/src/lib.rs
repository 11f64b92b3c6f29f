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
//! | `order`, `classes`, `precedence`, `conflicts` | what happens before what, who is live when, what conflicts |
//! | `bound`, `flow` | the least that can do |
//! | `baseline`, `layout`, `solve` | offsets: the strategies to be measured against, and sessile's |
//! | `fences` | the fences for what is reused and not ordered anyway |
//! | `validate` | the independent check, which shares no code with the four rows above |
//! | `packing`, `export` | packing files in one total order: read and packed; a plan as one |
//! | [`models`] | traces of published models, and of one's own |
//! | `digest`, `format` | what ranks compare; JSON in and out |
#![forbid(unsafe_code)]

mod baseline;
mod bound;
mod check;
mod classes;
mod conflicts;
mod digest;
mod error;
mod export;
mod fences;
mod flow;
mod format;
mod layout;
pub mod limits;
pub mod models;
mod options;
mod order;
mod packing;
mod plan;
mod planner;
mod precedence;
mod request;
mod roster;
mod solve;
mod trace;
mod validate;

pub use baseline::{Baselines, baseline_bytes};
pub use bound::lower_bound;
pub use check::check_trace;
pub use digest::{request_hashes, runner_hash, trace_digest};
pub use error::{FormatError, PlanError, TraceError};
pub use export::write_plan_csv;
pub use format::{PLAN_SCHEMA, TRACE_SCHEMA, read_plan, read_trace, write_plan, write_trace};
pub use options::{LaunchOrder, PlanOptions, StepCut, Strategy};
pub use packing::{Packed, PackingBlock, PackingError, pack, read_packing, write_packing};
pub use plan::{Arena, Fence, PLAN_VERSION, Plan, View};
pub use planner::plan;
pub use request::{DType, Domain, Request, RequestId, RequestSpec, Role, VIEW_ALIGN};
pub use trace::{Point, PointKind, Runner, StreamIndex, TRACE_VERSION, Trace};
pub use validate::{Launch, Party, Reason, Violation, validate};

//! The plan: fixed offsets for all requests, and the fences that make their reuse safe.

use serde::{Deserialize, Serialize};

use crate::{
    format::at_most,
    limits::{DOMAINS_MAX, REQUESTS_MAX},
    options::{LaunchOrder, PlanOptions},
    request::{Domain, RequestId},
};

/// Version of the plan format that this build reads and writes.
pub const PLAN_VERSION: u32 = 1;

/// One fixed-address allocation; each domain has one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arena {
    /// Where its memory comes from.
    pub domain: Domain,
    /// Its size.
    pub bytes: u64,
    /// The largest sum of bytes that must be live at once under the plan's options.
    pub lower_bound_bytes: u64,
    /// The requests of that sum, in order: they conflict pairwise.
    #[serde(deserialize_with = "at_most::<_, _, REQUESTS_MAX>")]
    pub peak: Vec<RequestId>,
}

/// The bytes of one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct View {
    /// Whose bytes.
    pub request: RequestId,
    /// Index into `arenas`.
    pub arena: u32,
    /// Offset from the arena's base, a multiple of 256.
    pub offset: u64,
    /// Aligned size.
    pub bytes: u64,
}

/// An event recorded after the last reader of `release`, waited on before the first writer of `acquire`.
///
/// The record node sits where `release` is released, the wait node where `acquire` is acquired; for a runner
/// without recorded order these are its tail and its head. An event that was never recorded lets a wait pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fence {
    /// The request whose bytes are reused.
    pub release: RequestId,
    /// The request that reuses them.
    pub acquire: RequestId,
}

/// A plan for one trace. A pure function of the trace and the options.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Always `sessile.plan`.
    pub schema: String,
    /// [`PLAN_VERSION`].
    pub version: u32,
    /// SHA-256 of the trace's canonical form, in hexadecimal.
    pub trace_digest: String,
    /// What was asked for.
    pub options: PlanOptions,
    /// The launch order that the fences rest on.
    pub launch_order: LaunchOrder,
    /// Arenas, in order of domain.
    #[serde(deserialize_with = "at_most::<_, _, DOMAINS_MAX>")]
    pub arenas: Vec<Arena>,
    /// Views, in order of request id.
    #[serde(deserialize_with = "at_most::<_, _, REQUESTS_MAX>")]
    pub views: Vec<View>,
    /// Fences, sorted.
    pub fences: Vec<Fence>,
}

impl Plan {
    /// Value of `schema`.
    pub const SCHEMA: &'static str = "sessile.plan";

    /// Bytes of all arenas.
    pub fn bytes(&self) -> u64 {
        self.arenas.iter().map(|arena| arena.bytes).sum()
    }

    /// Lower bound over all arenas.
    pub fn lower_bound_bytes(&self) -> u64 {
        self.arenas.iter().map(|arena| arena.lower_bound_bytes).sum()
    }

    /// The view of a request.
    pub fn view(&self, request: RequestId) -> Option<&View> {
        self.views.binary_search_by_key(&request, |view| view.request).ok().map(|at| &self.views[at])
    }
}

//! Digests: what ranks compare to know that they planned the same.
//!
//! The canonical form is binary: every integer little-endian at full width, every string and list led by its
//! length as a `u64`, every variant led by a byte. Nothing in it depends on map order, pointer width or JSON.

use sha2::{Digest, Sha256};

use crate::{
    options::{LaunchOrder, StepCut},
    plan::Plan,
    request::{DType, Domain, RequestSpec, Role},
    trace::{PointKind, Runner, Trace},
};

/// SHA-256 of a trace's canonical form, in hexadecimal. The trace's `name` is for people and does not count.
pub fn trace_digest(trace: &Trace) -> String {
    let mut canon = Canon::new("sessile.trace");
    canon.u32(trace.version);
    canon.len(trace.runners.len());
    for runner in &trace.runners {
        canon.runner(runner);
        canon.len(runner.requests.len());
        for request in &runner.requests {
            canon.u32(request.id.0);
            canon.spec(&request.spec);
        }
    }
    canon.len(trace.steps.len());
    for step in &trace.steps {
        canon.len(step.len());
        step.iter().for_each(|&runner| canon.u32(runner));
    }
    canon.hex()
}

/// For each runner, a hash of each request's spec: ranks find the first request that differs by comparing these.
pub fn request_hashes(trace: &Trace) -> Vec<Vec<u64>> {
    let of_runner =
        |runner: &Runner| runner.requests.iter().map(|request| spec_hash(&request.spec)).collect();
    trace.runners.iter().map(of_runner).collect()
}

/// A hash of a runner's name and points (not of its requests, see [`request_hashes`]).
pub fn runner_hash(runner: &Runner) -> u64 {
    let mut canon = Canon::new("sessile.runner");
    canon.runner(runner);
    canon.short()
}

fn spec_hash(spec: &RequestSpec) -> u64 {
    let mut canon = Canon::new("sessile.request");
    canon.spec(spec);
    canon.short()
}

impl Plan {
    /// SHA-256 of the plan's canonical form, in hexadecimal: equal exactly when the plans are equal.
    pub fn digest(&self) -> String {
        let mut canon = Canon::new("sessile.plan");
        canon.str(&self.schema);
        canon.u32(self.version);
        canon.str(&self.trace_digest);
        canon.str(&self.options.strategy.to_string());
        canon.u32(self.options.depth);
        canon.len(self.options.depth_by_group.len());
        for (group, &depth) in &self.options.depth_by_group {
            canon.str(group);
            canon.u32(depth);
        }
        canon.byte(match self.options.step_cut {
            StepCut::Barrier => 0,
            StepCut::Wrap => 1,
        });
        canon.launch_order(self.options.launch_order);
        canon.launch_order(self.launch_order);
        canon.len(self.arenas.len());
        for arena in &self.arenas {
            canon.domain(&arena.domain);
            canon.u64(arena.bytes);
            canon.u64(arena.lower_bound_bytes);
            canon.len(arena.peak.len());
            arena.peak.iter().for_each(|request| canon.u32(request.0));
        }
        canon.len(self.views.len());
        for view in &self.views {
            canon.u32(view.request.0);
            canon.u32(view.arena);
            canon.u64(view.offset);
            canon.u64(view.bytes);
        }
        canon.len(self.fences.len());
        for fence in &self.fences {
            canon.u32(fence.release.0);
            canon.u32(fence.acquire.0);
        }
        canon.hex()
    }
}

/// Feeds the canonical form to the hash.
struct Canon(Sha256);

impl Canon {
    fn new(what: &str) -> Canon {
        let mut canon = Canon(Sha256::new());
        canon.str(what);
        canon
    }

    fn byte(&mut self, value: u8) {
        self.0.update([value]);
    }

    fn u32(&mut self, value: u32) {
        self.0.update(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.update(value.to_le_bytes());
    }

    fn len(&mut self, value: usize) {
        self.u64(value as u64);
    }

    fn str(&mut self, value: &str) {
        self.len(value.len());
        self.0.update(value.as_bytes());
    }

    fn optional(&mut self, value: Option<&str>) {
        self.byte(value.is_some().into());
        self.str(value.unwrap_or_default());
    }

    fn launch_order(&mut self, order: LaunchOrder) {
        self.byte(match order {
            LaunchOrder::Overlapped => 0,
            LaunchOrder::Serial => 1,
        });
    }

    fn domain(&mut self, domain: &Domain) {
        match domain {
            Domain::Default => self.byte(0),
            Domain::Symmetric(group) => {
                self.byte(1);
                self.str(group);
            }
        }
    }

    fn shape(&mut self, shape: &[u64]) {
        self.len(shape.len());
        shape.iter().for_each(|&extent| self.u64(extent));
    }

    fn spec(&mut self, spec: &RequestSpec) {
        let RequestSpec {
            weight,
            role,
            dtype,
            shape,
            unsharded_shape,
            domain,
            group,
            expert,
            accumulates_into,
        } = spec;
        self.str(weight);
        match role {
            Role::WgradInput => self.byte(0),
            Role::RsOutput => self.byte(1),
            Role::A2aScratch => self.byte(2),
            Role::Fp32Output => self.byte(3),
            Role::GatheredWeight => self.byte(4),
            Role::User(name) => {
                self.byte(5);
                self.str(name);
            }
        }
        self.byte(match dtype {
            DType::Bf16 => 0,
            DType::F32 => 1,
            DType::U32 => 2,
        });
        self.shape(shape);
        self.shape(unsharded_shape);
        self.domain(domain);
        self.optional(group.as_deref());
        self.byte(expert.is_some().into());
        self.u32(expert.unwrap_or_default());
        self.optional(accumulates_into.as_deref());
    }

    /// Name and points.
    fn runner(&mut self, runner: &Runner) {
        self.str(&runner.name);
        self.len(runner.points.len());
        for point in &runner.points {
            self.u32(point.stream);
            match &point.kind {
                PointKind::Acquire(request) => self.tagged(0, request.0),
                PointKind::Release(request) => self.tagged(1, request.0),
                PointKind::Record(event) => self.tagged(2, *event),
                PointKind::Wait(event) => self.tagged(3, *event),
                PointKind::Collective(group) => {
                    self.byte(4);
                    self.str(group);
                }
                PointKind::Complete => self.byte(5),
                PointKind::Work => self.byte(6),
            }
        }
    }

    fn tagged(&mut self, tag: u8, value: u32) {
        self.byte(tag);
        self.u32(value);
    }

    fn hex(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The first eight bytes, as a number.
    fn short(self) -> u64 {
        self.0.finalize().iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
}

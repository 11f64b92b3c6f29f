//! The strategies that sessile is measured against: alternating arenas, rings, a buffer for each request.
//!
//! None of them plans requests that outlive their runner; such requests get bytes of their own.
//!
//! ```text
//!  generations:2      generation 0 (max of A, C)        generation 1 (max of B, D)
//!  offset ->          |-- A: a0 a1 --|                  |-- B: b0 -------|
//!                     |-- C: c0 --|                     |-- D: d0 d1 --|
//! ```

use std::collections::BTreeMap;

use crate::{
    error::PlanError,
    options::StepCut,
    request::{DType, Role},
    roster::Roster,
    trace::Trace,
};

/// Offsets of all requests and sizes of all arenas.
#[derive(Clone)]
pub(crate) struct Layout {
    /// By request, in roster order.
    pub(crate) offsets: Vec<u64>,
    /// By domain, in roster order.
    pub(crate) bytes: Vec<u64>,
}

impl Layout {
    pub(crate) fn empty(roster: &Roster<'_>) -> Layout {
        Layout { offsets: vec![0; roster.entries.len()], bytes: vec![0; roster.domains.len()] }
    }

    /// Puts a request on top of its arena.
    fn push(&mut self, roster: &Roster<'_>, index: usize) {
        let entry = &roster.entries[index];
        self.offsets[index] = self.bytes[entry.domain];
        self.bytes[entry.domain] += entry.bytes;
    }
}

/// What the baselines take over the requests of a trace, in bytes over all domains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Baselines {
    /// Every request its own bytes.
    pub per_request: u64,
    /// A ring of two; `None` where its capture would fail.
    pub ring2: Option<u64>,
    /// One, two and three generations.
    pub generations: [u64; 3],
}

/// The bytes of the baselines. `trace` must pass [`check_trace`](crate::check_trace).
///
/// None of the baselines looks at lifetimes across the step cut, so none depends on it today; it is asked for
/// so that a comparison states it.
pub fn baseline_bytes(trace: &Trace, _step_cut: StepCut) -> Baselines {
    let roster = Roster::new(trace);
    let sum = |layout: Layout| layout.bytes.iter().sum();
    Baselines {
        per_request: sum(per_request(&roster)),
        ring2: ring(&roster, 2).ok().map(sum),
        generations: [1, 2, 3].map(|count| sum(generations(&roster, count))),
    }
}

/// Every request its own bytes.
pub(crate) fn per_request(roster: &Roster<'_>) -> Layout {
    let mut layout = Layout::empty(roster);
    for index in 0..roster.entries.len() {
        layout.push(roster, index);
    }
    layout
}

/// `count` alternating arenas for each domain and dtype, laid one after another inside the domain's arena.
pub(crate) fn generations(roster: &Roster<'_>, count: u32) -> Layout {
    let mut layout = Layout::empty(roster);
    let mut by_runner: Vec<Vec<usize>> = vec![Vec::new(); roster.positions.len()];
    for (index, entry) in roster.entries.iter().enumerate() {
        if !entry.spans() {
            by_runner[entry.runner].push(index);
        }
    }
    let storing: Vec<usize> =
        roster.capture_order().into_iter().filter(|&runner| !by_runner[runner].is_empty()).collect();
    let count = (count as usize).min(storing.len()).max(1);
    // Capacity, then base, of each (domain, generation, dtype).
    let mut arenas: BTreeMap<(usize, usize, DType), u64> = BTreeMap::new();
    for (number, &runner) in storing.iter().enumerate() {
        let mut used: BTreeMap<(usize, DType), u64> = BTreeMap::new();
        for &index in &by_runner[runner] {
            let entry = &roster.entries[index];
            let top = used.entry((entry.domain, entry.spec.dtype)).or_default();
            layout.offsets[index] = *top;
            *top += entry.bytes;
        }
        for ((domain, dtype), bytes) in used {
            let capacity = arenas.entry((domain, number % count, dtype)).or_default();
            *capacity = bytes.max(*capacity);
        }
    }
    for (&(domain, ..), bytes) in &mut arenas {
        let base = layout.bytes[domain];
        layout.bytes[domain] += *bytes;
        *bytes = base;
    }
    for (number, &runner) in storing.iter().enumerate() {
        for &index in &by_runner[runner] {
            let entry = &roster.entries[index];
            layout.offsets[index] += arenas[&(entry.domain, number % count, entry.spec.dtype)];
        }
    }
    for (index, entry) in roster.entries.iter().enumerate() {
        if entry.spans() {
            layout.push(roster, index);
        }
    }
    layout
}

/// `slots` buffers for each distinct kind of reduce-scatter input, used in turn; other requests their own.
pub(crate) fn ring(roster: &Roster<'_>, slots: u32) -> Result<Layout, PlanError> {
    let mut layout = Layout::empty(roster);
    let mut by_runner: Vec<Vec<usize>> = vec![Vec::new(); roster.positions.len()];
    for (index, entry) in roster.entries.iter().enumerate() {
        if entry.spec.role == Role::WgradInput && !entry.spans() {
            by_runner[entry.runner].push(index);
        } else {
            layout.push(roster, index);
        }
    }
    let mut rings: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for runner in roster.capture_order() {
        for &index in &by_runner[runner] {
            let entry = &roster.entries[index];
            let spec = entry.spec;
            let key =
                (entry.domain, &spec.group, &spec.unsharded_shape, &spec.shape, spec.dtype, spec.expert);
            rings.entry(key).or_default().push(index);
        }
    }
    for writers in rings.values() {
        let used = (slots as usize).min(writers.len());
        for of_runner in writers.chunk_by(|&a, &b| roster.entries[a].runner == roster.entries[b].runner) {
            if of_runner.len() > used {
                let first = &roster.entries[of_runner[0]];
                return Err(PlanError::RingTooSmall {
                    slots,
                    runner: roster.trace.runners[first.runner].name.clone(),
                    writers: of_runner.len() as u32,
                    first: first.id,
                });
            }
        }
        for (turn, &index) in writers.iter().enumerate() {
            if turn < used {
                layout.push(roster, index);
            } else {
                layout.offsets[index] = layout.offsets[writers[turn % used]];
            }
        }
    }
    Ok(layout)
}

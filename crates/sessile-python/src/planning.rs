//! Plans and traces without storage: what `sessile plan` does, as functions.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use sessile_plan::{LaunchOrder, PlanOptions, StepCut, Trace, read_trace, write_plan};

use crate::error::Failure;

/// A plan: fixed offsets for all requests, and the fences that make their reuse safe.
#[pyclass(frozen, module = "sessile._sessile")]
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) plan: sessile_plan::Plan,
}

#[pymethods]
impl Plan {
    /// Bytes of all arenas.
    #[getter]
    fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// The largest sum of bytes that must be live at once.
    #[getter]
    fn lower_bound_bytes(&self) -> u64 {
        self.plan.lower_bound_bytes()
    }

    /// Domain and bytes of each arena.
    #[getter]
    fn arenas(&self) -> Vec<(String, u64)> {
        self.plan.arenas.iter().map(|arena| (arena.domain.to_string(), arena.bytes)).collect()
    }

    /// Request, arena, offset and bytes of each view.
    #[getter]
    fn views(&self) -> Vec<(u32, u32, u64, u64)> {
        let view = |view: &sessile_plan::View| (view.request.0, view.arena, view.offset, view.bytes);
        self.plan.views.iter().map(view).collect()
    }

    /// Pairs of requests: the one whose bytes are reused, the one that reuses them.
    #[getter]
    fn fences(&self) -> Vec<(u32, u32)> {
        self.plan.fences.iter().map(|fence| (fence.release.0, fence.acquire.0)).collect()
    }

    /// SHA-256 of the plan: equal exactly when plans are equal.
    #[getter]
    fn digest(&self) -> String {
        self.plan.digest()
    }

    /// The plan as versioned JSON.
    fn to_json(&self) -> String {
        write_plan(&self.plan)
    }

    fn __repr__(&self) -> String {
        format!(
            "Plan(bytes={}, lower_bound_bytes={}, views={}, fences={})",
            self.plan.bytes(),
            self.plan.lower_bound_bytes(),
            self.plan.views.len(),
            self.plan.fences.len()
        )
    }
}

/// Options by the words of the command line.
pub(crate) fn options(
    strategy: &str,
    depth: u32,
    depth_by_group: BTreeMap<String, u32>,
    step_cut: &str,
) -> Result<PlanOptions, Failure> {
    let step_cut = match step_cut {
        "barrier" => StepCut::Barrier,
        "wrap" => StepCut::Wrap,
        other => return Err(Failure::argument("step_cut", other, "use `barrier` or `wrap`")),
    };
    let launch_order = LaunchOrder::Overlapped;
    Ok(PlanOptions { strategy: strategy.parse()?, depth, depth_by_group, step_cut, launch_order })
}

/// Plans a trace.
#[pyfunction]
#[pyo3(signature = (trace, *, strategy = "sessile", depth = 2, depth_by_group = None, step_cut = "barrier"))]
pub(crate) fn plan(
    py: Python<'_>,
    trace: &str,
    strategy: &str,
    depth: u32,
    depth_by_group: Option<BTreeMap<String, u32>>,
    step_cut: &str,
) -> Result<Plan, Failure> {
    let options = options(strategy, depth, depth_by_group.unwrap_or_default(), step_cut)?;
    let trace: Trace = read_trace(trace.as_bytes())?;
    let plan = py.detach(|| sessile_plan::plan(&trace, &options))?;
    Ok(Plan { plan })
}

/// Reads a trace and gives its digest.
#[pyfunction]
pub(crate) fn check_trace(trace: &str) -> Result<String, Failure> {
    Ok(sessile_plan::trace_digest(&read_trace(trace.as_bytes())?))
}

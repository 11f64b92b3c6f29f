//! What exists between seal and free: the plan, its arenas and tensors, and where a pass over a runner stands.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use sessile_hal::DeviceError;
use sessile_plan::{LaunchOrder, Request, RequestId, Trace};
use sessile_runtime::events::{Events, Proven};
use sessile_runtime::{Cursor, RuntimeError};

use crate::arena::Arena;
use crate::cuda::Cuda;
use sessile_runtime::order::{Mark, Order};

/// A pass over a sealed runner, which must make the discovered sequence again.
pub(crate) struct Follow {
    pub(crate) at: usize,
    /// Next request, and next mark.
    pub(crate) request: usize,
    pub(crate) mark: usize,
    pub(crate) capture: bool,
}

pub(crate) struct Sealed {
    pub(crate) trace: Trace,
    pub(crate) plan: sessile_plan::Plan,
    pub(crate) arenas: Vec<Arena>,
    pub(crate) runners: Vec<Runner>,
    pub(crate) by_name: BTreeMap<String, usize>,
    pub(crate) cursor: Cursor,
    /// Where its fences record and wait, on a device that has them.
    pub(crate) events: Events,
}

/// A sealed runner.
pub(crate) struct Runner {
    pub(crate) requests: Vec<Planned>,
    pub(crate) marks: Vec<Mark>,
    pub(crate) order: Option<Order>,
    pub(crate) captured: bool,
}

/// A request with what the framework asks for it by, and the tensor it gets.
pub(crate) struct Planned {
    pub(crate) request: Request,
    pub(crate) key: Option<Py<PyAny>>,
    pub(crate) tensor: Option<Py<PyAny>>,
}

impl Runner {
    pub(crate) fn completes(&self) -> bool {
        self.marks.contains(&Mark::Complete)
    }
}

/// Puts a request's fences and its mark into a capture. Those of a runner without proven order stand at its head.
pub(crate) fn acquire(
    cuda: &mut Cuda,
    runner: &Runner,
    id: RequestId,
    stream: u64,
) -> Result<(), DeviceError> {
    if runner.order.is_some() {
        cuda.wait_for(id, stream)?;
    }
    cuda.mark(Mark::Acquire(id), stream)
}

impl Sealed {
    /// Where the fences of a plan record and wait.
    pub(crate) fn events(plan: &sessile_plan::Plan, runners: &[Runner]) -> Events {
        let ids: Vec<Vec<RequestId>> = runners
            .iter()
            .map(|runner| runner.requests.iter().map(|planned| planned.request.id).collect())
            .collect();
        let proven: Vec<Proven<'_>> = runners
            .iter()
            .zip(&ids)
            .map(|(runner, requests)| Proven { requests, order: runner.order.as_ref() })
            .collect();
        Events::of(&plan.fences, &proven)
    }

    /// Whether a runner runs on beside the next one.
    pub(crate) fn runs_on(&self, at: usize) -> bool {
        self.plan.launch_order == LaunchOrder::Overlapped
            && self.runners.get(at).is_some_and(Runner::completes)
    }

    /// Requests of a runner of whose order nothing is proven.
    pub(crate) fn unproven(&self, at: usize) -> impl Iterator<Item = RequestId> {
        let runner = &self.runners[at];
        let unproven = runner.order.is_none();
        runner.requests.iter().filter(move |_| unproven).map(|planned| planned.request.id)
    }

    /// Requests that are free at the end of a runner and not before.
    pub(crate) fn unreleased(&self, at: usize) -> impl Iterator<Item = RequestId> {
        let ids = self.runners[at].requests.iter().map(|planned| planned.request.id);
        ids.filter(move |&id| !self.is_released(id))
    }

    /// Whether any runner releases a request.
    pub(crate) fn is_released(&self, id: RequestId) -> bool {
        self.runners.iter().any(|runner| runner.order.is_some() && runner.marks.contains(&Mark::Release(id)))
    }

    /// Checks that a capture still proves what the plan rests on.
    pub(crate) fn still_proven(&self, at: usize, order: Option<&Order>) -> Result<(), RuntimeError> {
        let (Some(proven), Some(now)) = (&self.runners[at].order, order) else { return Ok(()) };
        match proven.lost(now) {
            None => Ok(()),
            Some((early, late)) => Err(RuntimeError::OrderDiffers {
                runner: self.trace.runners[at].name.clone(),
                index: self.runners[at].marks.iter().position(|mark| *mark == late).unwrap_or(0),
                expected: format!("{} before {}", early.text(), late.text()),
                found: "neither before the other".to_owned(),
            }),
        }
    }

    /// Takes the next mark, which must be this one.
    pub(crate) fn expect(&self, follow: &mut Follow, mark: Mark) -> Result<(), RuntimeError> {
        let marks = &self.runners[follow.at].marks;
        if marks.get(follow.mark) == Some(&mark) {
            follow.mark += 1;
            return Ok(());
        }
        Err(RuntimeError::OrderDiffers {
            runner: self.trace.runners[follow.at].name.clone(),
            index: follow.mark,
            expected: marks.get(follow.mark).map_or("the end".to_owned(), |mark| mark.text()),
            found: mark.text(),
        })
    }

    /// Checks that a pass made the whole sequence.
    pub(crate) fn ended(&self, follow: &Follow) -> Result<(), RuntimeError> {
        let runner = &self.runners[follow.at];
        let name = self.trace.runners[follow.at].name.clone();
        if let Some(left) = runner.requests.get(follow.request) {
            let spec = &left.request.spec;
            let same = |planned: &&Planned| {
                planned.request.spec.domain == spec.domain && planned.request.spec.dtype == spec.dtype
            };
            let rest = runner.requests[follow.request..].iter().filter(same);
            return Err(RuntimeError::Unconsumed {
                runner: name,
                consumed: follow.request,
                planned: runner.requests.len(),
                bytes_left: rest.filter_map(|planned| planned.request.spec.bytes()).sum(),
                domain: spec.domain.to_string(),
                dtype: spec.dtype.to_string(),
                first_left: spec.to_string(),
            });
        }
        match runner.marks.get(follow.mark) {
            None => Ok(()),
            Some(mark) => Err(RuntimeError::OrderDiffers {
                runner: name,
                index: follow.mark,
                expected: mark.text(),
                found: "the end".to_owned(),
            }),
        }
    }
}

//! Requests: what is asked for, and the planned tensor that it gets.

use pyo3::prelude::*;
use sessile_plan::{DType, Domain, RequestSpec, Role};
use sessile_runtime::RuntimeError;
use sessile_runtime::order::Mark;

use super::{Answer, Core, Scope};
use crate::error::Failure;
use crate::sealed::acquire;

impl Core {
    /// The planned view, if the next request is asked for by exactly this key.
    pub(super) fn take_planned(
        &mut self,
        py: Python<'_>,
        key: &Bound<'_, PyAny>,
        stream: u64,
    ) -> PyResult<Option<Py<PyAny>>> {
        let (Scope::Follow(follow), Some(sealed)) = (&mut self.scope, &self.sealed) else { return Ok(None) };
        let runner = &sealed.runners[follow.at];
        let Some(planned) = runner.requests.get(follow.request) else { return Ok(None) };
        let (Some(known), Some(tensor)) = (&planned.key, &planned.tensor) else { return Ok(None) };
        if runner.marks.get(follow.mark) != Some(&Mark::Acquire(planned.request.id))
            || !known.bind(py).eq(key)?
        {
            return Ok(None);
        }
        if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
            acquire(cuda, runner, planned.request.id, stream).map_err(Failure::from)?;
        }
        follow.request += 1;
        follow.mark += 1;
        Ok(Some(tensor.clone_ref(py)))
    }

    /// The next request: numbered in a discovery, its planned tensor in a capture or replay.
    pub(super) fn ask(
        &mut self,
        py: Python<'_>,
        key: Py<PyAny>,
        spec: RequestSpec,
        stream: u64,
    ) -> Result<Answer, Failure> {
        match &mut self.scope {
            Scope::Idle => Ok((None, None)),
            Scope::Discover(pass) => {
                let id = self.discovery.request(pass, spec)?;
                self.keys.entry(id).or_insert(key);
                if let Some(cuda) = &mut self.cuda {
                    cuda.mark(Mark::Acquire(id), stream)?;
                }
                Ok((Some(id.0), None))
            }
            Scope::Follow(_) => Ok((None, Some(self.follow_request(py, &spec, stream)?))),
        }
    }

    fn follow_request(
        &mut self,
        py: Python<'_>,
        spec: &RequestSpec,
        stream: u64,
    ) -> Result<Py<PyAny>, Failure> {
        let (Scope::Follow(follow), Some(sealed)) = (&mut self.scope, &self.sealed) else {
            return Err(Failure::phase("empty", "no runner is active", "begin a capture first"));
        };
        let runner = sealed.trace.runners[follow.at].name.clone();
        let index = follow.request;
        let Some(planned) = sealed.runners[follow.at].requests.get(index) else {
            return Err(RuntimeError::UnplannedRequest {
                runner,
                index,
                found: spec.to_string(),
                bytes: spec.bytes().unwrap_or(u64::MAX),
            }
            .into());
        };
        if planned.request.spec != *spec {
            return Err(RuntimeError::RequestMismatch {
                runner,
                index,
                expected: planned.request.spec.to_string(),
                found: spec.to_string(),
            }
            .into());
        }
        let tensor = planned.tensor.as_ref().map(|tensor| tensor.clone_ref(py));
        sealed.expect(follow, Mark::Acquire(planned.request.id))?;
        if let Some(cuda) = self.cuda.as_mut().filter(|_| follow.capture) {
            acquire(cuda, &sealed.runners[follow.at], planned.request.id, stream)?;
        }
        follow.request += 1;
        tensor.ok_or_else(|| {
            Failure::phase("empty", "the plan has no tensors yet", "call set_tensors after the seal")
        })
    }
}

pub(super) fn dtype_of(name: &str) -> Result<DType, Failure> {
    match name {
        "bfloat16" => Ok(DType::Bf16),
        "float32" => Ok(DType::F32),
        "int32" => Ok(DType::U32),
        other => Err(Failure::argument("dtype", other, "planned storage holds bfloat16, float32 or int32")),
    }
}

pub(super) fn domain_of(group: Option<&str>, symmetric: bool) -> Result<Domain, Failure> {
    match (group, symmetric) {
        (Some(group), true) => Ok(Domain::Symmetric(group.to_owned())),
        (None, true) => {
            Err(Failure::argument("symmetric", "true", "symmetric storage belongs to a group: name it"))
        }
        (_, false) => Ok(Domain::Default),
    }
}

pub(super) fn role_of(name: &str) -> Role {
    match name {
        "wgrad_input" => Role::WgradInput,
        "rs_output" => Role::RsOutput,
        "a2a_scratch" => Role::A2aScratch,
        "fp32_output" => Role::Fp32Output,
        "gathered_weight" => Role::GatheredWeight,
        other => Role::User(other.to_owned()),
    }
}

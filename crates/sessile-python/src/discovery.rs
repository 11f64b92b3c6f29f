//! Runners, requests and recorded order, until they are a trace.

use std::collections::BTreeMap;

use sessile_plan::{Request, RequestId, RequestSpec, Runner, TRACE_VERSION, Trace};
use sessile_runtime::RuntimeError;

use sessile_runtime::order::{Mark, Order};

/// A runner that was discovered.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) requests: Vec<Request>,
    /// Acquires and releases in the order the program made them.
    pub(crate) marks: Vec<Mark>,
    /// What is proven of them. `None`: nothing, so every request lives as long as its runner.
    pub(crate) order: Option<Order>,
}

/// One pass over a runner: a discovery, or a proof of order for one that was discovered.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) runner: String,
    known: Option<usize>,
    /// Whether it is one more launch of the step.
    launch: bool,
    requests: Vec<Request>,
    pub(crate) marks: Vec<Mark>,
}

/// All runners so far, and the order of their launches.
#[derive(Debug, Default)]
pub(crate) struct Discovery {
    pub(crate) runners: Vec<Found>,
    by_name: BTreeMap<String, usize>,
    done: Vec<Vec<u32>>,
    launches: Vec<u32>,
    requests: u32,
}

impl Discovery {
    pub(crate) fn index(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    pub(crate) fn begin(&self, name: &str, launch: bool) -> Pass {
        let known = self.index(name);
        Pass { runner: name.to_owned(), known, launch, requests: Vec::new(), marks: Vec::new() }
    }

    /// Identity of the next request of the pass: that of the first pass over the runner, if there was one.
    pub(crate) fn request(&mut self, pass: &mut Pass, spec: RequestSpec) -> Result<RequestId, RuntimeError> {
        let index = pass.requests.len();
        let id = match pass.known {
            Some(runner) => match self.runners[runner].requests.get(index) {
                Some(first) if first.spec == spec => first.id,
                first => return Err(differs(&pass.runner, index, first, Some(&spec))),
            },
            None => {
                self.requests += 1;
                RequestId(self.requests - 1)
            }
        };
        pass.requests.push(Request { id, spec });
        pass.marks.push(Mark::Acquire(id));
        Ok(id)
    }

    /// Ends a pass with what it proved.
    pub(crate) fn end(&mut self, pass: Pass, order: Option<Order>) -> Result<(), RuntimeError> {
        let Pass { runner: name, known, launch, requests, marks } = pass;
        let at = match known {
            Some(at) => {
                let found = &mut self.runners[at];
                if let Some(left) = found.requests.get(requests.len()) {
                    return Err(differs(&name, requests.len(), Some(left), None));
                }
                if let Some(index) =
                    (0..marks.len().max(found.marks.len())).find(|&i| marks.get(i) != found.marks.get(i))
                {
                    let text = |mark: Option<&Mark>| mark.map_or("nothing".to_owned(), |mark| mark.text());
                    return Err(RuntimeError::DiscoveryDiffers {
                        runner: name,
                        index,
                        first: text(found.marks.get(index)),
                        second: text(marks.get(index)),
                    });
                }
                if order.is_some() && (found.order.is_none() || !launch) {
                    found.order = order;
                }
                at
            }
            None => {
                self.by_name.insert(name.clone(), self.runners.len());
                self.runners.push(Found { name, requests, marks, order });
                self.runners.len() - 1
            }
        };
        if launch {
            self.launches.push(u32::try_from(at).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    /// What comes next is an alternative to the step so far.
    pub(crate) fn next_alternative(&mut self) {
        if !self.launches.is_empty() {
            self.done.push(std::mem::take(&mut self.launches));
        }
    }

    pub(crate) fn trace(&self, name: &str) -> Trace {
        let runner = |found: &Found| Runner {
            name: found.name.clone(),
            requests: found.requests.clone(),
            points: found.order.as_ref().map_or(Vec::new(), Order::points),
        };
        let current = (!self.launches.is_empty()).then_some(&self.launches);
        Trace {
            schema: Trace::SCHEMA.to_owned(),
            version: TRACE_VERSION,
            name: name.to_owned(),
            runners: self.runners.iter().map(runner).collect(),
            steps: self.done.iter().chain(current).cloned().collect(),
            durations_ns: Vec::new(),
        }
    }
}

fn differs(
    runner: &str,
    index: usize,
    first: Option<&Request>,
    second: Option<&RequestSpec>,
) -> RuntimeError {
    RuntimeError::DiscoveryDiffers {
        runner: runner.to_owned(),
        index,
        first: first.map_or("nothing".into(), |request| request.spec.to_string()),
        second: second.map_or("nothing".into(), ToString::to_string),
    }
}

//! Which buffers FP32 accumulation and registration ask for: sessile's own set, or that of the framework it is compared to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sessile_gtp::ReduceScatter;
use sessile_plan::{DType, Domain, Role, Trace};

/// A set of roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KindSet {
    /// What the simulated kinds ask for.
    #[default]
    Own,
    /// `fp32_a2a` with an output in the wire dtype in place of the FP32 sum; `symmetric` with its input alone registered.
    Upstream,
}

impl KindSet {
    /// Whether the set knows the kind.
    pub fn has(self, kind: ReduceScatter) -> bool {
        self == KindSet::Own || kind != ReduceScatter::OneShot
    }

    /// The same requests in the same order, as the set has them.
    pub fn apply(self, mut trace: Trace) -> Trace {
        if self == KindSet::Own {
            return trace;
        }
        let inputs = trace.requests().filter(|(_, request)| request.spec.role == Role::WgradInput);
        let wires: BTreeMap<String, (DType, Option<String>)> = inputs
            .map(|(_, input)| (input.spec.weight.clone(), (input.spec.dtype, input.spec.group.clone())))
            .collect();
        for request in trace.runners.iter_mut().flat_map(|runner| &mut runner.requests) {
            let spec = &mut request.spec;
            match spec.role {
                Role::Fp32Output => {
                    spec.role = Role::RsOutput;
                    if let Some((dtype, group)) = wires.get(&spec.weight) {
                        (spec.dtype, spec.group) = (*dtype, group.clone());
                    }
                }
                Role::RsOutput | Role::GatheredWeight => spec.domain = Domain::Default,
                _ => {}
            }
        }
        trace
    }
}

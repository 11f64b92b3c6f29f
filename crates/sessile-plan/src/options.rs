//! Choices that shape a plan.

use std::{collections::BTreeMap, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{error::PlanError, limits::DEPTH_MAX};

/// What happens between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepCut {
    /// Every launch of a step has ended before the first launch of the next one starts.
    #[default]
    Barrier,
    /// The launch order is cyclic: the first runners of a step conflict with the last of the step before.
    Wrap,
}

/// When the next launch may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchOrder {
    /// After the previous launch's completion point: its reduce-scatters may still run.
    #[default]
    Overlapped,
    /// After every node of the previous launch.
    Serial,
}

/// How bytes are given to requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Lifetimes across dtypes, packed; never larger than `Generations(depth)`.
    #[default]
    Sessile,
    /// N alternating arenas per (domain, dtype).
    Generations(u32),
    /// N slots per (group, unsharded shape, padded shape, dtype, expert); inputs only.
    Ring(u32),
    /// Every request its own bytes.
    PerRequest,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Strategy::Sessile => f.write_str("sessile"),
            Strategy::Generations(n) => write!(f, "generations:{n}"),
            Strategy::Ring(n) => write!(f, "ring:{n}"),
            Strategy::PerRequest => f.write_str("per-request"),
        }
    }
}

impl FromStr for Strategy {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let unknown = || PlanError::UnknownStrategy { text: text.chars().take(80).collect() };
        // Only the canonical form: `parse` alone would take `+2` and `02`, and the JSON Schema does not.
        let count = |digits: &str| match digits.parse::<u32>() {
            Ok(n) if (1..=DEPTH_MAX).contains(&n) && n.to_string() == digits => Ok(n),
            _ => Err(unknown()),
        };
        match text.split_once(':') {
            None if text == "sessile" => Ok(Strategy::Sessile),
            None if text == "per-request" => Ok(Strategy::PerRequest),
            Some(("generations", n)) => Ok(Strategy::Generations(count(n)?)),
            Some(("ring", n)) => Ok(Strategy::Ring(count(n)?)),
            _ => Err(unknown()),
        }
    }
}

impl Serialize for Strategy {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Strategy {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Everything a plan depends on besides the trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanOptions {
    /// How bytes are given to requests.
    pub strategy: Strategy,
    /// Launches apart before bytes are reused. If no depth is above 1, launches are serial.
    pub depth: u32,
    /// Depths of groups, by name: a request of such a group is reused once that many launches *that use the group*
    /// have begun with the one that releases it; launches that do not use it don't count. A launch uses a group if its
    /// runner has a request or a collective of it. Requests of other groups, or of none, keep `depth`, which counts
    /// every launch.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub depth_by_group: BTreeMap<String, u32>,
    /// What happens between two steps.
    pub step_cut: StepCut,
    /// Whether a runner's reduce-scatters may run on into the next runners.
    pub launch_order: LaunchOrder,
}

impl Default for PlanOptions {
    fn default() -> Self {
        PlanOptions {
            strategy: Strategy::default(),
            depth: 2,
            depth_by_group: BTreeMap::new(),
            step_cut: StepCut::default(),
            launch_order: LaunchOrder::default(),
        }
    }
}

impl PlanOptions {
    /// The launch order in force: if no depth is above 1, one runner is in flight, hence serial launches.
    pub fn effective_launch_order(&self) -> LaunchOrder {
        let deepest = self.depth_by_group.values().copied().fold(self.depth, u32::max);
        if deepest <= 1 { LaunchOrder::Serial } else { self.launch_order }
    }
}

//! Agreement: ranks compare what they discovered before anything is allocated.
//!
//! Every exchange is made by every member, also by one that has failed already, so that no rank waits for a peer
//! that took another path. Verdicts are shared by all ranks of the job.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sessile_hal::Comm;
use sessile_plan::{PlanOptions, Request, RequestId, Runner, Trace, request_hashes, trace_digest};

use crate::{RuntimeError, discovery::Durations, error::Disagreement};

/// Messages larger than this are refused: a peer of the same job never sends them.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

#[derive(Clone, Serialize, Deserialize)]
enum Verdict {
    Fine,
    Disagree(Disagreement),
    Offsets { group: String, rank: u32 },
    AllocFailed(String),
    Failed(String),
}

fn exchange<C: Comm, T: Serialize + DeserializeOwned>(comm: &C, message: &T) -> Result<Vec<T>, RuntimeError> {
    let payloads = exchange_bytes(comm, message)?;
    payloads.iter().zip(comm.ranks()).map(|(payload, &rank)| read(payload, rank)).collect()
}

fn exchange_bytes<C: Comm, T: Serialize>(comm: &C, message: &T) -> Result<Vec<Vec<u8>>, RuntimeError> {
    let bytes = serde_json::to_vec(message).map_err(|error| RuntimeError::PeerFailed {
        rank: comm.ranks()[comm.rank() as usize],
        detail: error.to_string(),
    })?;
    Ok(comm.exchange(&bytes)?)
}

fn read<T: DeserializeOwned>(payload: &[u8], rank: u32) -> Result<T, RuntimeError> {
    if payload.len() > MAX_MESSAGE_BYTES {
        return Err(RuntimeError::PeerFailed { rank, detail: format!("{} byte message", payload.len()) });
    }
    serde_json::from_slice(payload)
        .map_err(|error| RuntimeError::PeerFailed { rank, detail: format!("unreadable message: {error}") })
}

/// Shares each rank's outcome over the job: the first failure in order of rank is everybody's.
///
/// # Errors
/// That failure; those of the exchange, unless this rank has failed before it, which says more.
pub fn share<C: Comm, T>(world: &C, outcome: Result<T, RuntimeError>) -> Result<T, RuntimeError> {
    let verdict = match &outcome {
        Ok(_) => Verdict::Fine,
        Err(RuntimeError::PlanMismatch(disagreement)) => Verdict::Disagree(disagreement.clone()),
        Err(RuntimeError::OffsetMismatch { group, rank }) => {
            Verdict::Offsets { group: group.clone(), rank: *rank }
        }
        Err(
            error @ (RuntimeError::Device(sessile_hal::DeviceError::OutOfMemory { .. })
            | RuntimeError::DoesNotFit { .. }),
        ) => Verdict::AllocFailed(error.to_string()),
        Err(error) => Verdict::Failed(error.to_string()),
    };
    let verdicts = match exchange(world, &verdict) {
        Ok(verdicts) => verdicts,
        Err(error) => return outcome.and(Err(error)),
    };
    let first =
        verdicts.into_iter().zip(world.ranks()).find(|(verdict, _)| !matches!(verdict, Verdict::Fine));
    match first {
        None => outcome,
        Some((Verdict::Disagree(disagreement), _)) => Err(RuntimeError::PlanMismatch(disagreement)),
        Some((Verdict::Offsets { group, rank }, _)) => Err(RuntimeError::OffsetMismatch { group, rank }),
        Some((Verdict::AllocFailed(detail), &rank)) => Err(RuntimeError::PeerAllocFailed { rank, detail }),
        // A rank's own error says more than its report to the others.
        Some((_, &rank)) if rank == world.ranks()[world.rank() as usize] => outcome,
        Some((Verdict::Failed(detail), &rank)) => Err(RuntimeError::PeerFailed { rank, detail }),
        Some((Verdict::Fine, _)) => outcome,
    }
}

/// What the ranks of the job have measured; of ranks that measured the same, one.
pub(crate) fn durations<C: Comm>(world: &C, mine: &Durations) -> Result<Vec<Durations>, RuntimeError> {
    let payloads = exchange_bytes(world, mine)?;
    let mut seen = BTreeSet::new();
    let new = payloads.iter().zip(world.ranks()).filter(|(payload, _)| seen.insert(payload.as_slice()));
    new.map(|(payload, &rank)| read(payload, rank)).collect()
}

/// The first rank's answer, for all.
pub(crate) fn first<C: Comm, T: Serialize + DeserializeOwned>(
    world: &C,
    mine: &Option<T>,
) -> Result<Option<T>, RuntimeError> {
    Ok(exchange(world, mine)?.into_iter().next().flatten())
}

/// Checks that all ranks of the job seal with the same options.
///
/// # Errors
/// [`RuntimeError::OptionsDiffer`]; those of the exchange.
pub fn same_options<C: Comm>(world: &C, options: &PlanOptions) -> Result<(), RuntimeError> {
    let all: Vec<PlanOptions> = exchange(world, options)?;
    match (0..all.len()).find(|&at| all[at] != all[0]) {
        Some(at) => Err(RuntimeError::OptionsDiffer {
            rank: world.ranks()[at],
            found: format!("{:?}", all[at]),
            first: format!("{:?}", all[0]),
        }),
        None => Ok(()),
    }
}

/// Checks that all members of a group ask for the same number of bytes of registered memory.
pub(crate) fn same_size<C: Comm>(comm: &C, bytes: u64) -> Result<(), RuntimeError> {
    let all: Vec<u64> = exchange(comm, &bytes)?;
    if all.iter().all(|other| *other == all[0]) {
        return Ok(());
    }
    let (common, odd) = odd_one(&all);
    Err(RuntimeError::WindowSizes {
        group: comm.name().to_owned(),
        rank: comm.ranks()[odd],
        found: all[odd],
        expected: all[common],
    })
}

/// A runner's name, and hash and text of its requests.
type Requests = (String, Vec<(u64, String)>);

/// What ranks of a group compare: the runners in launch order with the requests that concern the group, numbered anew,
/// since each rank may have others of its own between them.
fn part(trace: &Trace, group: &str) -> Trace {
    let mut requests = 0..;
    let runners = trace
        .runners
        .iter()
        .map(|runner| Runner {
            name: runner.name.clone(),
            requests: runner
                .requests
                .iter()
                .filter(|request| request.spec.group.as_deref() == Some(group))
                .zip(&mut requests)
                .map(|(request, id)| Request { id: RequestId(id), spec: request.spec.clone() })
                .collect(),
            points: Vec::new(),
        })
        .collect();
    Trace { runners, name: String::new(), ..trace.clone() }
}

/// Compares the discovered storage of every group over exactly that group. `trace` is `None` on a rank that failed
/// to make one; it still takes part.
///
/// # Errors
/// [`RuntimeError::PlanMismatch`] with the first difference; those of the exchange.
pub fn compare<C: Comm>(groups: &BTreeMap<String, C>, trace: Option<&Trace>) -> Result<(), RuntimeError> {
    let mut first = Ok(());
    for (group, comm) in groups {
        let mine = trace.map(|trace| part(trace, group));
        let outcome = compare_group(group, comm, mine.as_ref());
        if first.is_ok() {
            first = outcome;
        }
    }
    first
}

fn compare_group<C: Comm>(group: &str, comm: &C, mine: Option<&Trace>) -> Result<(), RuntimeError> {
    let digest = mine.map(trace_digest);
    let digests = exchange(comm, &digest)?;
    if digests.iter().all(|other| other == &digests[0]) {
        return Ok(());
    }
    // A member that failed has nothing to compare; its reason, which says more, is shared with all.
    let (Some(trace), true) = (mine, digests.iter().all(Option::is_some)) else { return Ok(()) };
    // Somebody differs: now the texts are worth sending, with hashes, since a text does not show everything.
    let hashes = request_hashes(trace);
    let lists: Vec<Requests> = trace
        .steps
        .iter()
        .flatten()
        .map(|&launch| (&trace.runners[launch as usize], &hashes[launch as usize]))
        .map(|(runner, hashes)| {
            let texts = runner.requests.iter().map(|request| request.spec.to_string());
            (runner.name.clone(), hashes.iter().copied().zip(texts).collect())
        })
        .collect();
    let lists = exchange(comm, &lists)?;
    let (common, odd) = odd_one(&digests);
    let (expected, found) = (&lists[common], &lists[odd]);
    let launches = expected.len().max(found.len());
    for at in 0..launches {
        let (left, right) = (expected.get(at), found.get(at));
        if left == right {
            continue;
        }
        let runner = left.or(right).map_or(String::new(), |(name, _)| name.clone());
        let empty: &[(u64, String)] = &[];
        let same_runner = left.map(|l| &l.0) == right.map(|r| &r.0);
        let (a, b) = (left.map_or(empty, |l| &l.1), right.map_or(empty, |r| &r.1));
        let index = (0..a.len().max(b.len())).find(|&i| a.get(i) != b.get(i)).unwrap_or(0);
        let (expected, found) = if same_runner {
            let text = |list: &[(u64, String)]| list.get(index).map(|(_, text)| text.clone());
            (text(a), text(b))
        } else {
            (left.map(|l| format!("runner `{}`", l.0)), right.map(|r| format!("runner `{}`", r.0)))
        };
        return Err(RuntimeError::PlanMismatch(Disagreement {
            group: group.to_owned(),
            rank: comm.ranks()[odd],
            runner,
            index: if same_runner { index } else { 0 },
            expected,
            found,
        }));
    }
    // Equal lists, different digests: the formats differ.
    Err(RuntimeError::PlanMismatch(Disagreement {
        group: group.to_owned(),
        rank: comm.ranks()[odd],
        runner: String::new(),
        index: 0,
        expected: digests[common].clone(),
        found: digests[odd].clone(),
    }))
}

/// Checks that symmetric views of a group lie at equal offsets on all its ranks.
///
/// # Errors
/// [`RuntimeError::OffsetMismatch`]; those of the exchange.
pub fn compare_offsets<C: Comm>(group: &str, comm: &C, offsets: &[(u64, u64)]) -> Result<(), RuntimeError> {
    let all = exchange(comm, &offsets.to_vec())?;
    if all.iter().all(|other| other == &all[0]) {
        return Ok(());
    }
    Err(RuntimeError::OffsetMismatch { group: group.to_owned(), rank: comm.ranks()[odd_one(&all).1] })
}

/// Of values that are not all equal: where the most common one is first, and where another one is first.
fn odd_one<T: PartialEq>(values: &[T]) -> (usize, usize) {
    let count = |value: &T| values.iter().filter(|other| *other == value).count();
    // `max_by_key` keeps the last maximum; going backwards makes it the lowest rank.
    let common = (0..values.len()).rev().max_by_key(|&at| count(&values[at])).unwrap_or(0);
    let odd = (0..values.len()).find(|&at| values[at] != values[common]).unwrap_or(common);
    (common, odd)
}

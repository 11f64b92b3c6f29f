//! The events that a framework's graphs record and wait for: as few nodes as the fences of a plan can do with.
//!
//! A fence says that an acquire follows a release. Releases that stand at one place of a captured graph, with nothing
//! between them, are one record, at the last of them; an acquire that follows another one, which waits for the same
//! record, does not wait again. Both rest on the proven order, which a capture must prove again
//! ([`Order::lost`](crate::order::Order::lost)).

use std::collections::{BTreeMap, BTreeSet};

use sessile_plan::{Fence, RequestId};

use crate::order::{Mark, Order};

/// A runner, as far as its events need it.
#[derive(Clone, Copy, Debug)]
pub struct Proven<'a> {
    /// Its requests, in order.
    pub requests: &'a [RequestId],
    /// What is proven of its marks. `None`: nothing, so that it waits at its head and records at its end.
    pub order: Option<&'a Order>,
}

/// Which event is recorded at which release, and which ones an acquire waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// How many there are; they are numbered from 0.
    pub count: usize,
    records: BTreeMap<RequestId, usize>,
    /// What each event says is free.
    groups: Vec<Vec<RequestId>>,
    waits: BTreeMap<RequestId, Vec<usize>>,
}

impl Events {
    /// The events of a plan's fences.
    #[must_use]
    pub fn of(fences: &[Fence], runners: &[Proven<'_>]) -> Events {
        let owner: BTreeMap<RequestId, usize> = runners
            .iter()
            .enumerate()
            .flat_map(|(at, runner)| runner.requests.iter().map(move |id| (*id, at)))
            .collect();
        let fenced: BTreeSet<RequestId> = fences.iter().map(|fence| fence.release).collect();
        // Where each is released: by its mark, else at the end of its runner.
        let mut releaser = owner.clone();
        // For each fenced release the one at which its event is recorded.
        let mut leaders: BTreeMap<RequestId, RequestId> = BTreeMap::new();
        let mut released = BTreeSet::new();
        for (at, runner) in runners.iter().enumerate() {
            let Some(order) = runner.order else { continue };
            let releases = order.places().filter_map(|(mark, _)| match mark {
                Mark::Release(id) => Some((id, at)),
                _ => None,
            });
            releaser.extend(releases);
        }
        // A wait inside the graph that records must find the record before it, and exactly that one.
        let inside: BTreeSet<RequestId> = fences
            .iter()
            .filter(|fence| releaser.get(&fence.release) == owner.get(&fence.acquire))
            .map(|fence| fence.release)
            .collect();
        for order in runners.iter().filter_map(|runner| runner.order) {
            let mut open: BTreeMap<usize, Vec<RequestId>> = BTreeMap::new();
            for (mark, place) in order.places() {
                match mark {
                    Mark::Release(id) => {
                        released.insert(id);
                        if inside.contains(&id) {
                            leaders.insert(id, id);
                        } else if fenced.contains(&id) {
                            open.entry(place).or_default().push(id);
                        }
                    }
                    // What stands behind its waits, or behind the completion, is recorded apart.
                    _ => lead(&mut leaders, open.remove(&place)),
                }
            }
            open.into_values().for_each(|group| lead(&mut leaders, Some(group)));
        }
        // Also what a runner without proof acquires is read until a proven runner releases it.
        for runner in runners {
            let at_end = |id: &&RequestId| fenced.contains(id) && !released.contains(id);
            lead(&mut leaders, Some(runner.requests.iter().filter(at_end).copied().collect()));
        }

        let mut events = Events::default();
        for leader in leaders.values() {
            let next = events.records.len();
            events.records.entry(*leader).or_insert(next);
        }
        events.count = events.records.len();
        events.groups = vec![Vec::new(); events.count];
        for (id, leader) in &leaders {
            events.groups[events.records[leader]].push(*id);
        }
        let mut all: BTreeMap<RequestId, BTreeSet<usize>> = BTreeMap::new();
        let mut inner: BTreeSet<usize> = BTreeSet::new();
        for fence in fences {
            let event = leaders.get(&fence.release).and_then(|leader| events.records.get(leader));
            all.entry(fence.acquire).or_default().extend(event);
            inner.extend(event.filter(|_| inside.contains(&fence.release)));
        }
        for runner in runners {
            for (at, id) in runner.requests.iter().enumerate() {
                let Some(wanted) = all.get(id) else { continue };
                let known = |event: &usize| {
                    !inner.contains(event)
                        && runner.requests.iter().enumerate().any(|(other, earlier)| {
                            let waits = all.get(earlier).is_some_and(|waits| waits.contains(event));
                            waits
                                && match runner.order {
                                    None => other < at,
                                    Some(order) => {
                                        order.precedes(Mark::Acquire(*earlier), Mark::Acquire(*id))
                                    }
                                }
                        })
                };
                let left: Vec<usize> = wanted.iter().copied().filter(|event| !known(event)).collect();
                if !left.is_empty() {
                    events.waits.insert(*id, left);
                }
            }
        }
        events
    }

    /// The event that is recorded at a release.
    #[must_use]
    pub fn record(&self, release: RequestId) -> Option<usize> {
        self.records.get(&release).copied()
    }

    /// The requests that are free once an event is recorded.
    #[must_use]
    pub fn recorded(&self, event: usize) -> &[RequestId] {
        self.groups.get(event).map_or(&[], Vec::as_slice)
    }

    /// The events that an acquire waits for.
    #[must_use]
    pub fn waits(&self, acquire: RequestId) -> &[usize] {
        self.waits.get(&acquire).map_or(&[], Vec::as_slice)
    }
}

/// The event of a group is recorded at its last release.
fn lead(leaders: &mut BTreeMap<RequestId, RequestId>, group: Option<Vec<RequestId>>) {
    let Some(group) = group else { return };
    if let Some(&last) = group.last() {
        leaders.extend(group.iter().map(|&id| (id, last)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Node;

    fn ids<const N: usize>(ids: [u32; N]) -> Vec<RequestId> {
        ids.into_iter().map(RequestId).collect()
    }

    fn fence(release: u32, acquire: u32) -> Fence {
        Fence { release: RequestId(release), acquire: RequestId(acquire) }
    }

    /// Marks over a chain of nodes: each with the number of the node that it stands at.
    fn order(marks: &[(Mark, u64)]) -> Order {
        let nodes: Vec<Node> =
            (0..8).map(|id| Node { id, after: id.checked_sub(1).into_iter().collect() }).collect();
        let marked: Vec<(Mark, Vec<u64>)> = marks.iter().map(|&(mark, at)| (mark, vec![at])).collect();
        Order::captured(&nodes, &marked).unwrap()
    }

    fn acquire(id: u32) -> Mark {
        Mark::Acquire(RequestId(id))
    }

    fn release(id: u32) -> Mark {
        Mark::Release(RequestId(id))
    }

    #[test]
    fn releases_at_one_place_are_one_record_and_acquires_behind_it_wait_once() {
        let first = order(&[
            (acquire(0), 0),
            (acquire(1), 0),
            (acquire(2), 0),
            (release(0), 3),
            (release(1), 3),
            (release(2), 5),
        ]);
        let second = order(&[(acquire(3), 0), (acquire(4), 0), (acquire(5), 2)]);
        let (a, b) = (ids([0, 1, 2]), ids([3, 4, 5]));
        let runners =
            [Proven { requests: &a, order: Some(&first) }, Proven { requests: &b, order: Some(&second) }];
        let events = Events::of(&[fence(0, 3), fence(1, 4), fence(2, 5)], &runners);
        assert_eq!(events.count, 2);
        assert_eq!((events.record(RequestId(0)), events.record(RequestId(1))), (None, Some(0)));
        assert_eq!(events.record(RequestId(2)), Some(1));
        assert_eq!(events.waits(RequestId(3)), [0]);
        assert!(events.waits(RequestId(4)).is_empty());
        assert_eq!(events.waits(RequestId(5)), [1]);
    }

    #[test]
    fn an_acquire_or_a_completion_between_two_releases_keeps_them_apart() {
        for between in [acquire(2), Mark::Complete] {
            let first =
                order(&[(acquire(0), 0), (acquire(1), 0), (release(0), 3), (between, 3), (release(1), 3)]);
            let (a, b) = (ids([0, 1, 2]), ids([3, 4]));
            let runners =
                [Proven { requests: &a, order: Some(&first) }, Proven { requests: &b, order: None }];
            let events = Events::of(&[fence(0, 3), fence(1, 4)], &runners);
            assert_eq!(events.count, 2);
            assert_eq!((events.record(RequestId(0)), events.record(RequestId(1))), (Some(0), Some(1)));
        }
    }

    #[test]
    fn a_fence_inside_a_runner_has_a_record_of_its_own_and_every_acquire_waits() {
        let only = order(&[
            (acquire(0), 0),
            (acquire(1), 0),
            (release(0), 2),
            (release(1), 2),
            (acquire(2), 3),
            (acquire(3), 4),
        ]);
        let a = ids([0, 1, 2, 3]);
        let runners = [Proven { requests: &a, order: Some(&only) }];
        let events = Events::of(&[fence(0, 2), fence(0, 3)], &runners);
        assert_eq!((events.record(RequestId(0)), events.record(RequestId(1))), (Some(0), None));
        assert_eq!((events.waits(RequestId(2)), events.waits(RequestId(3))), (&[0][..], &[0][..]));
    }

    #[test]
    fn acquires_on_two_branches_wait_each() {
        let nodes: Vec<Node> = [vec![], vec![0], vec![0]]
            .into_iter()
            .enumerate()
            .map(|(id, after)| Node { id: id as u64, after })
            .collect();
        let branches = Order::captured(&nodes, &[(acquire(1), vec![1]), (acquire(2), vec![2])]).unwrap();
        let (a, b) = (ids([0]), ids([1, 2]));
        let runners = [Proven { requests: &a, order: None }, Proven { requests: &b, order: Some(&branches) }];
        let events = Events::of(&[fence(0, 1), fence(0, 2)], &runners);
        assert_eq!((events.waits(RequestId(1)), events.waits(RequestId(2))), (&[0][..], &[0][..]));
    }

    #[test]
    fn what_a_proven_runner_releases_is_recorded_there_also_if_nothing_is_proven_of_its_owner() {
        let second = order(&[(release(0), 1), (acquire(2), 2)]);
        let (a, b, c) = (ids([0, 1]), ids([2]), ids([3]));
        let runners = [
            Proven { requests: &a, order: None },
            Proven { requests: &b, order: Some(&second) },
            Proven { requests: &c, order: None },
        ];
        let events = Events::of(&[fence(0, 3), fence(1, 3)], &runners);
        assert_eq!((events.record(RequestId(0)), events.record(RequestId(1))), (Some(0), Some(1)));
        assert_eq!(events.waits(RequestId(3)), [0, 1]);
    }

    #[test]
    fn of_a_runner_without_proof_all_is_recorded_at_its_end_and_waited_for_once() {
        let (a, b) = (ids([0, 1]), ids([2, 3]));
        let runners = [Proven { requests: &a, order: None }, Proven { requests: &b, order: None }];
        let events = Events::of(&[fence(0, 2), fence(1, 3)], &runners);
        assert_eq!(events.count, 1);
        assert_eq!((events.record(RequestId(0)), events.record(RequestId(1))), (None, Some(0)));
        assert_eq!((events.waits(RequestId(2)), events.waits(RequestId(3))), (&[0][..], &[0; 0][..]));
    }
}

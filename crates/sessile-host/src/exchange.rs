//! Where hosts meet without the device: all-gathers of bytes, and the making of communicators.

use std::collections::HashMap;

use sessile_hal::DeviceError;

use crate::comm::Group;
use crate::engine::Engine;
use crate::sync::{Arc, lock};
use crate::waiting::Wait;
use crate::world::Core;

/// The exchanges of a group. Vectors are by seat.
pub(crate) struct Rounds {
    next: Vec<u64>,
    open: HashMap<u64, Round>,
}

struct Round {
    payloads: Vec<Option<Arc<[u8]>>>,
    /// Members that have still to take the result or to give up.
    left: usize,
}

impl Rounds {
    pub(crate) fn new(size: usize) -> Self {
        Rounds { next: vec![0; size], open: HashMap::new() }
    }

    /// Gives a member's payload to its next round; the round's number.
    fn give(&mut self, member: usize, payload: &[u8]) -> u64 {
        let size = self.next.len();
        let number = self.next[member];
        self.next[member] += 1;
        let round =
            self.open.entry(number).or_insert_with(|| Round { payloads: vec![None; size], left: size });
        round.payloads[member] = Some(payload.into());
        number
    }

    /// The first member that round `number` lacks.
    pub(crate) fn missing(&self, number: u64) -> Option<usize> {
        self.open.get(&number)?.payloads.iter().position(Option::is_none)
    }

    /// Whether `member` has not come to round `number`.
    pub(crate) fn lacks(&self, number: u64, member: usize) -> bool {
        self.open.get(&number).is_some_and(|round| round.payloads[member].is_none())
    }

    /// Leaves a round, with what there is.
    fn leave(&mut self, number: u64) -> Vec<Option<Arc<[u8]>>> {
        let Some(round) = self.open.get_mut(&number) else { return Vec::new() };
        round.left -= 1;
        if round.left > 0 {
            return round.payloads.clone();
        }
        self.open.remove(&number).map(|round| round.payloads).unwrap_or_default()
    }
}

/// The groups made under one name.
pub(crate) struct Name {
    ranks: Vec<u32>,
    /// How often each has asked, by seat.
    asked: Vec<u64>,
    /// Groups that wait for members, by how often they were asked for.
    forming: HashMap<u64, Arc<Group>>,
}

impl Core {
    pub(crate) fn exchange(
        &self,
        group: &Arc<Group>,
        rank: u32,
        payload: &[u8],
    ) -> Result<Vec<Vec<u8>>, DeviceError> {
        let mut engine = lock(&self.engine);
        let Some(seat) = group.seat(rank) else { return Ok(Vec::new()) };
        let number = lock(&group.state).rounds.give(seat, payload);
        engine.settle();
        let wait = Wait::Exchange { group: group.clone(), number };
        let (engine, outcome) = self.block(engine, rank, wait);
        let payloads = lock(&group.state).rounds.leave(number);
        drop(engine);
        outcome?;
        // A rank that is folded away gives what the one that stands for it gives.
        let of = |member: &u32| {
            let seat = group.seat(*member).unwrap_or(0);
            payloads.get(seat)?.as_ref().map(|payload| payload.to_vec())
        };
        Ok(group.ranks.iter().filter_map(of).collect())
    }

    pub(crate) fn form_group(&self, rank: u32, name: &str, ranks: &[u32]) -> Result<Arc<Group>, DeviceError> {
        let bad = |why| DeviceError::BadGroup { name: name.to_owned(), ranks: ranks.to_vec(), why };
        if ranks.iter().any(|&r| r >= self.options.ranks) {
            return Err(bad("a rank is not in the world"));
        }
        if ranks.iter().enumerate().any(|(at, r)| ranks[..at].contains(r)) {
            return Err(bad("a rank is named twice"));
        }
        if !ranks.contains(&rank) {
            return Err(bad("this rank is not a member"));
        }
        let mut engine = lock(&self.engine);
        engine.forbid_in_capture(rank, "communicator")?;
        let group = engine.ask(name, ranks, rank).ok_or_else(|| {
            engine.refuse(name, rank);
            bad("the name belongs to a group of other ranks")
        })?;
        engine.settle();
        let (_engine, outcome) = self.block(engine, rank, Wait::Join { group: group.clone() });
        outcome?;
        Ok(group)
    }
}

impl Engine {
    /// Counts a member in; `None` if the name belongs to other ranks.
    fn ask(&mut self, name: &str, ranks: &[u32], rank: u32) -> Option<Arc<Group>> {
        let running = self.ranks.len() as u32;
        let seat = ranks.iter().filter(|r| **r < running).position(|r| *r == rank)?;
        let entry = self.names.entry(name.to_owned()).or_insert_with(|| Name {
            ranks: ranks.to_vec(),
            asked: vec![0; ranks.iter().filter(|r| **r < running).count()],
            forming: HashMap::new(),
        });
        if entry.ranks != ranks {
            return None;
        }
        let instance = entry.asked[seat];
        entry.asked[seat] += 1;
        let groups = &mut self.groups;
        let group = entry.forming.entry(instance).or_insert_with(|| {
            let group = Arc::new(Group::new(name, ranks, running));
            groups.retain(|known| known.strong_count() > 0);
            groups.push(Arc::downgrade(&group));
            group
        });
        let group = group.clone();
        let complete = {
            let mut state = lock(&group.state);
            state.present[seat] = true;
            state.present.iter().all(|&present| present)
        };
        if complete {
            entry.forming.remove(&instance);
        }
        Some(group)
    }

    /// `rank` asked for other ranks under `name`: the members that wait for it there need not wait longer.
    fn refuse(&mut self, name: &str, rank: u32) {
        for group in self.names.get(name).into_iter().flat_map(|entry| entry.forming.values()) {
            if let Some(seat) = group.seat(rank) {
                let mut state = lock(&group.state);
                state.refused |= !state.present[seat];
            }
        }
        self.settle();
    }
}

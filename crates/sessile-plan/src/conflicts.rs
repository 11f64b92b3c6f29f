//! Conflicts between classes: what must not share bytes.
//!
//! Every pair of uses that conflicts makes its classes conflict, in whichever step. Under the barrier there are two
//! ways to count depth when runners are launched more than once: between all launches, or, as alternating arenas do,
//! between the first launches alone, while later ones must only not be live at once.

use crate::{
    classes::{Class, Depth, classes, uses},
    error::PlanError,
    limits::ORDER_WORK_MAX,
    options::{PlanOptions, StepCut, Strategy},
    order::runner_orders,
    precedence::{Conflicting, conflicting},
    roster::Roster,
};

/// Rounds of a step that show every conflict around the circle: a use, what began before it, and what outlives a round.
const ROUNDS: u32 = 3;

/// All conflicts of a trace under some options.
pub(crate) struct Conflicts {
    pub(crate) classes: Vec<Class>,
    /// The class of each request.
    pub(crate) class_of: Vec<usize>,
    /// By step, where depth counts.
    pub(crate) held: Vec<Conflicting>,
    /// By step, where only what is live counts.
    pub(crate) live: Vec<Conflicting>,
    /// Step and index of each class's first use.
    first: Vec<(usize, usize)>,
    /// Whether no runner is launched twice under the barrier, so that both ways to count depth are one.
    pub(crate) plain: bool,
}

impl Conflicts {
    pub(crate) fn new(roster: &Roster<'_>, options: &PlanOptions) -> Result<Conflicts, PlanError> {
        let orders = runner_orders(roster.trace, options.effective_launch_order());
        let classes = classes(roster, options, &orders.0);
        let rounds = match options.step_cut {
            StepCut::Barrier => 1,
            StepCut::Wrap => ROUNDS,
        };
        let all = |depth| -> Result<Vec<Conflicting>, PlanError> {
            let one = |step| {
                let uses = uses(roster, options, &classes, step, rounds, depth);
                conflicting(roster, &classes, &orders, step, rounds, uses)
            };
            let found: Option<Vec<Conflicting>> = roster.steps.iter().map(one).collect();
            found.ok_or(PlanError::OrderTooCostly {
                limit: ORDER_WORK_MAX,
                launches: roster.trace.launch_count(),
                requests: roster.entries.len(),
            })
        };
        let held = all(Depth::Counts)?;
        let once = roster.positions.iter().all(|positions| positions.len() == 1);
        let plain = options.step_cut == StepCut::Barrier && once;
        let own = options.strategy == Strategy::Sessile;
        let live = if plain && own { Vec::new() } else { all(Depth::None)? };
        let mut class_of = vec![0; roster.entries.len()];
        for (number, class) in classes.iter().enumerate() {
            class.members.iter().for_each(|&member| class_of[member] = number);
        }
        let mut first = vec![(usize::MAX, 0); classes.len()];
        for (step, conflicting) in held.iter().enumerate() {
            for (at, used) in conflicting.uses.iter().enumerate() {
                if first[used.class].0 == usize::MAX {
                    first[used.class] = (step, at);
                }
            }
        }
        Ok(Conflicts { classes, class_of, held, live, first, plain })
    }

    /// Whether a use is the first of its class.
    pub(crate) fn is_first(&self, step: usize, at: usize) -> bool {
        self.first[self.held[step].uses[at].class] == (step, at)
    }

    /// With depth between all launches.
    pub(crate) fn strict(&self) -> Adjacency {
        Adjacency::new(self.classes.len(), pairs(&self.held, |_, _| true))
    }

    /// With depth between first launches.
    pub(crate) fn lenient(&self) -> Adjacency {
        let first = pairs(&self.held, |step, at| self.is_first(step, at));
        let live = pairs(&self.live, |_, _| true);
        Adjacency::new(self.classes.len(), first.chain(live))
    }
}

fn pairs(
    steps: &[Conflicting],
    counts: impl Fn(usize, usize) -> bool + Copy,
) -> impl Iterator<Item = (u32, u32)> {
    steps.iter().enumerate().flat_map(move |(step, found)| {
        let later = (0..found.uses.len()).filter(move |&at| counts(step, at));
        later.flat_map(move |at| {
            let earlier = found.earlier(at).iter().filter(move |&&other| counts(step, other as usize));
            let b = found.uses[at].class as u32;
            earlier.map(move |&other| (found.uses[other as usize].class as u32, b)).filter(|(a, b)| a != b)
        })
    })
}

/// Neighbours of each class. A class conflicts with itself too: its members are live at once.
pub(crate) struct Adjacency {
    starts: Vec<usize>,
    neighbors: Vec<u32>,
}

impl Adjacency {
    fn new(classes: usize, pairs: impl Iterator<Item = (u32, u32)>) -> Adjacency {
        let mut both: Vec<u64> = Vec::new();
        for (a, b) in pairs {
            both.push(u64::from(a) << 32 | u64::from(b));
            both.push(u64::from(b) << 32 | u64::from(a));
        }
        both.sort_unstable();
        both.dedup();
        let mut starts = Vec::with_capacity(classes + 1);
        let mut at = 0;
        for class in 0..=classes as u64 {
            while both.get(at).is_some_and(|&pair| pair >> 32 < class) {
                at += 1;
            }
            starts.push(at);
        }
        Adjacency { starts, neighbors: both.into_iter().map(|pair| pair as u32).collect() }
    }

    pub(crate) fn of(&self, class: usize) -> &[u32] {
        &self.neighbors[self.starts[class]..self.starts[class + 1]]
    }
}

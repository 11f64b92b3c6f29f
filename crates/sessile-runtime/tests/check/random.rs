//! Random small logs against the naive checker.

use std::collections::BTreeSet;

use proptest::prelude::*;
use sessile_runtime::check::{Reason, check};
use sessile_runtime::log::{LogAccess, LogNode, Mode, Work};

use crate::build::{Rank, job};
use crate::naive::{Place, truth};

#[derive(Clone, Debug)]
enum Action {
    Op {
        rank: u32,
        stream: u32,
        accesses: Vec<LogAccess>,
    },
    Record {
        rank: u32,
        stream: u32,
        event: u32,
    },
    Wait {
        rank: u32,
        stream: u32,
        event: u32,
    },
    Launch {
        rank: u32,
        stream: u32,
        graph: u32,
    },
    Host {
        rank: u32,
        stream: u32,
        accesses: Vec<LogAccess>,
    },
    /// On both ranks.
    Collective {
        streams: [u32; 2],
        accesses: [Vec<LogAccess>; 2],
    },
    /// On one rank alone: a fault.
    Part {
        rank: u32,
        stream: u32,
    },
    Exchange,
}

fn access() -> impl Strategy<Value = LogAccess> {
    let mode = prop_oneof![Just(Mode::Read), Just(Mode::Write), Just(Mode::Update)];
    (0..2_u32, 0..2_u64, 0..8_u64, 1..6_u64, mode).prop_map(|(rank, memory, start, length, mode)| LogAccess {
        rank,
        memory,
        start,
        end: start + length,
        mode,
    })
}

fn accesses() -> impl Strategy<Value = Vec<LogAccess>> {
    prop::collection::vec(access(), 0..3)
}

fn action() -> impl Strategy<Value = Action> {
    let at = || (0..2_u32, 0..3_u32);
    prop_oneof![
        4 => (at(), accesses())
            .prop_map(|((rank, stream), accesses)| Action::Op { rank, stream, accesses }),
        2 => (at(), 0..2_u32).prop_map(|((rank, stream), event)| Action::Record { rank, stream, event }),
        2 => (at(), 0..2_u32).prop_map(|((rank, stream), event)| Action::Wait { rank, stream, event }),
        3 => (at(), 0..2_u32).prop_map(|((rank, stream), graph)| Action::Launch { rank, stream, graph }),
        1 => (at(), accesses())
            .prop_map(|((rank, stream), accesses)| Action::Host { rank, stream, accesses }),
        2 => ([0..3_u32, 0..3_u32], [accesses(), accesses()])
            .prop_map(|(streams, accesses)| Action::Collective { streams, accesses }),
        1 => at().prop_map(|(rank, stream)| Action::Part { rank, stream }),
        1 => Just(Action::Exchange),
    ]
}

fn nodes() -> impl Strategy<Value = Vec<LogNode>> {
    let work = prop_oneof![
        4 => Just(Work::Op("kernel".into())),
        1 => Just(Work::Empty),
        1 => (0..2_u32).prop_map(Work::Record),
        1 => (0..2_u32).prop_map(Work::Wait),
        1 => Just(Work::Collective { comm: 0, kind: "all_reduce".into() }),
    ];
    let node = (work, accesses(), any::<u8>()).prop_map(|(work, accesses, edges)| {
        // Bits of the nodes before it; cut to those that exist below.
        let dependencies = (0..5).filter(|bit| edges >> bit & 1 == 1).collect();
        let accesses = match work {
            Work::Op(_) | Work::Collective { .. } => accesses,
            Work::Record(_) | Work::Wait(_) | Work::Empty => Vec::new(),
        };
        LogNode { work, label: String::new(), accesses, dependencies }
    });
    prop::collection::vec(node, 1..6).prop_map(|mut nodes| {
        for (at, node) in nodes.iter_mut().enumerate() {
            node.dependencies.retain(|&on| (on as usize) < at);
        }
        nodes
    })
}

fn ranks(graphs: [[Vec<LogNode>; 2]; 2], actions: &[Action]) -> Vec<Rank> {
    let mut ranks = vec![Rank::new(0, 3), Rank::new(1, 3)];
    for (rank, graphs) in ranks.iter_mut().zip(graphs) {
        for (at, nodes) in graphs.into_iter().enumerate() {
            rank.graph(&format!("g{at}"), nodes);
        }
    }
    for (at, action) in actions.iter().enumerate() {
        // A label of its own keeps eager operations apart in the report.
        let label = format!("a{at}");
        match action {
            Action::Op { rank, stream, accesses } => {
                ranks[*rank as usize].op(*stream, &label, accesses);
            }
            Action::Record { rank, stream, event } => {
                ranks[*rank as usize].record(*stream, *event);
            }
            Action::Wait { rank, stream, event } => {
                ranks[*rank as usize].wait(*stream, *event);
            }
            Action::Launch { rank, stream, graph } => {
                ranks[*rank as usize].launch(*graph, *stream);
            }
            Action::Host { rank, stream, accesses } => ranks[*rank as usize].host(*stream, accesses),
            Action::Collective { streams, accesses } => {
                for (rank, (stream, accesses)) in ranks.iter_mut().zip(streams.iter().zip(accesses)) {
                    let work = Work::Collective { comm: 0, kind: "all_reduce".into() };
                    rank.work(*stream, work, &label, accesses);
                }
            }
            Action::Part { rank, stream } => {
                ranks[*rank as usize].collective(*stream, "all_reduce", &[]);
            }
            Action::Exchange => ranks.iter_mut().for_each(Rank::exchange),
        }
    }
    ranks
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// What is reported is true, and every byte that is raced for is reported by some pair.
    #[test]
    fn the_checker_agrees_with_the_definitions(
        graphs in [[nodes(), nodes()], [nodes(), nodes()]],
        actions in prop::collection::vec(action(), 1..13),
    ) {
        let log = job(ranks(graphs, &actions));
        let (truth, report) = (truth(&log), check(&log));
        let deadlock = report.violations.iter().any(|v| matches!(v.reason, Reason::Deadlock { .. }));
        prop_assert_eq!(truth.deadlock, deadlock, "{}", report);
        let mut bytes = BTreeSet::new();
        for violation in &report.violations {
            if let Reason::Unordered { memory, start, end, first, second, .. } = &violation.reason {
                let place = |operation: &sessile_runtime::check::Operation| -> Place {
                    (operation.rank, operation.entry as usize, operation.node.map(|node| node as usize))
                };
                let pair = (place(first).min(place(second)), place(first).max(place(second)));
                // Before a deadlock's ring is found, what was reached is judged by the same order.
                prop_assert!(truth.deadlock || truth.races.contains(&pair), "{} is not so", violation);
                bytes.extend((*start..*end).map(|byte| (memory.rank, memory.serial, byte)));
            }
        }
        if !truth.deadlock {
            prop_assert_eq!(&truth.bytes, &bytes, "{}", report);
            prop_assert_eq!(truth.races.is_empty(), bytes.is_empty());
        }
    }
}

//! Each rule of order, with a log that keeps it and one that breaks it.

use sessile_runtime::check::{Hazard, Reason};
use sessile_runtime::log::{Entry, LogComm, Work};

use crate::build::{Rank, clean, codes, kernel, node, race, read, update, verdict, write};

const A: (u64, u64) = (0, 16);

#[test]
fn one_stream_is_an_order_and_two_are_none() {
    let program = |second: u32| {
        let mut rank = Rank::new(0, 2);
        rank.op(0, "produce", &[write((0, 1), A)]);
        rank.op(second, "consume", &[read((0, 1), (8, 24))]);
        vec![rank]
    };
    clean(program(0));
    race(program(1), ("produce", "consume"), Hazard::ReadAfterWrite, (8, 16));
}

#[test]
fn two_readers_need_no_order() {
    let mut rank = Rank::new(0, 2);
    rank.op(0, "one", &[read((0, 1), A)]);
    rank.op(1, "other", &[read((0, 1), A)]);
    clean(vec![rank]);
}

#[test]
fn neighbouring_bytes_and_other_memories_do_not_conflict() {
    let mut rank = Rank::new(0, 2);
    rank.op(0, "one", &[write((0, 1), A), write((0, 2), A)]);
    rank.op(1, "other", &[write((0, 1), (16, 32)), write((1, 1), A), write((0, 2), (5, 5))]);
    clean(vec![rank]);
}

#[test]
fn an_event_orders_if_its_wait_comes_after_its_record() {
    let program = |early: bool| {
        let mut rank = Rank::new(0, 2);
        if early {
            rank.wait(1, 7);
        }
        rank.op(0, "produce", &[write((0, 1), A)]);
        rank.record(0, 7);
        if !early {
            rank.wait(1, 7);
        }
        rank.op(1, "update", &[update((0, 1), A)]);
        vec![rank]
    };
    clean(program(false));
    race(program(true), ("produce", "update"), Hazard::WriteAfterWrite, A);
}

#[test]
fn a_wait_sees_the_latest_record_only() {
    let program = |again: bool| {
        let mut rank = Rank::new(0, 3);
        rank.op(0, "produce", &[write((0, 1), A)]);
        rank.record(0, 7);
        if again {
            rank.record(2, 7);
        }
        rank.wait(1, 7);
        rank.op(1, "consume", &[read((0, 1), A)]);
        vec![rank]
    };
    clean(program(false));
    race(program(true), ("produce", "consume"), Hazard::ReadAfterWrite, A);
}

#[test]
fn an_event_that_was_never_recorded_lets_pass() {
    let mut rank = Rank::new(0, 2);
    rank.op(0, "produce", &[write((0, 1), A)]);
    rank.wait(1, 7);
    rank.op(1, "consume", &[read((0, 1), A)]);
    race(vec![rank], ("produce", "consume"), Hazard::ReadAfterWrite, A);
}

/// The case that sessile is about:
///
/// ```text
///   graph A, stream 0   gemm ── reduce-scatter reads [0,16) ── record
///   graph C, stream 1                            wait ── gemm writes [0,16)
/// ```
#[test]
fn a_fence_between_graphs_orders_reuse_and_its_removal_is_reported() {
    let program = |record: bool, wait: bool| {
        let ranks = (0..2).map(|at| {
            let mut rank = Rank::new(at, 2);
            let mut a = vec![
                kernel("gemm A", &[write((at, 0), A)], &[]),
                node(
                    Work::Collective { comm: 0, kind: "reduce_scatter".into() },
                    "reduce A",
                    &[read((at, 0), A), write((at, 1), (0, 8))],
                    &[0],
                ),
            ];
            if record {
                a.push(node(Work::Record(3), "", &[], &[1]));
            }
            let mut c = Vec::new();
            if wait {
                c.push(node(Work::Wait(3), "", &[], &[]));
            }
            c.push(kernel("gemm C", &[write((at, 0), A)], if wait { &[0] } else { &[] }));
            let (a, c) = (rank.graph("A", a), rank.graph("C", c));
            for _ in 0..3 {
                rank.launch(a, 0);
                rank.launch(c, 1);
                rank.host(0, &[]);
                rank.host(1, &[]);
            }
            rank
        });
        ranks.collect::<Vec<_>>()
    };
    clean(program(true, true));
    for (record, wait) in [(false, true), (true, false), (false, false)] {
        let report = verdict(program(record, wait));
        let reduce = report.violations.iter().find(|violation| match &violation.reason {
            Reason::Unordered { hazard, first, second, memory, start, end, .. } => {
                *hazard == Hazard::WriteAfterRead
                    && (first.label.as_str(), second.label.as_str()) == ("reduce A", "gemm C")
                    && (first.runner.as_deref(), second.runner.as_deref()) == (Some("A"), Some("C"))
                    && first.rank == second.rank
                    && memory.label == "m0"
                    && (*start, *end) == A
            }
            _ => false,
        });
        // Once a replay, on each rank: one violation a rank, with a count.
        assert_eq!(reduce.expect("the reuse is reported").count, 3, "{report}");
        let on = |rank: u32| {
            report.violations.iter().any(|violation| match &violation.reason {
                Reason::Unordered { first, .. } => first.rank == rank,
                _ => false,
            })
        };
        assert!(on(0) && on(1), "{report}");
    }
}

#[test]
fn a_wait_node_sees_the_records_of_older_launches_only() {
    let program = |other_first: bool| {
        let mut rank = Rank::new(0, 2);
        let fence = rank.graph(
            "fence",
            vec![node(Work::Wait(3), "", &[], &[]), kernel("use", &[write((0, 1), A)], &[0])],
        );
        let source = rank.graph(
            "source",
            vec![kernel("fill", &[write((0, 1), A)], &[]), node(Work::Record(3), "", &[], &[0])],
        );
        if other_first {
            rank.launch(source, 0);
            rank.launch(fence, 1);
        } else {
            rank.launch(fence, 1);
            rank.launch(source, 0);
        }
        vec![rank]
    };
    clean(program(true));
    race(program(false), ("use", "fill"), Hazard::WriteAfterWrite, A);
}

#[test]
fn inside_one_graph_the_order_of_capture_decides_what_a_wait_node_sees() {
    let program = |record_first: bool| {
        let mut rank = Rank::new(0, 1);
        let fill = [write((0, 1), A)];
        let mut nodes = vec![
            kernel("fill", &fill, &[]),
            node(Work::Record(3), "", &[], &[0]),
            node(Work::Wait(3), "", &[], &[]),
        ];
        if !record_first {
            nodes.swap(1, 2);
        }
        let wait = if record_first { 2 } else { 1 };
        nodes.push(kernel("use", &[read((0, 1), A)], &[wait]));
        let graph = rank.graph("self", nodes);
        rank.launch(graph, 0);
        vec![rank]
    };
    clean(program(true));
    race(program(false), ("fill", "use"), Hazard::ReadAfterWrite, A);
}

#[test]
fn nodes_are_ordered_by_edges_alone() {
    let program = |edge: &[u32]| {
        let mut rank = Rank::new(0, 1);
        let graph = rank.graph(
            "g",
            vec![
                kernel("fill", &[write((0, 1), A)], &[]),
                node(Work::Empty, "", &[], edge),
                kernel("use", &[read((0, 1), A)], &[1]),
            ],
        );
        rank.launch(graph, 0);
        vec![rank]
    };
    clean(program(&[0]));
    race(program(&[]), ("fill", "use"), Hazard::ReadAfterWrite, A);
}

#[test]
fn a_launch_follows_its_stream_and_holds_it_until_all_nodes_ended() {
    let program = |stream: u32| {
        let mut rank = Rank::new(0, 2);
        let graph = rank.graph(
            "g",
            vec![kernel("left", &[update((0, 1), A)], &[]), kernel("right", &[update((0, 2), A)], &[])],
        );
        rank.op(0, "before", &[write((0, 1), A), write((0, 2), A)]);
        rank.launch(graph, stream);
        rank.op(0, "after", &[read((0, 1), A), read((0, 2), A)]);
        vec![rank]
    };
    clean(program(0));
    let report = verdict(program(1));
    assert_eq!(codes(&report), ["unordered"; 4], "{report}");
}

#[test]
fn launches_of_one_graph_are_serial_on_any_streams() {
    let program = |same: bool| {
        let mut rank = Rank::new(0, 2);
        let nodes = || vec![kernel("add", &[update((0, 1), A)], &[])];
        let one = rank.graph("one", nodes());
        let other = if same { one } else { rank.graph("other", nodes()) };
        rank.launch(one, 0);
        rank.launch(other, 1);
        rank.launch(one, 0);
        vec![rank]
    };
    clean(program(true));
    let report = verdict(program(false));
    assert_eq!(codes(&report), ["unordered"; 2], "{report}");
}

#[test]
fn what_the_host_waited_for_precedes_what_it_enqueues_next() {
    let program = |waits: bool, late: bool| {
        let mut rank = Rank::new(0, 2);
        if waits && !late {
            rank.host(0, &[]);
        }
        rank.op(0, "produce", &[write((0, 1), A)]);
        if waits && late {
            rank.host(0, &[]);
        }
        rank.op(1, "consume", &[read((0, 1), A)]);
        vec![rank]
    };
    clean(program(true, true));
    race(program(true, false), ("produce", "consume"), Hazard::ReadAfterWrite, A);
    race(program(false, false), ("produce", "consume"), Hazard::ReadAfterWrite, A);
}

#[test]
fn a_host_wait_reaches_launches_and_streams_with_older_work() {
    let mut rank = Rank::new(0, 3);
    let graph = rank.graph("g", vec![kernel("consume", &[read((0, 1), A)], &[])]);
    rank.op(1, "old", &[]);
    rank.op(2, "old", &[]);
    rank.op(0, "produce", &[write((0, 1), A)]);
    rank.host(0, &[]);
    rank.launch(graph, 1);
    rank.op(2, "consume too", &[read((0, 1), A)]);
    clean(vec![rank]);
}

#[test]
fn bytes_that_the_host_touches_are_accesses() {
    let program = |stream: u32| {
        let mut rank = Rank::new(0, 2);
        rank.host(0, &[write((0, 1), A)]);
        rank.op(0, "work", &[update((0, 1), A)]);
        rank.host(stream, &[read((0, 1), A)]);
        vec![rank]
    };
    clean(program(0));
    race(program(1), ("work", "host read"), Hazard::ReadAfterWrite, A);
}

#[test]
fn an_exchange_orders_hosts_and_only_what_they_waited_for() {
    let program = |meet: bool, wait: bool| {
        let (mut zero, mut one) = (Rank::new(0, 1), Rank::new(1, 1));
        zero.op(0, "fill", &[write((0, 1), A)]);
        if wait {
            zero.host(0, &[]);
        }
        if meet {
            zero.exchange();
            one.exchange();
        }
        one.op(0, "peer read", &[read((0, 1), A)]);
        vec![zero, one]
    };
    clean(program(true, true));
    race(program(true, false), ("fill", "peer read"), Hazard::ReadAfterWrite, A);
    race(program(false, true), ("fill", "peer read"), Hazard::ReadAfterWrite, A);
}

#[test]
fn every_start_precedes_every_end_of_a_collective() {
    // Rank 1 overwrites what rank 0 read from it only after both have come to a collective.
    let program = |barrier: bool| {
        let (mut zero, mut one) = (Rank::new(0, 1), Rank::new(1, 1));
        zero.op(0, "peer read", &[read((1, 1), A)]);
        if barrier {
            zero.collective(0, "all_reduce", &[]);
            one.collective(0, "all_reduce", &[]);
        }
        one.op(0, "overwrite", &[write((1, 1), A)]);
        vec![zero, one]
    };
    clean(program(true));
    race(program(false), ("peer read", "overwrite"), Hazard::WriteAfterRead, A);
}

#[test]
fn one_members_end_does_not_precede_anothers() {
    // What rank 0's part itself touches, and what it does after, is not ordered before rank 1's next work.
    let (mut zero, mut one) = (Rank::new(0, 1), Rank::new(1, 1));
    zero.collective(0, "all_gather", &[write((0, 1), A)]);
    one.collective(0, "all_gather", &[]);
    one.op(0, "peer read", &[read((0, 1), A)]);
    race(vec![zero, one], ("all_gather", "peer read"), Hazard::ReadAfterWrite, A);
}

#[test]
fn starts_of_one_collective_do_not_order_each_other() {
    let (mut zero, mut one) = (Rank::new(0, 1), Rank::new(1, 1));
    zero.op(0, "fill", &[write((0, 1), A)]);
    zero.collective(0, "all_gather", &[]);
    one.collective(0, "all_gather", &[read((0, 1), A)]);
    race(vec![zero, one], ("fill", "all_gather"), Hazard::ReadAfterWrite, A);
}

#[test]
fn collectives_of_a_communicator_follow_one_another_on_each_rank() {
    let program = |comms: [u32; 2]| {
        let ranks = (0..2).map(|at| {
            let mut rank = Rank::new(at, 2);
            rank.log.comms.push(LogComm { name: "other".into(), ranks: vec![0, 1] });
            for (stream, comm) in comms.into_iter().enumerate() {
                let work = Work::Collective { comm, kind: "all_reduce".into() };
                let label = ["one", "two"][stream];
                let bytes = [update((at, 1), A)];
                rank.work(u32::try_from(stream).unwrap(), work, label, &bytes);
            }
            rank
        });
        ranks.collect::<Vec<_>>()
    };
    clean(program([0, 0]));
    assert_eq!(codes(&verdict(program([0, 1]))), ["unordered"; 2]);
}

#[test]
fn collectives_in_graphs_count_in_node_order_at_launch() {
    // Rank 0 runs two collectives from a graph, rank 1 eagerly.
    let program = |swapped: bool| {
        let (mut zero, mut one) = (Rank::new(0, 1), Rank::new(1, 2));
        let part = |kind: &str| Work::Collective { comm: 0, kind: kind.into() };
        let graph = zero.graph(
            "g",
            vec![
                node(part("all_gather"), "", &[update((0, 1), A)], &[]),
                node(part("all_reduce"), "", &[update((0, 1), A)], &[]),
            ],
        );
        zero.launch(graph, 0);
        let kinds = if swapped { ["all_reduce", "all_gather"] } else { ["all_gather", "all_reduce"] };
        one.collective(0, kinds[0], &[]);
        one.collective(1, kinds[1], &[]);
        vec![zero, one]
    };
    clean(program(false));
    let report = verdict(program(true));
    assert_eq!(codes(&report), ["collective_mismatch"], "{report}");
    assert_eq!(report.violations[0].count, 2);
}

#[test]
fn a_part_that_never_comes_is_reported() {
    let (mut zero, one) = (Rank::new(0, 1), Rank::new(1, 1));
    zero.collective(0, "all_gather", &[]);
    zero.collective(0, "all_gather", &[]);
    zero.exchange();
    let report = verdict(vec![zero, one]);
    assert_eq!(codes(&report), ["missing_part", "missing_exchange"], "{report}");
    let Reason::MissingPart { number, missing, present, .. } = &report.violations[0].reason else {
        panic!("{report}");
    };
    assert_eq!((*number, missing.as_slice(), present.rank), (0, [1].as_slice(), 0));
    assert_eq!(report.violations[0].count, 2);
}

#[test]
fn collectives_of_two_communicators_in_opposite_order_are_a_deadlock() {
    let program = |opposite: bool| {
        let ranks = (0..2).map(|at| {
            let mut rank = Rank::new(at, 1);
            rank.log.comms.push(LogComm { name: "other".into(), ranks: vec![0, 1] });
            let order = if at == 1 && opposite { [1, 0] } else { [0, 1] };
            for comm in order {
                rank.work(0, Work::Collective { comm, kind: "all_reduce".into() }, "", &[]);
            }
            rank
        });
        ranks.collect::<Vec<_>>()
    };
    clean(program(false));
    let report = verdict(program(true));
    assert_eq!(codes(&report), ["deadlock"], "{report}");
    let Reason::Deadlock { cycle, unreached } = &report.violations[0].reason else { panic!("{report}") };
    assert_eq!(cycle.len(), 2, "{report}");
    assert!(*unreached > 0);
}

#[test]
fn opposite_order_on_streams_of_their_own_is_none() {
    let ranks = (0..2).map(|at| {
        let mut rank = Rank::new(at, 2);
        rank.log.comms.push(LogComm { name: "other".into(), ranks: vec![0, 1] });
        for comm in if at == 1 { [1, 0] } else { [0, 1] } {
            rank.work(comm, Work::Collective { comm, kind: "all_reduce".into() }, "", &[]);
            rank.op(comm, "then", &[]);
        }
        rank
    });
    clean(ranks.collect());
}

#[test]
fn exchanges_in_opposite_order_are_a_deadlock() {
    let ranks = (0..2).map(|at| {
        let mut rank = Rank::new(at, 1);
        rank.log.comms.push(LogComm { name: "other".into(), ranks: vec![0, 1] });
        let order = if at == 1 { [1, 0] } else { [0, 1] };
        rank.log.entries.extend(order.map(|comm| Entry::Exchange { comm }));
        rank
    });
    let report = verdict(ranks.collect());
    assert_eq!(codes(&report), ["deadlock"], "{report}");
}

#[test]
fn two_communicators_of_one_name_and_ranks_are_told_apart_by_their_number() {
    // On rank 1 the second one of that name carries the all-reduce: it meets nobody.
    let ranks = (0..2).map(|at| {
        let mut rank = Rank::new(at, 1);
        rank.log.comms.push(LogComm { name: "world".into(), ranks: vec![0, 1] });
        rank.work(0, Work::Collective { comm: at, kind: "all_reduce".into() }, "", &[]);
        rank
    });
    assert_eq!(codes(&verdict(ranks.collect())), ["missing_part", "missing_part"]);
}

#[test]
fn a_race_of_replays_is_one_violation_with_a_count() {
    let mut rank = Rank::new(0, 2);
    let one = rank.graph("one", vec![kernel("fill", &[write((0, 1), A)], &[])]);
    let other = rank.graph("other", vec![kernel("use", &[read((0, 1), (4, 8))], &[])]);
    for _ in 0..5 {
        rank.launch(one, 0);
        rank.launch(other, 1);
        rank.host(0, &[]);
        rank.host(1, &[]);
    }
    let report = race(vec![rank], ("fill", "use"), Hazard::ReadAfterWrite, (4, 8));
    assert_eq!(report.violations[0].count, 5);
    assert_eq!((report.launches, report.ranks, report.operations), (10, 1, 20));
}

#[test]
fn the_text_of_a_race_names_all_that_one_needs() {
    let mut rank = Rank::new(0, 2);
    let graph = rank.graph("layer0.mlp", vec![kernel("wgrad", &[write((0, 0), A)], &[])]);
    rank.op(1, "reduce", &[read((0, 0), (0, 8))]);
    rank.launch(graph, 0);
    let report = verdict(vec![rank]);
    insta::assert_snapshot!(report.to_string(), @r"
    2 operations checked, 1 violation
      write after read: nothing orders `reduce` (rank 0, eager, stream `s1`, entry 0) and `wgrad` (rank 0, runner `layer0.mlp` node 0, stream `s0`, entry 1) on bytes 0..8 of `m0` (r0m0)
    ");
}

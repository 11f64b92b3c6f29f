//! The rules besides order, each with a log that keeps it and one that breaks exactly that.

use sessile_runtime::check::Reason;
use sessile_runtime::log::{Entry, LogComm, LogNode, LogView, Work, ZERO};

use crate::build::{Rank, clean, codes, kernel, node, read, update, verdict, write};

const A: (u64, u64) = (0, 16);

/// Exactly one fault, of this code; its text.
#[track_caller]
fn one(ranks: Vec<Rank>, code: &str) -> String {
    let report = verdict(ranks);
    assert_eq!(codes(&report), [code], "{report}");
    report.violations[0].to_string()
}

fn fresh(rank: &mut Rank, memory: u64) {
    let at = rank.log.rank;
    rank.log.entries.push(Entry::Fresh { accesses: vec![write((at, memory), (0, 64))] });
}

fn view(label: &str, bytes: (u64, u64), logical_end: u64) -> LogView {
    LogView { label: label.into(), memory: 0, start: bytes.0, end: bytes.1, logical_end }
}

/// Captures nodes for a plan that gave these views.
fn planned(rank: &mut Rank, runner: &str, views: Vec<LogView>, nodes: Vec<LogNode>) -> u32 {
    let graph = rank.graph(runner, nodes);
    rank.log.graphs[graph as usize].views = Some(views);
    graph
}

#[test]
fn bytes_that_nobody_wrote_since_their_allocation_must_not_be_read() {
    let program = |written: (u64, u64)| {
        let mut rank = Rank::new(0, 1);
        fresh(&mut rank, 1);
        rank.op(0, "produce", &[write((0, 1), written)]);
        rank.op(0, "consume", &[read((0, 1), A)]);
        vec![rank]
    };
    clean(program(A));
    let text = one(program((0, 12)), "never_written");
    assert!(text.contains("`consume`") && text.contains("12..16"), "{text}");
}

#[test]
fn an_update_of_new_bytes_reads_them() {
    let mut rank = Rank::new(0, 1);
    fresh(&mut rank, 1);
    rank.op(0, "add", &[update((0, 1), A)]);
    one(vec![rank], "never_written");
}

#[test]
fn bytes_that_were_mapped_again_are_new() {
    let program = |again: bool| {
        let mut rank = Rank::new(0, 1);
        fresh(&mut rank, 1);
        rank.op(0, "produce", &[write((0, 1), A)]);
        rank.host(0, &[]);
        if again {
            fresh(&mut rank, 1);
        }
        rank.op(0, "consume", &[read((0, 1), A)]);
        vec![rank]
    };
    clean(program(false));
    one(program(true), "never_written");
}

#[test]
fn memory_from_before_the_log_may_hold_anything() {
    let mut rank = Rank::new(0, 1);
    rank.op(0, "consume", &[read((0, 1), A)]);
    clean(vec![rank]);
}

#[test]
fn a_graph_keeps_to_the_views_of_its_plan() {
    let program = |bytes: (u64, u64)| {
        let mut rank = Rank::new(0, 1);
        let views = vec![view("w", (0, 16), 16), view("o", (16, 32), 32)];
        let graph = planned(&mut rank, "layer", views, vec![kernel("gemm", &[write((0, 0), bytes)], &[])]);
        rank.launch(graph, 0);
        rank.launch(graph, 0);
        vec![rank]
    };
    clean(program((0, 16)));
    clean(program((16, 24)));
    // Also where both sides are views of its own: an operation has one operand.
    for outside in [(32, 40), (8, 24)] {
        let text = one(program(outside), "outside_view");
        assert!(text.contains("`gemm`") && text.contains("`layer`"), "{text}");
    }
}

#[test]
fn no_view_is_used_after_its_plan_was_given_up() {
    let program = |late: bool, graph: bool| {
        let mut rank = Rank::new(0, 1);
        rank.log.entries.push(Entry::Sealed { arenas: vec![0] });
        let kept = rank.graph("layer", vec![kernel("gemm", &[write((0, 0), A)], &[])]);
        rank.launch(kept, 0);
        rank.host(0, &[]);
        rank.log.entries.push(Entry::Released {});
        match (late, graph) {
            (true, true) => drop(rank.launch(kept, 0)),
            (true, false) => drop(rank.op(0, "kept view", &[read((0, 0), A)])),
            (false, _) => drop(rank.op(0, "elsewhere", &[read((0, 1), A)])),
        }
        vec![rank]
    };
    clean(program(false, false));
    assert!(one(program(true, false), "stale_view").contains("`kept view`"));
    assert!(one(program(true, true), "stale_view").contains("`layer`"));
}

/// Runs rank 0 alone: its collective's other member is rank 0 of a group of one.
fn alone() -> Rank {
    let mut rank = Rank::new(0, 2);
    rank.log.comms = vec![LogComm { name: "gtp".into(), ranks: vec![0] }];
    rank
}

fn collective(kind: &str, comm: u32) -> Work {
    Work::Collective { comm, kind: kind.into() }
}

#[test]
fn padding_is_filled_with_zeros_before_every_reduce_scatter() {
    // Tensor in [0, 24), padding in [24, 32).
    let program = |tail: Option<(&str, (u64, u64))>, kind: &str| {
        let mut rank = alone();
        let mut nodes = vec![kernel("gemm", &[write((0, 0), (0, 24))], &[])];
        if let Some((name, bytes)) = tail {
            nodes.push(node(Work::Op(name.into()), "tail", &[write((0, 0), bytes)], &[0]));
        }
        let last = nodes.len() as u32 - 1;
        nodes.push(node(
            collective(kind, 0),
            "reduce",
            &[read((0, 0), (0, 32)), write((0, 1), (0, 32))],
            &[last],
        ));
        let graph = planned(&mut rank, "layer", vec![view("w", (0, 32), 24)], nodes);
        rank.launch(graph, 0);
        vec![rank]
    };
    for kind in ["reduce_scatter", "all_to_all", "reduce_scatter"] {
        clean(program(Some((ZERO, (24, 32))), kind));
        assert!(one(program(Some((ZERO, (24, 28))), kind), "dirty_padding").contains("24..32"));
        assert!(one(program(Some(("fill", (24, 32))), kind), "dirty_padding").contains("`tail`"));
        assert!(one(program(None, kind), "dirty_padding").contains("nobody filled"));
    }
    // What gathers has no padding to look at.
    clean(program(None, "all_gather"));
}

#[test]
fn the_padding_of_another_view_over_the_same_bytes_does_not_count() {
    // Views of one runner whose lifetimes are apart: the reduce-scatter reads the smaller one, which has no padding.
    let mut rank = alone();
    let graph = planned(
        &mut rank,
        "layer",
        vec![view("padded", (0, 48), 16), view("whole", (0, 32), 32)],
        vec![
            kernel("gemm", &[write((0, 0), (0, 32))], &[]),
            node(
                collective("reduce_scatter", 0),
                "reduce",
                &[read((0, 0), (0, 32)), write((0, 1), (0, 32))],
                &[0],
            ),
        ],
    );
    rank.launch(graph, 0);
    clean(vec![rank]);
}

#[test]
fn padding_that_another_runner_wrote_over_is_reported() {
    let mut rank = alone();
    let first = planned(
        &mut rank,
        "first",
        vec![view("w", (0, 32), 24)],
        vec![
            node(Work::Op(ZERO.into()), "tail", &[write((0, 0), (24, 32))], &[]),
            kernel("gemm", &[write((0, 0), (0, 24))], &[0]),
            node(
                collective("reduce_scatter", 0),
                "reduce",
                &[read((0, 0), (0, 32)), write((0, 1), (0, 32))],
                &[1],
            ),
        ],
    );
    // The second one trusts that the tail is still zero; its plan says so, and an earlier runner differs.
    let second = planned(
        &mut rank,
        "second",
        vec![view("v", (0, 32), 24)],
        vec![
            kernel("gemm", &[write((0, 0), (0, 24))], &[]),
            node(
                collective("reduce_scatter", 0),
                "reduce again",
                &[read((0, 0), (0, 32)), write((0, 1), (0, 32))],
                &[0],
            ),
        ],
    );
    let third = planned(
        &mut rank,
        "third",
        vec![view("other", (16, 64), 64)],
        vec![kernel("dirt", &[write((0, 0), (16, 64))], &[])],
    );
    rank.launch(first, 0);
    rank.launch(second, 0); // still zero
    rank.launch(third, 0);
    rank.launch(second, 0);
    let text = one(vec![rank], "dirty_padding");
    assert!(text.contains("`dirt`") && text.contains("`reduce again`"), "{text}");
}

/// Two communicators over the same ranks.
fn twins() -> Vec<Rank> {
    let twin = |rank| {
        let mut rank = Rank::new(rank, 1);
        rank.log.comms.push(LogComm { name: "twin".into(), ranks: vec![0, 1] });
        rank
    };
    vec![twin(0), twin(1)]
}

fn reduce(rank: &mut Rank, kind: &str, comm: u32, input: (u64, (u64, u64))) {
    let at = rank.log.rank;
    let accesses = [read((at, input.0), input.1), update((at, 3), (0, 8))];
    rank.work(0, collective(kind, comm), kind, &accesses);
}

#[test]
fn a_window_is_used_by_its_own_group_alone() {
    for (kind, comm, registered, expected) in [
        ("reduce_scatter_accumulate", 0, Some(0), None),
        ("reduce_scatter", 0, Some(0), None),
        ("reduce_scatter", 1, None, None),
        ("reduce_scatter_accumulate", 1, Some(0), Some("a window of group `world`")),
        ("reduce_scatter", 1, Some(0), Some("a window of group `world`")),
        ("reduce_scatter_accumulate", 0, None, Some("no window of any group")),
        ("reduce_scatter_store", 0, None, Some("no window of any group")),
        ("symmetric_reduce_scatter", 0, None, Some("no window of any group")),
    ] {
        let mut ranks = twins();
        for rank in &mut ranks {
            if let Some(comm) = registered {
                rank.log.entries.push(Entry::Registered { memory: 1, comm });
            }
            reduce(rank, kind, comm, (1, A));
        }
        let report = verdict(ranks);
        let found: Vec<String> = report.violations.iter().map(ToString::to_string).collect();
        match expected {
            None => assert!(found.is_empty(), "{kind}: {found:?}"),
            Some(text) => {
                assert!(codes(&report).iter().all(|code| *code == "foreign_window"), "{found:?}");
                assert!(!found.is_empty() && found.iter().all(|f| f.contains(text)), "{kind}: {found:?}");
            }
        }
    }
}

#[test]
fn members_give_the_same_place_of_the_same_window() {
    let program = |window: u64, bytes: (u64, u64)| {
        let mut ranks = twins();
        for (at, rank) in ranks.iter_mut().enumerate() {
            rank.log.entries.push(Entry::Registered { memory: 1, comm: 0 });
            rank.log.entries.push(Entry::Registered { memory: 2, comm: 0 });
            let input = if at == 0 { (1, A) } else { (window, bytes) };
            reduce(rank, "reduce_scatter_accumulate", 0, input);
        }
        ranks
    };
    clean(program(1, A));
    for (window, bytes) in [(2, A), (1, (16, 32)), (1, (0, 32))] {
        let text = one(program(window, bytes), "window_mismatch");
        assert!(text.contains("rank 1") && text.contains("(0, 0, 16)"), "{text}");
    }
}

#[test]
fn additions_come_in_the_order_of_the_first_step() {
    let program = |replayed: [u32; 2], name: &str| {
        let mut rank = Rank::new(0, 1);
        rank.log.memories[1].accumulator = true;
        let add = |runner: &str, rank: &mut Rank| {
            rank.graph(runner, vec![kernel("add", &[update((0, 1), A)], &[])])
        };
        let graphs = [add("b", &mut rank), add("a", &mut rank)];
        rank.log.entries.push(Entry::Step { name: "train".into() });
        for runner in ["b", "a"] {
            rank.log.entries.push(Entry::Discovering { runner: Some(runner.into()) });
            rank.op(0, "add", &[update((0, 1), A)]);
            rank.log.entries.push(Entry::Discovering { runner: None });
        }
        rank.log.entries.push(Entry::Step { name: name.into() });
        for at in replayed {
            rank.launch(graphs[at as usize], 0);
        }
        rank.log.entries.push(Entry::Step { name: "train".into() });
        for graph in graphs {
            rank.launch(graph, 0);
        }
        vec![rank]
    };
    clean(program([0, 1], "train"));
    clean(program([1, 0], ""));
    clean(program([1, 1], "evaluation"));
    let text = one(program([1, 0], "train"), "accumulation_order");
    assert!(text.contains("addition 0 is add of runner `a`"), "{text}");
    one(program([0, 0], "train"), "accumulation_order");
}

#[test]
fn a_step_without_one_addition_is_reported_unless_the_log_ends_in_it() {
    let program = |more: bool| {
        let mut rank = Rank::new(0, 1);
        rank.log.memories[1].accumulator = true;
        let add = rank.graph("a", vec![kernel("add", &[update((0, 1), A)], &[])]);
        for step in 0..3 {
            rank.log.entries.push(Entry::Step { name: "train".into() });
            rank.launch(add, 0);
            if step != 1 || !more {
                rank.launch(add, 0);
            }
        }
        rank.log.entries.push(Entry::Step { name: "train".into() });
        rank.launch(add, 0);
        vec![rank]
    };
    clean(program(false));
    one(program(true), "accumulation_order");
}

#[test]
fn after_the_seal_nothing_is_registered_and_no_registered_memory_allocated() {
    let program = |entry: Option<Entry>, symmetric: bool| {
        let mut rank = Rank::new(0, 1);
        rank.log.memories[1].symmetric = symmetric;
        rank.log.entries.push(Entry::Registered { memory: 0, comm: 0 });
        rank.log.entries.push(Entry::Sealed { arenas: vec![0] });
        rank.log.entries.extend(entry);
        vec![rank]
    };
    let allocated = || Some(Entry::Fresh { accesses: vec![write((0, 1), (0, 64))] });
    clean(program(None, true));
    clean(program(allocated(), false)); // eager pools may grow
    assert!(one(program(allocated(), true), "after_seal").starts_with("allocation"));
    let registered = Some(Entry::Registered { memory: 1, comm: 0 });
    assert!(one(program(registered, true), "after_seal").starts_with("registration"));
    // An arena that is mapped again is registered again; and a plan that was given up lets the next one be.
    let mut rank = Rank::new(0, 1);
    rank.log.entries.push(Entry::Sealed { arenas: vec![0] });
    fresh(&mut rank, 0);
    rank.log.entries.push(Entry::Registered { memory: 0, comm: 0 });
    rank.log.entries.push(Entry::Released {});
    rank.log.entries.push(Entry::Registered { memory: 1, comm: 0 });
    clean(vec![rank]);
}

#[test]
fn gradients_become_ready_as_often_as_in_the_first_step() {
    let program = |second: &[&str], name: &str| {
        let mut rank = Rank::new(0, 1);
        let ready = |weight: &&str| Entry::Ready { weight: (*weight).into() };
        rank.log.entries.push(Entry::Step { name: "train".into() });
        rank.log.entries.extend(["a", "b", "a"].iter().map(ready));
        rank.log.entries.push(Entry::Step { name: name.into() });
        rank.log.entries.extend(second.iter().map(ready));
        vec![rank]
    };
    clean(program(&["a", "a", "b"], "train"));
    clean(program(&[], "other"));
    clean(program(&["a"], ""));
    for second in [&["a", "b"][..], &["a", "a", "b", "b"], &["a", "b", "a", "c"]] {
        one(program(second, "train"), "ready_count");
    }
}

#[test]
fn a_graph_waits_only_for_graphs_with_which_it_shares_bytes_behind_the_wait() {
    let program = |reader: (u64, u64), behind: bool, views: bool| {
        let mut rank = Rank::new(0, 2);
        let first = rank.graph(
            "first",
            vec![
                kernel("reduce", &[read((0, 0), A)], &[]),
                node(Work::Record(1), "", &[], &[0]),
                kernel("later", &[read((0, 0), (32, 48))], &[0]),
            ],
        );
        let second = rank.graph(
            "second",
            vec![
                node(Work::Wait(1), "", &[], &[]),
                kernel("gemm", &[write((0, 0), reader)], if behind { &[0] } else { &[] }),
            ],
        );
        if views {
            for graph in [first, second] {
                rank.log.graphs[graph as usize].views = Some(vec![view("w", (0, 64), 64)]);
            }
        }
        rank.launch(first, 0);
        rank.host(0, &[]);
        rank.launch(second, 1);
        vec![rank]
    };
    clean(program(A, true, true));
    clean(program((16, 32), true, false)); // captured for no plan
    for needless in [program((16, 32), true, true), program((32, 48), true, true), program(A, false, true)] {
        let text = one(needless, "needless_wait");
        assert!(text.contains("`second`") && text.contains("first"), "{text}");
    }
    let report = verdict(program((16, 32), true, true));
    assert!(matches!(&report.violations[0].reason, Reason::NeedlessWait { node: 0, rank: 0, .. }));
}

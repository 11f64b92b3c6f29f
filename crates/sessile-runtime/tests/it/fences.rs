//! Fences: each one orders what shares bytes, none holds back anything else, and leaving one out shows.

use std::collections::BTreeSet;

use sessile_hal::{Device, Graph, NodeKind};
use sessile_host::{Mode, Order};
use sessile_plan::{Fence, PlanOptions, StepCut, Strategy};
use sessile_runtime::check::{Hazard, Reason, check};
use sessile_runtime::log::{LogGraph, LogNode, RankLog, Work};

use crate::support::program::{Ended, Grad, Module, Program, Rig, Run, name, run};
use crate::support::{ADVERSARIES, all_well, job_log, threads};

/// Four runners with one slow reduce-scatter each, launched from the last to the first.
fn four(spin: u64) -> Program {
    let module = |at| Module {
        grads: vec![Grad { spin, ..Grad::reduce_scatter(64, at) }],
        carries: false,
        completes: true,
    };
    Program { ranks: 2, modules: (0..4).map(module).collect(), launches: vec![3, 2, 1, 0], accumulators: 4 }
}

fn two_generations() -> PlanOptions {
    PlanOptions { strategy: Strategy::Generations(2), depth: 2, ..PlanOptions::default() }
}

fn replayed(options: PlanOptions) -> Run {
    Run::Replayed(options, Vec::new())
}

fn steps(program: &Program, count: usize) -> Vec<Vec<usize>> {
    vec![program.launches.clone(); count]
}

fn bits(ended: &[Ended]) -> Vec<&Vec<Vec<u32>>> {
    ended.iter().map(|rank| &rank.bits).collect()
}

fn report(ended: &[Ended]) -> sessile_runtime::check::Report {
    check(&job_log(ended.iter().map(|rank| rank.log.clone()).collect()))
}

fn graph(log: &RankLog, module: usize) -> &LogGraph {
    log.graphs.iter().find(|graph| graph.runner == name(module)).expect("the log names every graph")
}

fn at(graph: &LogGraph, found: impl Fn(&LogNode) -> bool) -> Vec<usize> {
    graph.nodes.iter().enumerate().filter(|(_, node)| found(node)).map(|(at, _)| at).collect()
}

fn events(graph: &LogGraph, waits: bool) -> BTreeSet<u32> {
    let event = |node: &LogNode| match node.work {
        Work::Wait(event) if waits => Some(event),
        Work::Record(event) if !waits => Some(event),
        _ => None,
    };
    graph.nodes.iter().filter_map(event).collect()
}

/// When a labelled operation of a module ran in its `launch`-th launch: begin and end.
fn ran(rank: &Ended, module: usize, label: &str, launch: usize) -> (u64, u64) {
    let graph_at = rank.log.graphs.iter().position(|graph| graph.runner == name(module)).expect("named");
    let node = at(&rank.log.graphs[graph_at], |node| node.label == label)[0] as u32;
    let ticket = rank
        .log
        .entries
        .iter()
        .filter_map(|entry| match entry {
            sessile_runtime::log::Entry::Launch { ticket, graph, .. } if *graph as usize == graph_at => {
                Some(*ticket)
            }
            _ => None,
        })
        .nth(launch)
        .expect("launched as often");
    let span =
        rank.spans.iter().find(|span| span.ticket.0 == ticket && span.node == Some(node)).expect("it ran");
    (span.begin, span.end)
}

#[test]
fn a_runner_waits_for_the_one_whose_bytes_it_takes_and_for_no_other() {
    let program = four(0);
    let ended =
        run(&program, Mode::Threads { workers: 2 }, &replayed(two_generations()), &steps(&program, 2));
    assert_eq!(report(&ended).violations, []);
    for rank in &ended {
        let waits = |module| events(graph(&rank.log, module), true);
        let records = |module| events(graph(&rank.log, module), false);
        // Generations by launch: m3 0, m2 1, m1 0, m0 1. Completion events are recorded and waited for by no graph.
        assert!(waits(3).is_empty() && waits(2).is_empty(), "nobody used these bytes before in a step");
        assert!(!waits(1).is_empty() && waits(1).is_subset(&records(3)), "m1 waits for m3 alone");
        assert!(!waits(0).is_empty() && waits(0).is_subset(&records(2)), "m0 waits for m2 alone");
    }
}

#[test]
fn on_worker_threads_the_next_runner_starts_during_a_slow_reduce_scatter_and_the_one_after_waits() {
    let program = four(15_000);
    let rounds = 3;
    let how = replayed(two_generations());
    let ended = run(&program, Mode::Threads { workers: 4 }, &how, &steps(&program, rounds));
    assert_eq!(report(&ended).violations, []);
    let mut overlapped = 0;
    for rank in &ended {
        for launch in 0..rounds {
            let reduce = |module| ran(rank, module, "reduce_scatter", launch);
            let write = |module: usize| ran(rank, module, &format!("m{module}g0 write"), launch);
            for (first, second) in [(3, 1), (2, 0)] {
                assert!(write(second).0 >= reduce(first).1, "m{second} wrote while m{first} was being read");
            }
            for (first, second) in [(3, 2), (2, 1), (1, 0)] {
                overlapped += usize::from(write(second).0 < reduce(first).1);
            }
        }
    }
    assert!(overlapped > 0, "no runner ever started during another's reduce-scatter");
}

#[test]
fn at_depth_one_no_operations_of_two_runners_run_at_once() {
    let program = four(1_000);
    let options = PlanOptions { depth: 1, ..PlanOptions::default() };
    let ended = run(&program, Mode::Threads { workers: 4 }, &replayed(options), &steps(&program, 3));
    let log = job_log(ended.iter().map(|rank| rank.log.clone()).collect());
    let spans: Vec<_> = ended.iter().map(|rank| &rank.spans[..]).collect();
    let overlap = sessile_runtime::check::overlap(&log, &spans);
    assert_eq!(overlap.cross_runner_pairs, 0);
    assert_eq!(check(&log).violations, []);
}

/// Runs `program` without one fence: what the checker says, and whether the numbers are wrong under an order.
fn without(program: &Program, options: &PlanOptions, fence: Fence, count: usize) -> Vec<(Order, bool)> {
    let right = run(program, Mode::Threads { workers: 2 }, &Run::Eager, &steps(program, count));
    let how = Run::Replayed(options.clone(), vec![fence]);
    ADVERSARIES
        .into_iter()
        .map(|order| {
            let ended = run(program, Mode::Scheduled { seed: 7, order }, &how, &steps(program, count));
            let report = report(&ended);
            let races: Vec<_> = report
                .violations
                .iter()
                .filter_map(|violation| match &violation.reason {
                    Reason::Unordered { first, second, start, end, .. } => Some((first, second, start, end)),
                    _ => None,
                })
                .collect();
            assert!(!races.is_empty(), "nobody noticed that {fence:?} is missing");
            for (first, second, start, end) in races {
                assert_ne!(first.runner, second.runner, "a fence orders different runners");
                assert!(first.runner.is_some() && second.runner.is_some() && start < end, "{report}");
            }
            (order, bits(&ended) != bits(&right))
        })
        .collect()
}

#[test]
fn leaving_out_any_fence_is_reported_and_gives_a_wrong_value_under_an_adversary() {
    for (options, cut_steps) in [
        (two_generations(), 2),
        (PlanOptions::default(), 2),
        (PlanOptions { step_cut: StepCut::Wrap, ..PlanOptions::default() }, 3),
    ] {
        let program = four(0);
        let how = replayed(options.clone());
        let fences = run(&program, Mode::Threads { workers: 2 }, &how, &steps(&program, 1))[0].fences();
        assert!(!fences.is_empty());
        for fence in fences {
            let seen = without(&program, &options, fence, cut_steps);
            assert!(seen.iter().any(|(_, wrong)| *wrong), "{fence:?} is missed by no number: {seen:?}");
        }
    }
}

/// What each fence of the four runners keeps apart, and which adversary shows it.
#[test]
fn early_writers_find_reused_inputs_and_outputs_that_nothing_fences() {
    let program = four(0);
    let how = replayed(two_generations());
    let fences = run(&program, Mode::Threads { workers: 2 }, &how, &steps(&program, 1))[0].fences();
    let mut table = Vec::new();
    for fence in fences {
        let mode = Mode::Scheduled { seed: 7, order: Order::WritersEarly };
        let how = Run::Replayed(two_generations(), vec![fence]);
        let races: BTreeSet<String> = report(&run(&program, mode, &how, &steps(&program, 2)))
            .violations
            .iter()
            .filter_map(|violation| match &violation.reason {
                Reason::Unordered { hazard, first, second, .. } => {
                    let runner = |operation: &sessile_runtime::check::Operation| {
                        format!("{}/{}", operation.runner.clone().unwrap_or_default(), operation.label)
                    };
                    Some(format!("{}: {} and {}", hazard.name(), runner(first), runner(second)))
                }
                _ => None,
            })
            .collect();
        let wrong: Vec<Order> = without(&program, &two_generations(), fence, 2)
            .into_iter()
            .filter(|seen| seen.1)
            .map(|seen| seen.0)
            .collect();
        let races: Vec<String> = races.into_iter().collect();
        table.push(format!(
            "{} > {} | {} | wrong under {wrong:?}",
            fence.release.0,
            fence.acquire.0,
            races.join(", ")
        ));
    }
    insta::assert_snapshot!(table.join("\n"), @r"
    0 > 4 | write after read: m3/reduce_scatter and m1/m1g0 write | wrong under [WritersEarly, ReadersEarly]
    1 > 5 | write after read: m3/m3g0 add and m1/reduce_scatter | wrong under [WritersEarly, ReadersEarly]
    2 > 6 | write after read: m2/reduce_scatter and m0/m0g0 write | wrong under [WritersEarly, ReadersEarly]
    3 > 7 | write after read: m2/m2g0 add and m0/reduce_scatter | wrong under [WritersEarly]
    ");
}

#[test]
fn a_writer_that_does_not_wait_for_the_reader_before_it_is_caught_by_early_writers() {
    let program = four(0);
    let how = replayed(two_generations());
    let fences = run(&program, Mode::Threads { workers: 2 }, &how, &steps(&program, 1))[0].fences();
    // Request 0 is the input of the first launch: its bytes go to the input of the third.
    let fence =
        fences.into_iter().find(|fence| fence.release.0 == 0).expect("the third launch waits for the first");
    let how = Run::Replayed(two_generations(), vec![fence]);
    let mode = Mode::Scheduled { seed: 1, order: Order::WritersEarly };
    let report = report(&run(&program, mode, &how, &steps(&program, 2)));
    let found = report.violations.iter().any(|violation| match &violation.reason {
        Reason::Unordered { hazard: Hazard::WriteAfterRead, first, second, .. } => {
            first.label == "reduce_scatter"
                && first.runner.as_deref() == Some("m3")
                && second.label == "m1g0 write"
                && second.runner.as_deref() == Some("m1")
        }
        _ => false,
    });
    assert!(found, "{report}");
    let wrong: Vec<Order> = without(&program, &two_generations(), fence, 2)
        .into_iter()
        .filter(|seen| seen.1)
        .map(|seen| seen.0)
        .collect();
    assert!(wrong.contains(&Order::WritersEarly), "{wrong:?}");
}

#[test]
fn additions_into_one_accumulator_keep_the_eager_order_and_need_their_fence() {
    let module = |_| Module { grads: vec![Grad::reduce_scatter(64, 0)], carries: false, completes: true };
    let program =
        Program { ranks: 2, modules: (0..3).map(module).collect(), launches: vec![0, 1, 2], accumulators: 1 };
    // Every request has its own bytes: all that is shared is the accumulator.
    let options = PlanOptions { strategy: Strategy::PerRequest, ..PlanOptions::default() };
    let right = run(&program, Mode::Threads { workers: 2 }, &Run::Eager, &steps(&program, 2));
    let mut fences = Vec::new();
    for order in ADVERSARIES {
        let mode = Mode::Scheduled { seed: 3, order };
        let ended = run(&program, mode, &replayed(options.clone()), &steps(&program, 2));
        assert_eq!(report(&ended).violations, []);
        assert_eq!(bits(&ended), bits(&right));
        fences = ended[0].fences();
    }
    assert_eq!(fences.len(), 2);
    for fence in fences {
        let seen = without(&program, &options, fence, 2);
        assert!(seen.iter().any(|(_, wrong)| *wrong), "{fence:?}: {seen:?}");
    }
}

#[test]
fn a_fenced_request_has_one_record_node_on_the_reduce_scatter_branch_after_its_reader() {
    let program = four(0);
    let ended =
        run(&program, Mode::Threads { workers: 2 }, &replayed(two_generations()), &steps(&program, 1));
    for rank in &ended {
        let waited: BTreeSet<u32> =
            (0..4).flat_map(|module| events(graph(&rank.log, module), true)).collect();
        assert!(!waited.is_empty());
        for event in waited {
            let recorders: Vec<_> = (0..4)
                .map(|module| graph(&rank.log, module))
                .flat_map(|graph| {
                    at(graph, |node| node.work == Work::Record(event)).into_iter().map(move |at| (graph, at))
                })
                .collect();
            assert_eq!(recorders.len(), 1, "event {event}");
            let (graph, record) = recorders[0];
            let reduce = at(graph, |node| matches!(node.work, Work::Collective { .. }))[0];
            let add = at(graph, |node| node.label.ends_with("add"))[0];
            // Inputs: right behind the collective on its branch. Outputs: right behind their addition.
            let behind = &graph.nodes[record].dependencies;
            assert!(behind == &[reduce as u32] || behind == &[add as u32], "{graph:?}");
            assert!(record > reduce);
        }
    }
}

#[test]
fn a_graph_that_waits_may_be_launched_before_the_one_that_records() {
    let program = four(0);
    for steps in [vec![vec![1, 3, 1, 3], vec![3, 1, 3, 1]], vec![vec![1], vec![0], vec![3, 1]]] {
        let right = run(&program, Mode::Threads { workers: 2 }, &Run::Eager, &steps);
        for mode in [
            Mode::Threads { workers: 2 },
            Mode::Scheduled { seed: 5, order: Order::WritersEarly },
            Mode::Scheduled { seed: 5, order: Order::ReadersEarly },
        ] {
            let ended = run(&program, mode, &replayed(two_generations()), &steps);
            assert_eq!(report(&ended).violations, []);
            assert_eq!(bits(&ended), bits(&right), "{mode:?}");
        }
    }
}

#[test]
fn graphs_that_share_a_fence_run_in_any_order_after_the_runtime_is_gone() {
    let program = four(0);
    let world = threads(2);
    let nodes = all_well(world.run(|device| {
        let mut rig = Rig::new(device, &program)?;
        rig.prepare(&two_generations(), &[])?;
        let device = rig.runtime.device().clone();
        let graph = |module| rig.runtime.graph(&name(module)).expect("captured").clone();
        let (records, waits) = (graph(3), graph(1));
        drop(rig);
        let streams = [device.stream("one")?, device.stream("two")?];
        // Never recorded: the wait passes. Then both ways round, then each alone after the other is dropped.
        for _ in 0..3 {
            device.launch(&waits, &streams[1])?;
            device.launch(&records, &streams[0])?;
        }
        device.wait_stream(&streams[0])?;
        device.wait_stream(&streams[1])?;
        let kinds: Vec<NodeKind> = waits.nodes().into_iter().map(|node| node.kind).collect();
        drop(records);
        device.launch(&waits, &streams[0])?;
        device.wait_stream(&streams[0])?;
        Ok::<_, sessile_runtime::RuntimeError>(kinds)
    }));
    assert!(nodes.iter().all(|kinds| kinds.contains(&NodeKind::Wait)));
    assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
}

//! A log of the size of a real run.

use sessile_runtime::check::check;
use sessile_runtime::log::{Log, Work};

use crate::build::{Rank, codes, job, kernel, node, read, update, write};

/// Four ranks, `runners` graphs each, replayed `steps` times: every runner has a GEMM, a reduce-scatter and an
/// accumulation; runner r reuses the bytes of runner r-2, behind a fence. Without `fence`, that one is left out.
fn run(runners: u32, steps: usize, without: Option<u32>) -> Log {
    let ranks = (0..4).map(|at| {
        let mut rank = Rank::new(at, 4);
        rank.log.comms[0].ranks = vec![0, 1, 2, 3];
        let graphs: Vec<u32> = (0..runners)
            .map(|runner| {
                let slot = u64::from(runner % 2) * 16;
                let bytes = (slot, slot + 16);
                let grad = (u64::from(runner % 16), u64::from(runner % 16) + 1);
                let mut nodes = Vec::new();
                let fenced = runner >= 2 && without != Some(runner);
                if fenced {
                    nodes.push(node(Work::Wait(runner - 2), "", &[], &[]));
                }
                let first: &[u32] = if fenced { &[0] } else { &[] };
                let n = u32::from(fenced);
                nodes.extend([
                    kernel("dgrad", &[read((at, 3), (0, 16))], first),
                    kernel("wgrad", &[write((at, 0), bytes)], &[n]),
                    node(
                        Work::Collective { comm: 0, kind: "reduce_scatter".into() },
                        "reduce",
                        &[read((at, 0), bytes), write((at, 1), bytes)],
                        &[n + 1],
                    ),
                    kernel("next dgrad", &[read((at, 3), (8, 16))], &[n + 1]),
                    kernel("accumulate", &[read((at, 1), bytes), update((at, 2), grad)], &[n + 2]),
                    node(Work::Record(runner), "", &[], &[n + 4]),
                ]);
                rank.graph(&format!("runner{runner}"), nodes)
            })
            .collect();
        for _ in 0..steps {
            for &graph in &graphs {
                rank.launch(graph, graph % 4);
            }
            for stream in 0..4 {
                rank.host(stream, &[]);
            }
            rank.exchange();
        }
        rank
    });
    job(ranks.collect())
}

#[test]
fn a_hundred_thousand_operations_are_clean() {
    let report = check(&run(32, 116, None));
    assert!(report.is_clean(), "{report}");
    assert!(report.operations > 100_000, "{report}");
}

#[test]
fn the_one_missing_fence_among_them_is_found_on_every_rank() {
    let report = check(&run(32, 116, Some(17)));
    let reduce = report.violations.iter().filter(|violation| {
        let text = violation.to_string();
        text.contains("runner15") && text.contains("runner17") && violation.count == 116
    });
    assert!(reduce.count() >= 4, "{report}");
    assert!(codes(&report).iter().all(|code| *code == "unordered"), "{report}");
}

/// `cargo test --release -p sessile-runtime --test check -- --ignored --nocapture throughput`
#[test]
#[ignore = "measures; prints to stderr"]
#[expect(clippy::print_stderr, reason = "it is what the test is for")]
fn throughput() {
    let log = run(32, 580, None);
    let begin = std::time::Instant::now();
    let report = check(&log);
    let seconds = begin.elapsed().as_secs_f64();
    let rate = report.operations as f64 / seconds;
    eprintln!("{} operations, {} chains: {seconds:.2} s, {rate:.0}/s", report.operations, report.chains);
    assert!(report.is_clean());
}

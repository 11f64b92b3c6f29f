//! Fences, sealed orders, and joins that nobody needs.

use sessile_hal::{Collective, Device, Graph, Kernel};
use sessile_plan::{PlanOptions, Role};
use sessile_runtime::check::overlap;
use sessile_runtime::log::Log;
use sessile_runtime::{capture, discover};

use super::lab::{
    GROUP, Lab, Memory, Outcome, buffer, finding, judge, readers_early, report, spec, threads, well,
    writers_early,
};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "input-reused-while-read",
        behaviour: "bytes are written again only after their last reader, by a fence inside the graphs",
        without: || reused(false),
        with: || reused(true),
    },
    Exhibit {
        id: "missing-fence-unnoticed",
        behaviour: "a missing fence is reported, also by a run whose numbers are right",
        without: numbers_alone,
        with: checker_sees_it,
    },
    Exhibit {
        id: "another-launch-order",
        behaviour: "fences hold for the sealed order; a launch out of it joins all streams first",
        without: || reversed(false),
        with: || reversed(true),
    },
    Exhibit {
        id: "joins-of-unused-streams",
        behaviour: "a runner waits for what it shares bytes with and for nothing else, so that runners overlap",
        without: || overlapping(1),
        with: || overlapping(2),
    },
    Exhibit {
        id: "accumulation-order",
        behaviour: "additions into one gradient come in the order of eager execution",
        without: || added(false),
        with: || added(true),
    },
];

/// Runners whose reduce-scatters run on beside the compute stream, and whose gradient buffers share bytes at depth 2.
const RUNNERS: [&str; 4] = ["d", "c", "b", "a"];

fn module(lab: &mut Lab, sums: &[sessile_hal::View<Memory>], at: usize) -> Outcome<()> {
    let (compute, side, n) = (lab.runtime.compute().clone(), lab.side.clone(), 16 * lab.ranks());
    let input = lab.runtime.request(&compute, spec(RUNNERS[at], Role::WgradInput, n))?;
    lab.fill(input.view(), 1.0 + at as f32)?;
    lab.edge(&compute, &side)?;
    lab.runtime.complete()?;
    let output = lab.runtime.request(&side, spec(RUNNERS[at], Role::RsOutput, 16))?;
    lab.enqueue(&side, Kernel::Spin { micros: 2_000 }, vec![])?;
    lab.runtime.collective(&side, GROUP, Collective::ReduceScatter, input.view(), output.view())?;
    lab.runtime.release(&side, input)?;
    lab.enqueue(&side, Kernel::Add, vec![output.view().clone(), sums[at].clone()])?;
    lab.runtime.release(&side, output)?;
    lab.edge(&side, &compute)
}

/// Discovered, sealed at `depth` and captured; without fences if `fenced` is false.
fn sealed(lab: &mut Lab, depth: u32, fenced: bool) -> Outcome<Vec<sessile_hal::View<Memory>>> {
    let sums = RUNNERS.iter().map(|_| buffer(&lab.device, 16, 0.0)).collect::<Outcome<Vec<_>>>()?;
    for (at, runner) in RUNNERS.iter().enumerate() {
        discover(lab, runner, |lab| module(lab, &sums, at))?;
    }
    let fences = lab.runtime.seal("museum", &PlanOptions { depth, ..PlanOptions::default() })?.fences.clone();
    if !fenced {
        lab.runtime.omit_fences(fences);
    }
    for (at, runner) in RUNNERS.iter().enumerate() {
        capture(lab, runner, |lab| module(lab, &sums, at))?;
    }
    Ok(sums)
}

/// The first sum that is not what it should be after `replays` steps and the discovery.
fn wrong(lab: &mut Lab, sums: &[sessile_hal::View<Memory>], replays: u32) -> Outcome<(f32, f32)> {
    let mut last = (0.0, 0.0);
    for (at, sum) in sums.iter().enumerate() {
        let expected = (1.0 + at as f32) * 2.0 * (1 + replays) as f32;
        last = (lab.first(sum)?, expected);
        if last.0 != last.1 {
            return Ok(last);
        }
    }
    Ok(last)
}

fn reused(fenced: bool) -> Result<Seen, String> {
    let found = well(writers_early(2), |device| {
        let mut lab = Lab::new(device)?;
        let sums = sealed(&mut lab, 2, fenced)?;
        for runner in RUNNERS {
            lab.runtime.replay(runner)?;
        }
        wrong(&mut lab, &sums, 1)
    })?;
    judge("a sum is", found[0].0, found[0].1)
}

/// On threads, with every launch waited for, the numbers happen to be right.
fn lucky(check: bool) -> Result<Seen, String> {
    let found = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let sums = sealed(&mut lab, 2, false)?;
        // As if the machine were fast enough: the host sleeps, it does not wait.
        for runner in RUNNERS {
            lab.runtime.replay(runner)?;
            std::thread::sleep(std::time::Duration::from_millis(25));
        }
        let sums = wrong(&mut lab, &sums, 1)?;
        Ok((sums, lab.device.take_log()))
    })?;
    let right = found.iter().all(|((sum, expected), _)| sum == expected);
    let report = report(found.into_iter().map(|(_, log)| log).collect());
    match (check, right, finding(&report, "unordered")) {
        (true, _, Some(text)) => Ok(Seen::Right(text)),
        (false, true, Some(_)) => {
            Ok(Seen::Wrong("a run without fences gives the right numbers this time".to_owned()))
        }
        (false, false, _) => Ok(Seen::Wrong("a run without fences gave wrong numbers".to_owned())),
        (_, _, None) => Err("the checker saw nothing".to_owned()),
    }
}

fn numbers_alone() -> Result<Seen, String> {
    lucky(false)
}

fn checker_sees_it() -> Result<Seen, String> {
    lucky(true)
}

/// Replays the step in the reverse order.
fn reversed(through_the_runtime: bool) -> Result<Seen, String> {
    let mut seen = Vec::new();
    for options in [writers_early(2), readers_early(2)] {
        let found = well(options, |device| {
            let mut lab = Lab::new(device)?;
            let sums = sealed(&mut lab, 2, true)?;
            for runner in RUNNERS.iter().rev() {
                if through_the_runtime {
                    lab.runtime.replay(runner)?;
                } else if let Some(graph) = lab.runtime.graph(runner).cloned() {
                    assert!(!graph.nodes().is_empty());
                    let stream = lab.device.stream(runner)?;
                    lab.device.launch(&graph, &stream)?;
                }
            }
            if !through_the_runtime {
                // All launches end before anybody looks.
                let device = lab.device.clone();
                for runner in RUNNERS {
                    if let Some(graph) = lab.runtime.graph(runner).cloned() {
                        let stream = device.stream("after")?;
                        device.launch(&graph, &stream)?;
                        device.wait_stream(&stream)?;
                    }
                }
            }
            let replays = if through_the_runtime { 1 } else { 2 };
            Ok((wrong(&mut lab, &sums, replays)?, lab.device.take_log()))
        })?;
        let (sum, expected) = found[0].0;
        if sum != expected {
            seen.push(format!("a sum is {sum}, not {expected}"));
        }
        let report = report(found.into_iter().map(|(_, log)| log).collect());
        seen.extend(finding(&report, "unordered"));
    }
    match seen.into_iter().next() {
        Some(text) => Ok(Seen::Wrong(text)),
        None => Ok(Seen::Right("the right sums, and nothing unordered".to_owned())),
    }
}

fn overlapping(depth: u32) -> Result<Seen, String> {
    let found = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        sealed(&mut lab, depth, true)?;
        lab.device.take_spans();
        for _ in 0..4 {
            for runner in RUNNERS {
                lab.runtime.replay(runner)?;
            }
        }
        lab.runtime.join()?;
        lab.device.wait_stream(&lab.main)?;
        Ok((lab.device.take_log(), lab.device.take_spans()))
    })?;
    let (logs, spans): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let spans: Vec<&[sessile_hal::Span]> = spans.iter().map(Vec::as_slice).collect();
    match overlap(&Log::from_ranks(logs), &spans).cross_runner_pairs {
        0 => Ok(Seen::Wrong("no two operations of different runners ran at once".to_owned())),
        pairs => Ok(Seen::Right(format!("{pairs} pairs of operations of different runners ran at once"))),
    }
}

/// Two runners add 1e8 and 1 into one gradient that holds -1e8; in the other order the 1 is lost.
fn added(fenced: bool) -> Result<Seen, String> {
    let found = well(writers_early(1), |device| {
        let mut lab = Lab::new(device)?;
        let grad = buffer(&lab.device, 1, -1e8)?;
        lab.device.note(sessile_hal::Note::Accumulator(grad.memory()));
        lab.device.note(sessile_hal::Note::Step("train"));
        let to = grad.clone();
        let body = |value: f32| {
            let to = to.clone();
            move |lab: &mut Lab| {
                let (compute, side) = (lab.runtime.compute().clone(), lab.side.clone());
                let mut request = spec(&format!("{value}"), Role::RsOutput, 1);
                request.accumulates_into = Some("w".to_owned());
                lab.edge(&compute, &side)?;
                lab.runtime.complete()?;
                let output = lab.runtime.request(&side, request)?;
                lab.enqueue(&side, Kernel::Fill { value }, vec![output.view().clone()])?;
                lab.enqueue(&side, Kernel::Add, vec![output.view().clone(), to.clone()])?;
                lab.runtime.release(&side, output)?;
                lab.edge(&side, &compute)
            }
        };
        let (first, second) = (body(1e8), body(1.0));
        discover(&mut lab, "first", &first)?;
        discover(&mut lab, "second", &second)?;
        let fences = lab.runtime.seal("museum", &PlanOptions::default())?.fences.clone();
        if !fenced {
            lab.runtime.omit_fences(fences);
        }
        capture(&mut lab, "first", &first)?;
        capture(&mut lab, "second", &second)?;
        lab.device.write(&lab.main, &grad, &super::lab::bytes(&[-1e8]))?;
        lab.device.note(sessile_hal::Note::Step("train"));
        lab.runtime.replay("first")?;
        lab.runtime.replay("second")?;
        lab.first(&grad)
    })?;
    judge("the gradient is", found[0], 1.0)
}

//! Steps that never run together share storage: their need is the largest.

use sessile_hal::{Collective, Device, View};
use sessile_host::{HostMemory, Mode, Order};
use sessile_plan::{DType, PlanOptions, RequestSpec, Role, StepCut};
use sessile_runtime::check::check;
use sessile_runtime::{RuntimeError, capture, discover};

use crate::support::{
    ADVERSARIES, Lab, Outcome, all_well, bytes_of, fill, floats, job_log, persistent, spec, world,
};

/// Two alternatives with runners of their own, of other sizes, and one runner that both have.
const STEPS: [&[(&str, u64)]; 2] =
    [&[("short.b", 64), ("tail", 16), ("short.a", 64)], &[("long.b", 128), ("tail", 16), ("long.a", 128)]];

fn module(lab: &mut Lab, (name, n): (&str, u64), sum: &View<HostMemory>) -> Outcome<()> {
    let (compute, side) = (lab.runtime.compute().clone(), lab.side.clone());
    let ranks = u64::from(lab.runtime.device().world_size());
    let input = lab.runtime.request(&compute, spec(name, DType::F32, n * ranks))?;
    lab.runtime.enqueue(&compute, fill(input.view(), 1.0)?)?;
    let written = lab.runtime.mark(&compute)?;
    lab.runtime.wait(&side, &written)?;
    lab.runtime.complete()?;
    let accumulates_into = Some("sum".to_owned());
    let output = RequestSpec { role: Role::RsOutput, accumulates_into, ..spec(name, DType::F32, n) };
    let output = lab.runtime.request(&side, output)?;
    lab.runtime.collective(&side, "gtp", Collective::ReduceScatter, input.view(), output.view())?;
    lab.runtime.release(&side, input)?;
    let add =
        sessile_hal::Op::new(sessile_hal::Kernel::Add, "add", vec![output.view().clone(), sum.slice(0, n)?])?;
    lab.runtime.enqueue(&side, add)?;
    lab.runtime.release(&side, output)?;
    let done = lab.runtime.mark(&side)?;
    lab.runtime.wait(&compute, &done)
}

struct Ended {
    bytes: u64,
    alone: [u64; 2],
    deviations: u64,
    sum: Vec<f32>,
    log: sessile_runtime::log::RankLog,
}

/// Discovers both alternatives, and replays them as `order` says.
fn run(device: sessile_host::HostDevice, options: &PlanOptions, order: &[usize]) -> Outcome<Ended> {
    let mut lab = Lab::logged(device)?;
    let sum = persistent(lab.runtime.device(), "sum", 128)?;
    lab.runtime.device().write(lab.runtime.main(), &sum, &bytes_of(&[0.0; 128]))?;
    let mut alone = [0; 2];
    for (at, step) in STEPS.iter().enumerate() {
        for module_of in *step {
            discover(&mut lab, module_of.0, |lab| module(lab, *module_of, &sum))?;
        }
        alone[at] = lab.runtime.seal("alone", options)?.bytes();
        lab.runtime.release_plan()?;
    }
    for step in STEPS {
        lab.runtime.next_alternative()?;
        for module_of in step {
            discover(&mut lab, module_of.0, |lab| module(lab, *module_of, &sum))?;
        }
    }
    let bytes = lab.runtime.seal("both", options)?.bytes();
    let refused = lab.runtime.next_alternative();
    assert!(matches!(refused, Err(RuntimeError::WrongPhase { .. })), "{refused:?}");
    let runners: std::collections::BTreeSet<(&str, u64)> = STEPS.concat().into_iter().collect();
    for module_of in runners {
        capture(&mut lab, module_of.0, |lab| module(lab, module_of, &sum))?;
    }
    for &step in order {
        for (name, _) in STEPS[step] {
            lab.runtime.replay(name)?;
        }
    }
    lab.runtime.join()?;
    let sum = floats(&lab.runtime.device().read(lab.runtime.main(), &sum)?);
    let deviations = lab.runtime.counters().order_deviations;
    Ok(Ended { bytes, alone, deviations, sum, log: lab.runtime.device().take_log() })
}

const ORDER: [usize; 7] = [0, 1, 1, 0, 0, 1, 0];

#[test]
fn alternatives_share_storage_and_replay_in_any_order_without_a_race() {
    let modes = [
        Mode::Threads { workers: 4 },
        Mode::Scheduled { seed: 5, order: Order::Random },
        Mode::Scheduled { seed: 5, order: ADVERSARIES[0] },
        Mode::Scheduled { seed: 5, order: ADVERSARIES[1] },
    ];
    for depth in 1..=3 {
        for step_cut in [StepCut::Barrier, StepCut::Wrap] {
            for mode in modes {
                let options = PlanOptions { depth, step_cut, ..PlanOptions::default() };
                let ended = all_well(world(2, mode).run(|device| run(device, &options, &ORDER)));
                let mut logs = Vec::new();
                for Ended { bytes, alone, deviations, sum, log } in ended {
                    if step_cut == StepCut::Barrier {
                        assert_eq!(
                            bytes,
                            alone[0].max(alone[1]),
                            "depth {depth}: the need of the larger one"
                        );
                        assert_eq!(deviations, 0);
                    } else {
                        assert!(bytes < alone[0] + alone[1], "depth {depth}, wrapped: less than both");
                        assert_eq!(deviations, 4, "a switch is a deviation");
                    }
                    // Discovered twice each, alone and together; then four short and three long steps. Every step has a
                    // tail, and two modules of its length.
                    let at = |short: f32, long: f32, tail: f32| 2.0 * (2.0 * short + 2.0 * long + tail);
                    assert_eq!(sum[0], at(6.0, 5.0, 11.0));
                    assert_eq!(sum[16], at(6.0, 5.0, 0.0));
                    assert_eq!(sum[64], at(0.0, 5.0, 0.0));
                    logs.push(log);
                }
                let report = check(&job_log(logs));
                assert!(report.is_clean(), "depth {depth}, {step_cut:?}, {mode:?}: {report}");
            }
        }
    }
}

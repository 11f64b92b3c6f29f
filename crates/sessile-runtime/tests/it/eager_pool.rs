//! Work outside captures: recycled buffers wait for their last use, and nothing of a capture gets among them.

use sessile_hal::{Collective, Device, Kernel, Memory, Op};
use sessile_host::{HostDevice, Mode, Order};
use sessile_plan::{DType, PlanOptions, RequestSpec};
use sessile_runtime::check::check;
use sessile_runtime::{RuntimeError, Slot, capture, discover};

use crate::support::{
    ADVERSARIES, Dev, Lab, Outcome, all_well, bytes_of, fill, floats, job_log, persistent, spec, threads,
    world,
};

/// One buffer after another, each reduced on the side stream while the next is filled.
fn pipeline(lab: &mut Lab, sum: &sessile_hal::View<sessile_host::HostMemory>, steps: u32) -> Outcome<()> {
    let (main, side) = (lab.runtime.main().clone(), lab.side.clone());
    for step in 0..steps {
        let input = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
        lab.runtime.enqueue(&main, fill(input.view(), 1.0 + step as f32)?)?;
        let written = lab.runtime.mark(&main)?;
        lab.runtime.wait(&side, &written)?;
        let output = lab.runtime.request(&side, spec("o", DType::F32, 64))?;
        lab.runtime.collective(&side, "gtp", Collective::AllReduce, input.view(), output.view())?;
        lab.runtime.release(&side, input)?;
        let add = Op::new(Kernel::Add, "add", vec![output.view().clone(), sum.clone()])?;
        lab.runtime.enqueue(&side, add)?;
        lab.runtime.release(&side, output)?;
    }
    Ok(())
}

fn summed(device: HostDevice, rounds: u32) -> Outcome<(Vec<f32>, Vec<u64>, sessile_runtime::log::RankLog)> {
    let mut lab = Lab::logged(device)?;
    let device = lab.runtime.device().clone();
    let sum = persistent(&device, "sum", 64)?;
    device.write(lab.runtime.main(), &sum, &bytes_of(&[0.0; 64]))?;
    let mut bytes = Vec::new();
    for _ in 0..rounds {
        pipeline(&mut lab, &sum, 5)?;
        bytes.push(lab.runtime.eager_bytes());
    }
    let values = floats(&device.read(&lab.side.clone(), &sum)?);
    Ok((values, bytes, device.take_log()))
}

#[test]
fn a_recycled_buffer_waits_for_its_last_use() {
    let modes = [
        Mode::Threads { workers: 3 },
        Mode::Scheduled { seed: 2, order: Order::Random },
        Mode::Scheduled { seed: 2, order: ADVERSARIES[0] },
        Mode::Scheduled { seed: 2, order: ADVERSARIES[1] },
    ];
    for mode in modes {
        let world = world(2, mode);
        let ended = all_well(world.run(|device| summed(device, 4)));
        let mut logs = Vec::new();
        for (values, bytes, log) in ended {
            // Two ranks, four rounds of 1 + 2 + 3 + 4 + 5.
            assert!(values.iter().all(|&value| value == 120.0), "{mode:?}: {values:?}");
            assert!(bytes.windows(2).all(|pair| pair[0] == pair[1]), "{mode:?}: the pool grows: {bytes:?}");
            logs.push(log);
        }
        let report = check(&job_log(logs));
        assert!(report.is_clean() && report.operations > 0, "{mode:?}: {report}");
        assert_eq!([world.live_bytes(0), world.live_bytes(1)], [0, 0]);
    }
}

#[test]
fn bytes_stay_flat_over_many_steps() {
    let world = threads(2);
    let ended = all_well(world.run(|device| summed(device, 60)));
    for (_, bytes, _) in ended {
        assert_eq!(bytes.first(), bytes.last());
    }
}

#[test]
fn buffers_of_another_size_or_domain_are_not_mixed_up() {
    let world = threads(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let main = lab.runtime.main().clone();
        let small = spec("a", DType::F32, 64);
        let others = [
            spec("b", DType::F32, 65),
            RequestSpec { domain: sessile_plan::Domain::Symmetric("gtp".into()), ..small.clone() },
        ];
        let slot = lab.runtime.request(&main, small.clone())?;
        let first = slot.view().address();
        lab.runtime.release(&main, slot)?;
        for other in others {
            let slot = lab.runtime.request(&main, other.clone())?;
            assert_ne!(slot.view().address(), first, "{other}");
            assert_eq!(slot.view().memory().domain(), &other.domain);
            lab.runtime.release(&main, slot)?;
        }
        // The same size in another dtype is the same buffer.
        let slot = lab.runtime.request(&main, spec("c", DType::Bf16, 128))?;
        assert_eq!(slot.view().address(), first);
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn nothing_requested_in_a_capture_enters_the_pool() {
    let world = threads(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        let body = |lab: &mut Lab| lab.touch(&spec("w", DType::F32, 64), 3.0);
        discover(&mut lab, "layer", body)?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let eager = lab.runtime.eager_bytes();
        capture(&mut lab, "layer", body)?;
        let arenas: Vec<_> = lab.runtime.arenas().iter().map(Memory::id).collect();
        let main = lab.runtime.main().clone();
        let mut slots = Vec::new();
        for _ in 0..8 {
            let slot = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
            assert!(!arenas.contains(&slot.view().memory().id()), "a planned view came out of the pool");
            slots.push(slot);
        }
        // One buffer was there from the discovery; the others are new.
        assert_eq!(lab.runtime.eager_bytes(), eager + 7 * 256);
        for slot in slots {
            lab.runtime.release(&main, slot)?;
        }
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn an_eager_buffer_given_back_in_a_capture_stays_with_the_graph_that_uses_it() {
    for mode in [Mode::Threads { workers: 2 }, Mode::Scheduled { seed: 4, order: Order::WritersEarly }] {
        let world = world(1, mode);
        let logs = all_well(world.run(|device| {
            let mut lab = Lab::logged(device)?;
            let main = lab.runtime.main().clone();
            let body = |lab: &mut Lab, foreign: Slot<Dev>| {
                let compute = lab.runtime.compute().clone();
                lab.runtime.enqueue(&compute, fill(foreign.view(), 5.0)?)?;
                lab.runtime.release(&compute, foreign)
            };
            // A producer outside the runner made this one. In the discovery it is given back as any other.
            let foreign = lab.runtime.request(&main, spec("foreign", DType::F32, 64))?;
            let address = foreign.view().address();
            discover(&mut lab, "layer", |lab: &mut Lab| body(lab, foreign))?;
            let foreign = lab.runtime.request(&main, spec("foreign", DType::F32, 64))?;
            assert_eq!(foreign.view().address(), address);
            lab.runtime.seal("test", &PlanOptions::default())?;
            capture(&mut lab, "layer", |lab: &mut Lab| body(lab, foreign))?;
            let device = lab.runtime.device().clone();
            let other = lab.runtime.request(&main, spec("other", DType::F32, 64))?;
            assert_ne!(other.view().address(), address, "the pool gave away what the graph writes");
            lab.runtime.enqueue(&main, fill(other.view(), 7.0)?)?;
            lab.runtime.replay("layer")?;
            lab.runtime.join()?;
            assert!(floats(&device.read(&main, other.view())?).iter().all(|&value| value == 7.0));
            Ok::<_, RuntimeError>(device.take_log())
        }));
        assert!(check(&job_log(logs)).is_clean());
        assert_eq!(world.live_bytes(0), 0);
    }
}

#[test]
fn a_refused_request_of_a_discovery_does_not_lose_a_pooled_buffer() {
    let world = threads(1);
    all_well(world.run(|device| {
        let mut lab = Lab::logged(device)?;
        discover(&mut lab, "layer", |lab: &mut Lab| lab.touch(&spec("w", DType::F32, 64), 1.0))?;
        let bytes = lab.runtime.eager_bytes();
        for _ in 0..5 {
            let again =
                discover(&mut lab, "layer", |lab: &mut Lab| lab.touch(&spec("other", DType::F32, 64), 1.0));
            assert!(matches!(again, Err(RuntimeError::DiscoveryDiffers { index: 0, .. })), "{again:?}");
            assert_eq!(lab.runtime.eager_bytes(), bytes);
        }
        lab.touch(&spec("w", DType::F32, 64), 1.0)?;
        assert_eq!(lab.runtime.eager_bytes(), bytes, "the buffer of the discovery is still there");
        Ok::<_, RuntimeError>(())
    }));
}

#[test]
fn a_slot_dropped_without_release_goes_back_behind_all_work_on_it() {
    for order in ADVERSARIES {
        let world = world(1, Mode::Scheduled { seed: 3, order });
        all_well(world.run(|device| {
            let mut lab = Lab::logged(device)?;
            let (main, side) = (lab.runtime.main().clone(), lab.side.clone());
            let sum = persistent(lab.runtime.device(), "sum", 64)?;
            lab.runtime.device().write(&main, &sum, &bytes_of(&[0.0; 64]))?;
            let dropped_unused = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
            drop(dropped_unused);
            for _ in 0..4 {
                let slot = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
                lab.runtime.enqueue(&main, fill(slot.view(), 1.0)?)?;
                let written = lab.runtime.mark(&main)?;
                lab.runtime.wait(&side, &written)?;
                let add = Op::new(Kernel::Add, "add", vec![slot.view().clone(), sum.clone()])?;
                lab.runtime.enqueue(&side, add)?;
                drop(slot); // the reader on the side stream still runs
            }
            assert_eq!(lab.runtime.eager_bytes(), 256, "one buffer serves all");
            let values = floats(&lab.runtime.device().read(&side, &sum)?);
            assert!(values.iter().all(|&x| x == 4.0), "{order:?}: {values:?}");
            let report = check(&job_log(vec![lab.runtime.device().take_log()]));
            assert!(report.is_clean(), "{report}");
            Ok::<_, RuntimeError>(())
        }));
    }
}

#[test]
fn a_slot_dropped_in_a_capture_that_used_it_stays_with_the_graph() {
    all_well(threads(1).run(|device| {
        let mut lab = Lab::logged(device)?;
        let main = lab.runtime.main().clone();
        let mut eager = None;
        let other = persistent(lab.runtime.device(), "other", 64)?;
        discover(&mut lab, "layer", |lab| {
            lab.touch(&spec("p", DType::F32, 8), 1.0)?;
            lab.runtime.enqueue(&main, fill(&other, 7.0)?).map(drop)
        })?;
        lab.runtime.seal("test", &PlanOptions::default())?;
        let outside = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
        let address = outside.view().address();
        eager.replace(outside);
        capture(&mut lab, "layer", |lab| {
            lab.touch(&spec("p", DType::F32, 8), 1.0)?;
            let slot = eager.take().expect("once");
            let compute = lab.runtime.compute().clone();
            lab.runtime.enqueue(&compute, fill(slot.view(), 7.0)?)?;
            drop(slot);
            Ok::<_, RuntimeError>(())
        })?;
        let next = lab.runtime.request(&main, spec("w", DType::F32, 64))?;
        assert_ne!(next.view().address(), address, "the graph writes there at every launch");
        lab.runtime.release(&main, next)
    }));
}

#[test]
fn a_gathered_weight_finds_its_address_again_at_every_step() {
    all_well(threads(1).run(|device| {
        let mut lab = Lab::logged(device)?;
        let main = lab.runtime.main().clone();
        let weight = |name: &str| sessile_plan::RequestSpec {
            role: sessile_plan::Role::GatheredWeight,
            ..spec(name, DType::F32, 64)
        };
        // One is prefetched while another is in use; an evaluation in between runs the other way round.
        let pass = |lab: &mut Lab, names: &[&str]| {
            let mut addresses = std::collections::BTreeMap::new();
            let mut next = None;
            for (at, name) in names.iter().enumerate() {
                let current = match next.take() {
                    Some(slot) => slot,
                    None => lab.runtime.request(&main, weight(name))?,
                };
                if let Some(after) = names.get(at + 1) {
                    next = Some(lab.runtime.request(&main, weight(after))?);
                }
                addresses.insert((*name).to_owned(), current.view().address());
                lab.runtime.release(&main, current)?;
            }
            Ok::<_, RuntimeError>(addresses)
        };
        let first = pass(&mut lab, &["a", "b", "c", "d", "e"])?;
        for _ in 0..5 {
            assert_eq!(pass(&mut lab, &["a", "b", "c", "d", "e"])?, first);
        }
        assert_eq!(lab.runtime.eager_bytes(), 512, "two buffers serve five weights");
        Ok::<_, RuntimeError>(())
    }));
}

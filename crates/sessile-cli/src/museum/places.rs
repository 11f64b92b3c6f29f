//! Registered views lie at the same place on every rank, and all ranks want the same.

use sessile_hal::{Collective, Device, Kernel, View};
use sessile_plan::{DType, PlanOptions, Role};
use sessile_runtime::discover;

use super::lab::{
    GROUP, Lab, ONE_SHOT, all_failed, buffer, everyone, judge, on_ranks, short, spec, symmetric, threads,
    well, window_memory,
};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "eager-history",
        behaviour: "registered views of graphs lie at equal offsets on all ranks, whatever eager work ran before",
        without: carved_from_an_eager_pool,
        with: planned_apart_from_eager_pools,
    },
    Exhibit {
        id: "expert-without-tokens",
        behaviour: "a rank that asks for less than its peers is named on all ranks before anything is allocated",
        without: one_rank_skips_a_reduce,
        with: one_rank_skips_a_request,
    },
    Exhibit {
        id: "different-options",
        behaviour: "ranks that seal with different options are told so, and no layout differs",
        without: each_rank_lays_out_for_itself,
        with: options_are_compared,
    },
    Exhibit {
        id: "silent-downgrade",
        behaviour: "a kind that needs registered memory is an error without it, never another kind",
        without: falls_back_to_the_ring,
        with: is_refused,
    },
];

/// Every rank takes its views from a pool whose next free offset depends on what it did before.
fn carved_from_an_eager_pool() -> Result<Seen, String> {
    let results = on_ranks(threads(2), |device| {
        let comm = everyone(&device, GROUP)?;
        let memory = window_memory(&device, &comm, 4096)?;
        device.register_window(&comm, &memory)?;
        let used = if device.rank() == 0 { 512 } else { 768 }; // other warm-ups
        let input = View::new(&memory, used, 64, DType::F32)?;
        let out = buffer(&device, 32, 0.0)?;
        let stream = device.stream("s")?;
        device.collective(&stream, &comm, ONE_SHOT, &input, &out)?;
        device.wait_stream(&stream)?;
        Ok(())
    });
    // Where nobody compares offsets the peers' bytes at another offset are read, and no error comes.
    all_failed(results).map(|error| Seen::Wrong(short(&error)))
}

fn planned_apart_from_eager_pools() -> Result<Seen, String> {
    let found = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let main = lab.main.clone();
        for _ in 0..=2 * lab.device.rank() {
            let slot = lab.runtime.request(&main, spec("warm-up", Role::RsOutput, 128))?;
            lab.runtime.release(&main, slot)?;
        }
        let sum = buffer(&lab.device, 32, 0.0)?;
        let to = sum.clone();
        lab.capture(move |lab| {
            let compute = lab.runtime.compute().clone();
            let slot = lab.runtime.request(&compute, symmetric("w", 64))?;
            lab.fill(slot.view(), 1.0)?;
            lab.runtime.collective(&compute, GROUP, ONE_SHOT, slot.view(), &to)?;
            lab.runtime.release(&compute, slot)
        })?;
        lab.runtime.replay("layer")?;
        lab.first(&sum)
    })?;
    judge("equal offsets, and the sum of discovery and replay is", found[0], 4.0)
}

fn one_rank_skips_a_reduce() -> Result<Seen, String> {
    let results = on_ranks(threads(2), |device| {
        let comm = everyone(&device, "expert")?;
        let stream = device.stream("s")?;
        let (input, out) = (buffer(&device, 64, 1.0)?, buffer(&device, 32, 0.0)?);
        let tokens = device.rank() == 0;
        if tokens {
            device.collective(&stream, &comm, Collective::ReduceScatter, &input, &out)?;
            device.wait_stream(&stream)?;
        }
        Ok(())
    });
    match results.into_iter().next() {
        Some(Err(error)) => Ok(Seen::Wrong(format!("its peer waits for it: {}", short(&error)))),
        _ => Err("the reduce-scatter ended".to_owned()),
    }
}

fn one_rank_skips_a_request() -> Result<Seen, String> {
    let results = on_ranks(threads(3), |device| {
        let mut lab = Lab::new(device)?;
        let tokens = lab.device.rank() != 1;
        discover(&mut lab, "layer", |lab| {
            for weight in ["dense", "expert"] {
                if weight == "dense" || tokens {
                    let compute = lab.runtime.compute().clone();
                    let slot = lab.runtime.request(&compute, spec(weight, Role::WgradInput, 64))?;
                    lab.fill(slot.view(), 1.0)?;
                    lab.runtime.release(&compute, slot)?;
                }
            }
            Ok::<_, sessile_runtime::RuntimeError>(())
        })?;
        lab.runtime.seal("museum", &PlanOptions::default()).map(drop)
    });
    let error = all_failed(results)?;
    if error.contains("rank 1 differs") { Ok(Seen::Right(short(&error))) } else { Err(error) }
}

fn step(lab: &mut Lab, options: &PlanOptions) -> Result<(), sessile_runtime::RuntimeError> {
    for runner in ["a", "b", "c"] {
        discover(lab, runner, |lab| {
            let compute = lab.runtime.compute().clone();
            let side = lab.side.clone();
            let slot = lab.runtime.request(&compute, symmetric(runner, 64))?;
            lab.fill(slot.view(), 1.0)?;
            lab.edge(&compute, &side)?;
            // The next runner may start while this one's buffer is still read.
            lab.runtime.complete()?;
            lab.enqueue(&side, Kernel::Scale { factor: 1.0 }, vec![slot.view().clone()])?;
            lab.runtime.release(&side, slot)?;
            lab.edge(&side, &compute)
        })?;
    }
    lab.runtime.seal("museum", options).map(drop)
}

/// Plans one trace with the options of each rank, as ranks do that do not compare them.
fn each_rank_lays_out_for_itself() -> Result<Seen, String> {
    let layout = |depth: u32| {
        well(threads(1), |device| {
            let mut lab = Lab::new(device)?;
            step(&mut lab, &PlanOptions { depth, ..PlanOptions::default() })?;
            Ok(lab.runtime.plan().map(|plan| plan.views.iter().map(|view| view.offset).collect::<Vec<_>>()))
        })
    };
    let (one, other) = (layout(1)?, layout(2)?);
    if one == other {
        return Err("the layouts are equal".to_owned());
    }
    Ok(Seen::Wrong(format!("offsets {:?} on one rank, {:?} on the other", one[0], other[0])))
}

fn options_are_compared() -> Result<Seen, String> {
    let results = on_ranks(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let depth = 1 + lab.device.rank();
        step(&mut lab, &PlanOptions { depth, ..PlanOptions::default() })
    });
    all_failed(results).map(|error| Seen::Right(short(&error)))
}

/// bf16: rank 0 holds 256, seven others 1. The exact sum is 263.
fn trap(registered: bool) -> Result<Vec<Result<f32, String>>, String> {
    Ok(on_ranks(threads(8), |device| {
        let comm = everyone(&device, GROUP)?;
        let memory = if registered {
            window_memory(&device, &comm, 16)?
        } else {
            device.alloc(16, &sessile_plan::Domain::Default, "plain")?
        };
        let input = View::whole(&memory, DType::Bf16)?;
        let stream = device.stream("s")?;
        let value: u16 = if device.rank() == 0 { 0x4380 } else { 0x3F80 };
        device.write(
            &stream,
            &input,
            &[value; 8].iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>(),
        )?;
        let grad = buffer(&device, 1, 0.0)?;
        match device.collective(&stream, &comm, ONE_SHOT, &input, &grad) {
            Ok(_) => {}
            Err(error) if registered => return Err(error.into()),
            Err(_) => {
                // What a framework does that falls back: the ring, in bf16, and then an add.
                let out = device.alloc(2, &sessile_plan::Domain::Default, "out")?;
                let out = View::whole(&out, DType::Bf16)?;
                device.collective(&stream, &comm, Collective::ReduceScatter, &input, &out)?;
                let add = sessile_hal::Op::new(Kernel::Add, "add", vec![out, grad.clone()])?;
                device.enqueue(&stream, add)?;
            }
        }
        Ok(super::lab::floats(&device.read(&stream, &grad)?)[0])
    }))
}

fn falls_back_to_the_ring() -> Result<Seen, String> {
    let sums = trap(false)?.into_iter().collect::<Result<Vec<_>, _>>()?;
    judge("no error, and the sum is", sums[7], 263.0)
}

fn is_refused() -> Result<Seen, String> {
    let results = on_ranks(threads(1), |device| {
        let comm = everyone(&device, GROUP)?;
        let stream = device.stream("s")?;
        let (input, grad) = (buffer(&device, 8, 1.0)?, buffer(&device, 8, 0.0)?);
        Ok(device.collective(&stream, &comm, ONE_SHOT, &input, &grad).map(drop)?)
    });
    all_failed(results).map(|error| Seen::Right(format!("refused: {}", short(&error))))
}

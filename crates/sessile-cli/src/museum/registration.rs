//! Registration is collective, ordered, and never inside a capture.

use sessile_hal::{Comm, Device};
use sessile_host::World;
use sessile_plan::{PlanOptions, Role};
use sessile_runtime::{RuntimeError, capture, discover};

use super::lab::{
    GROUP, Lab, ONE_SHOT, Outcome, all_failed, buffer, everyone, on_ranks, short, spec, symmetric, threads,
    well, window_memory,
};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "registration-in-capture",
        behaviour: "what a capture needs is registered before it; a request that was not planned is refused before any \
                    device call, and the capture goes on",
        without: lazy_in_capture,
        with: planned_before_capture,
    },
    Exhibit {
        id: "growth-on-one-rank",
        behaviour: "after the seal no pool of registered memory grows, so no rank waits for a registration that its \
                    peers never make",
        without: one_rank_registers,
        with: one_rank_is_refused,
    },
    Exhibit {
        id: "registration-order",
        behaviour: "groups are registered in one order on all ranks",
        without: crossed_registration,
        with: registration_by_name,
    },
    Exhibit {
        id: "allocation-failure",
        behaviour: "ranks agree that all have allocated before any registers; a failure is the same error on all",
        without: one_rank_falls_back,
        with: all_ranks_fail,
    },
    Exhibit {
        id: "foreign-window",
        behaviour: "a view of one group's window is refused by every other communicator",
        without: twin_takes_any_view,
        with: twin_refuses,
    },
    Exhibit {
        id: "mapped-again",
        behaviour: "a graph does not replay over bytes that were given back and mapped again",
        without: replay_over_fresh_bytes,
        with: stale_graph,
    },
];

fn lazy_in_capture() -> Result<Seen, String> {
    let results = on_ranks(threads(1), |device| {
        let comm = everyone(&device, GROUP)?;
        let stream = device.stream("s")?;
        device.begin_capture(&stream)?;
        let outcome = window_memory(&device, &comm, 64);
        device.abort_capture(&stream);
        Ok(outcome.map(drop)?)
    });
    all_failed(results).map(|error| Seen::Wrong(format!("the capture is lost: {}", short(&error))))
}

fn planned_before_capture() -> Result<Seen, String> {
    let refused = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let ask = |lab: &mut Lab, name: &str| {
            let compute = lab.runtime.compute().clone();
            let slot = lab.runtime.request(&compute, symmetric(name, 64))?;
            lab.fill(slot.view(), 1.0)?;
            lab.runtime.release(&compute, slot)
        };
        discover(&mut lab, "layer", |lab| ask(lab, "w"))?;
        lab.runtime.seal("museum", &PlanOptions::default())?;
        let mut refused = String::new();
        capture(&mut lab, "layer", |lab| {
            ask(lab, "w")?;
            let compute = lab.runtime.compute().clone();
            if let Err(error) = lab.runtime.request(&compute, symmetric("late", 64)) {
                refused = error.to_string();
            }
            Ok::<_, RuntimeError>(())
        })?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        Ok(refused)
    })?;
    match refused.iter().find(|text| text.is_empty()) {
        Some(_) => Ok(Seen::Wrong("the request was served".to_owned())),
        None => Ok(Seen::Right(format!("refused, the capture goes on: {}", short(&refused[0])))),
    }
}

fn one_rank_registers() -> Result<Seen, String> {
    let results = on_ranks(threads(2), |device| {
        let comm = everyone(&device, GROUP)?;
        if device.rank() == 1 {
            let memory = window_memory(&device, &comm, 64)?;
            device.register_window(&comm, &memory)?;
        }
        // Its peer works on with what it has, and never comes.
        std::thread::sleep(2 * super::lab::PATIENCE);
        Ok(())
    });
    match results.into_iter().nth(1) {
        Some(Err(error)) => Ok(Seen::Wrong(format!("it waits until the deadline: {}", short(&error)))),
        _ => Err("the registration ended".to_owned()),
    }
}

fn one_rank_is_refused() -> Result<Seen, String> {
    let refused = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        lab.capture(|lab| {
            let compute = lab.runtime.compute().clone();
            let slot = lab.runtime.request(&compute, symmetric("w", 64))?;
            lab.fill(slot.view(), 1.0)?;
            lab.runtime.release(&compute, slot)
        })?;
        let main = lab.main.clone();
        let late = || lab.runtime.request(&main, symmetric("late", 4096)).map(drop);
        Ok((lab.device.rank() == 1).then(late))
    });
    match &refused?[..] {
        [None, Some(Err(error))] => {
            Ok(Seen::Right(format!("refused at once: {}", short(&error.to_string()))))
        }
        _ => Err("the request was served".to_owned()),
    }
}

fn crossed_registration() -> Result<Seen, String> {
    let results = on_ranks(threads(2), |device| {
        let comms = [everyone(&device, "x")?, everyone(&device, "y")?];
        let order = if device.rank() == 0 { [0, 1] } else { [1, 0] };
        for at in order {
            let memory = window_memory(&device, &comms[at], 64)?;
            device.register_window(&comms[at], &memory)?;
        }
        Ok(())
    });
    all_failed(results).map(|error| Seen::Wrong(format!("the ranks wait for each other: {}", short(&error))))
}

fn registration_by_name() -> Result<Seen, String> {
    well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let all = [0, 1];
        let (x, y) = (lab.device.communicator("x", &all)?, lab.device.communicator("y", &all)?);
        let rank = lab.device.rank();
        for (name, comm) in if rank == 0 { [("x", x), ("y", y)] } else { [("y", y), ("x", x)] } {
            lab.runtime.add_group(name, comm);
        }
        lab.capture(|lab| {
            for group in ["x", "y"] {
                let mut request = symmetric(group, 64);
                request.domain = sessile_plan::Domain::Symmetric(group.to_owned());
                request.group = Some(group.to_owned());
                let compute = lab.runtime.compute().clone();
                let slot = lab.runtime.request(&compute, request)?;
                lab.fill(slot.view(), 1.0)?;
                lab.runtime.release(&compute, slot)?;
            }
            Ok(())
        })
    })?;
    Ok(Seen::Right("sealed in order of name, whatever order the groups were added in".to_owned()))
}

fn one_rank_falls_back() -> Result<Seen, String> {
    let world = World::new(threads(2));
    world.fail_allocation(1, 1);
    let results = world.run(|device| -> Outcome<()> {
        let comm = everyone(&device, GROUP)?;
        match window_memory(&device, &comm, 1 << 20) {
            Ok(memory) => device.register_window(&comm, &memory)?,
            Err(_) => std::thread::sleep(2 * super::lab::PATIENCE), // goes its own way
        }
        Ok(())
    });
    match results.into_iter().next() {
        Some(Err(error)) => Ok(Seen::Wrong(format!("the peers wait: {}", short(&error.to_string())))),
        _ => Err("the registration ended".to_owned()),
    }
}

fn all_ranks_fail() -> Result<Seen, String> {
    let world = World::new(threads(2));
    let results = world.run(|device| -> Outcome<String> {
        let mut lab = Lab::new(device)?;
        let main = lab.main.clone();
        discover(&mut lab, "layer", |lab| {
            let slot = lab.runtime.request(&main, spec("w", Role::WgradInput, 64))?;
            lab.fill(slot.view(), 1.0)?;
            lab.runtime.release(&main, slot)
        })?;
        let rank = lab.device.rank();
        let before = world.live_bytes(rank);
        if rank == 1 {
            world.fail_allocation(1, 1);
        }
        let error = lab.runtime.seal("museum", &PlanOptions::default()).map(drop);
        let text = error.err().map_or_else(String::new, |error| error.to_string());
        let freed = world.live_bytes(rank) == before;
        lab.runtime.seal("museum", &PlanOptions::default())?;
        Ok(if freed { text } else { String::new() })
    });
    let texts: Vec<String> =
        results.into_iter().collect::<Result<_, _>>().map_err(|failure| failure.to_string())?;
    match &texts[..] {
        [one, other] if one == other && one.contains("rank 1") => {
            Ok(Seen::Right(format!("on both ranks, and a retry succeeds: {}", short(one))))
        }
        _ => Err(format!("{texts:?}")),
    }
}

/// Reduces out of one group's window through its twin; the device takes any view for the plain kind.
fn twin_takes_any_view() -> Result<Seen, String> {
    let logs = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let twin = lab.device.communicator("twin", &[0, 1])?;
        let main = lab.main.clone();
        let out = buffer(&lab.device, 32, 0.0)?;
        let slot = lab.runtime.request(&main, symmetric("w", 64))?;
        lab.fill(slot.view(), 1.0)?;
        lab.device.collective(&main, &twin, sessile_hal::Collective::ReduceScatter, slot.view(), &out)?;
        lab.device.wait_stream(&main)?;
        Ok(lab.device.take_log())
    })?;
    super::lab::finding(&super::lab::report(logs), "foreign_window")
        .map(Seen::Wrong)
        .ok_or_else(|| "the checker did not see it".to_owned())
}

fn twin_refuses() -> Result<Seen, String> {
    let refused = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let twin = lab.device.communicator("twin", &[0, 1])?;
        assert_eq!(twin.ranks(), lab.runtime.group(GROUP)?.ranks());
        lab.runtime.add_group("twin", twin);
        let main = lab.main.clone();
        let out = buffer(&lab.device, 32, 0.0)?;
        let slot = lab.runtime.request(&main, symmetric("w", 64))?;
        let refused = lab.runtime.collective(&main, "twin", ONE_SHOT, slot.view(), &out).map(drop);
        lab.runtime.release(&main, slot)?;
        Ok(refused.err().map(|error| error.to_string()))
    })?;
    match &refused[..] {
        [Some(text), Some(_)] => Ok(Seen::Right(format!("refused before any call: {}", short(text)))),
        _ => Err("the twin took it".to_owned()),
    }
}

/// A graph that reads what an earlier step left in the arena.
fn kept(lab: &mut Lab) -> Outcome<sessile_hal::View<super::lab::Memory>> {
    let out = buffer(&lab.device, 64, 0.0)?;
    let to = out.clone();
    lab.capture(move |lab| {
        let compute = lab.runtime.compute().clone();
        let slot = lab.runtime.request(&compute, symmetric("w", 64))?;
        lab.enqueue(&compute, sessile_hal::Kernel::Add, vec![slot.view().clone(), to.clone()])?;
        lab.runtime.release(&compute, slot)
    })?;
    Ok(out)
}

fn replay_over_fresh_bytes() -> Result<Seen, String> {
    let found = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let out = kept(&mut lab)?;
        let arena = lab.runtime.arenas()[0].clone();
        let all = sessile_hal::View::whole(&arena, sessile_plan::DType::F32)?;
        let ones = super::lab::bytes(&vec![1.0; all.elements() as usize]);
        lab.device.write(&lab.main, &all, &ones)?;
        lab.device.write(&lab.main, &out, &super::lab::bytes(&[0.0; 64]))?;
        lab.device.remap(&arena)?;
        let graph = lab
            .runtime
            .graph("layer")
            .cloned()
            .ok_or(RuntimeError::NotCaptured { runner: "layer".into() })?;
        lab.device.launch(&graph, &lab.main)?;
        lab.first(&out)
    })?;
    super::lab::judge("the graph adds", found[0], 1.0)
}

fn stale_graph() -> Result<Seen, String> {
    let texts = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        kept(&mut lab)?;
        lab.runtime.remap_arenas()?;
        Ok(lab.runtime.replay("layer").err().map(|error| error.to_string()))
    })?;
    match &texts[0] {
        Some(text) => Ok(Seen::Right(format!("refused: {}", short(text)))),
        None => Ok(Seen::Wrong("it replayed".to_owned())),
    }
}

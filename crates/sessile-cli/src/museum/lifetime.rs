//! What a graph owns stays its own as long as the graph lives, and no longer.

use sessile_hal::{Collective, Device, Kernel, View};
use sessile_plan::{DType, Domain, Role};

use super::lab::{
    GROUP, Lab, Memory, ONE_SHOT, Outcome, buffer, finding, judge, report, spec, symmetric, threads, well,
};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "returned-after-capture",
        behaviour: "a buffer that a graph writes never goes back to a pool while the graph lives",
        without: back_to_the_pool,
        with: stays_with_the_graph,
    },
    Exhibit {
        id: "exposed-output",
        behaviour: "a graph's reduce-scatter output is added into a gradient of the caller's, never handed out as one",
        without: output_is_the_gradient,
        with: added_at_each_replay,
    },
    Exhibit {
        id: "placeholder-with-data",
        behaviour: "nothing is added that nobody wrote in this step",
        without: stale_placeholder,
        with: unwritten_bytes_are_reported,
    },
    Exhibit {
        id: "view-after-its-plan",
        behaviour: "a view of a plan that was given up is refused",
        without: kept_view_is_used,
        with: kept_view_is_refused,
    },
    Exhibit {
        id: "slow-peer-reads",
        behaviour: "an input that peers read is reusable when all of them have read it",
        without: || slow_peer(true),
        with: || slow_peer(false),
    },
];

/// Captures a fill of a pooled buffer, then lets somebody else have a buffer of the same size from the pool.
fn pooled(give_back_in_capture: bool) -> Result<f32, String> {
    let found = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let main = lab.main.clone();
        let outside = lab.runtime.request(&main, spec("scratch", Role::RsOutput, 64))?;
        let bytes = outside.view().clone();
        let slot = std::cell::RefCell::new(Some(outside));
        let stand_in = buffer(&lab.device, 64, 0.0)?;
        let passes = std::cell::Cell::new(0);
        lab.capture(|lab| {
            passes.set(passes.get() + 1);
            let captured = passes.get() == 2;
            lab.fill(if captured { &bytes } else { &stand_in }, 5.0)?;
            if captured
                && give_back_in_capture
                && let Some(slot) = slot.take()
            {
                let compute = lab.runtime.compute().clone();
                lab.runtime.release(&compute, slot)?;
            }
            Ok(())
        })?;
        if let Some(slot) = slot.take() {
            // The host's wrapper ends with the capture, and gives the buffer back.
            lab.runtime.release(&main, slot)?;
        }
        let other = lab.runtime.request(&main, spec("other", Role::RsOutput, 64))?;
        lab.fill(other.view(), 7.0)?;
        lab.runtime.replay("layer")?;
        let found = lab.first(other.view())?;
        lab.runtime.release(&main, other)?;
        Ok(found)
    })?;
    Ok(found[0])
}

fn back_to_the_pool() -> Result<Seen, String> {
    judge("after a replay the next owner reads", pooled(false)?, 7.0)
}

fn stays_with_the_graph() -> Result<Seen, String> {
    judge("after a replay the next owner reads", pooled(true)?, 7.0)
}

/// Four micro-batches of 0.25 through one captured reduce-scatter.
fn accumulated(add: bool) -> Result<f32, String> {
    let found = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let grad = buffer(&lab.device, 64, 0.0)?;
        let output = std::cell::RefCell::new(None::<View<Memory>>);
        let to = grad.clone();
        lab.capture(|lab| {
            let compute = lab.runtime.compute().clone();
            let input = lab.runtime.request(&compute, spec("w", Role::WgradInput, 64))?;
            lab.fill(input.view(), 0.25)?;
            let out = lab.runtime.request(&compute, spec("w", Role::RsOutput, 64))?;
            lab.runtime.collective(&compute, GROUP, Collective::ReduceScatter, input.view(), out.view())?;
            if add {
                lab.enqueue(&compute, Kernel::Add, vec![out.view().clone(), to.clone()])?;
            } else {
                lab.enqueue(&compute, Kernel::Spin { micros: 0 }, vec![])?;
            }
            output.replace(Some(out.view().clone()));
            lab.runtime.release(&compute, input)?;
            lab.runtime.release(&compute, out)
        })?;
        lab.device.write(&lab.main, &grad, &super::lab::bytes(&[0.0; 64]))?;
        for _ in 0..4 {
            lab.runtime.replay("layer")?;
            lab.runtime.join()?;
        }
        let exposed = output.take().unwrap_or_else(|| grad.clone());
        lab.first(if add { &grad } else { &exposed })
    })?;
    Ok(found[0])
}

fn output_is_the_gradient() -> Result<Seen, String> {
    judge("the gradient of four micro-batches is", accumulated(false)?, 1.0)
}

fn added_at_each_replay() -> Result<Seen, String> {
    judge("the gradient of four micro-batches is", accumulated(true)?, 1.0)
}

/// A hook adds a shared buffer into the gradient; what it holds is what somebody left there.
fn stale_placeholder() -> Result<Seen, String> {
    let found = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let main = lab.main.clone();
        let grad = buffer(&lab.device, 64, 1.0)?;
        let shared = lab.runtime.request(&main, spec("shared", Role::RsOutput, 64))?;
        lab.fill(shared.view(), 12345.0)?;
        lab.runtime.release(&main, shared)?;
        let placeholder = lab.runtime.request(&main, spec("placeholder", Role::RsOutput, 64))?;
        lab.enqueue(&main, Kernel::Add, vec![placeholder.view().clone(), grad.clone()])?;
        lab.runtime.release(&main, placeholder)?;
        lab.first(&grad)
    })?;
    judge("the gradient is", found[0], 1.0)
}

fn unwritten_bytes_are_reported() -> Result<Seen, String> {
    let logs = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let grad = buffer(&lab.device, 64, 1.0)?;
        let to = grad.clone();
        lab.capture(move |lab| {
            let compute = lab.runtime.compute().clone();
            let placeholder = lab.runtime.request(&compute, spec("placeholder", Role::RsOutput, 64))?;
            lab.enqueue(&compute, Kernel::Add, vec![placeholder.view().clone(), to.clone()])?;
            lab.runtime.release(&compute, placeholder)
        })?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        lab.device.wait_stream(&lab.main)?;
        Ok(lab.device.take_log())
    })?;
    finding(&report(logs), "never_written").map(Seen::Right).ok_or_else(|| "not reported".to_owned())
}

/// One runner, captured; its view, kept beyond the plan.
fn kept(lab: &mut Lab) -> Outcome<sessile_runtime::Slot<super::lab::Dev>> {
    let kept = std::cell::RefCell::new(None);
    lab.capture(|lab| {
        let compute = lab.runtime.compute().clone();
        let slot = lab.runtime.request(&compute, symmetric("w", 64))?;
        lab.fill(slot.view(), 1.0)?;
        if let Some(share) = slot.share() {
            kept.replace(Some(share));
        }
        lab.runtime.release(&compute, slot)
    })?;
    lab.runtime.release_plan()?;
    kept.take().ok_or(sessile_runtime::RuntimeError::NotCaptured { runner: "layer".into() })
}

fn kept_view_is_used() -> Result<Seen, String> {
    let logs = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let slot = kept(&mut lab)?;
        lab.fill(slot.view(), 2.0)?;
        lab.device.wait_stream(&lab.main)?;
        Ok(lab.device.take_log())
    })?;
    finding(&report(logs), "stale_view").map(Seen::Wrong).ok_or_else(|| "nothing was wrong".to_owned())
}

fn kept_view_is_refused() -> Result<Seen, String> {
    let refused = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let slot = kept(&mut lab)?;
        let main = lab.main.clone();
        Ok(lab.runtime.release(&main, slot).err().map(|error| error.to_string()))
    })?;
    match &refused[0] {
        Some(text) => Ok(Seen::Right(super::lab::short(text))),
        None => Err("it was taken".to_owned()),
    }
}

/// Reduces and overwrites the input at once, round after round.
fn slow_peer(omit_exit_meeting: bool) -> Result<Seen, String> {
    let options = sessile_host::WorldOptions { omit_exit_meeting, ..super::lab::writers_early(2) };
    let found = well(options, |device| {
        let comm = super::lab::everyone(&device, GROUP)?;
        let memory = device.alloc(8, &Domain::Symmetric(GROUP.into()), "window")?;
        device.register_window(&comm, &memory)?;
        let input = View::whole(&memory, DType::F32)?;
        let sum = buffer(&device, 1, 0.0)?;
        let stream = device.stream("s")?;
        let fill = |value: f32| sessile_hal::Op::new(Kernel::Fill { value }, "fill", vec![input.clone()]);
        for _ in 0..8 {
            device.enqueue(&stream, fill(1.0)?)?;
            device.collective(&stream, &comm, ONE_SHOT, &input, &sum)?;
            device.enqueue(&stream, fill(f32::NAN)?)?;
        }
        Ok(super::lab::floats(&device.read(&stream, &sum)?)[0])
    })?;
    let worst = found.iter().copied().find(|sum| *sum != 16.0).unwrap_or(16.0);
    judge("the sum of eight rounds is", worst, 16.0)
}

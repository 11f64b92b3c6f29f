//! Weights that are used more than once, and micro-batches.

use sessile_hal::{Collective, Kernel, View};
use sessile_plan::Role;

use super::lab::{GROUP, Lab, Memory, Outcome, buffer, judge, spec, threads, well, writers_early};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "last-use-only",
        behaviour: "every use of a weight adds to its gradient",
        without: || uses(Pending::Replaced),
        with: || uses(Pending::Drained),
    },
    Exhibit {
        id: "first-flag-in-forward-order",
        behaviour: "whether a use overwrites or adds is decided when it is reduced, not in forward order",
        without: || flagged(false),
        with: || flagged(true),
    },
    Exhibit {
        id: "one-buffer-per-use",
        behaviour: "a weight used k times asks for one send buffer where the uses are drained",
        without: || send_bytes(false),
        with: || send_bytes(true),
    },
    Exhibit {
        id: "send-buffer-in-flight",
        behaviour: "a second use of a weight does not overwrite the input of its first reduce-scatter",
        without: || shared_input(false),
        with: || shared_input(true),
    },
];

/// What happens to a reduce-scatter in flight when the weight is used again.
#[derive(Clone, Copy, PartialEq)]
enum Pending {
    /// Its handle is lost.
    Replaced,
    /// It is finished first.
    Drained,
}

fn reduce(lab: &mut Lab, value: f32) -> Outcome<sessile_runtime::Slot<super::lab::Dev>> {
    let (compute, n) = (lab.runtime.compute().clone(), 16 * lab.ranks());
    let input = lab.runtime.request(&compute, spec("head", Role::WgradInput, n))?;
    lab.fill(input.view(), value)?;
    let output = lab.runtime.request(&compute, spec("head", Role::RsOutput, 16))?;
    lab.runtime.collective(&compute, GROUP, Collective::ReduceScatter, input.view(), output.view())?;
    lab.runtime.release(&compute, input)?;
    Ok(output)
}

fn finalize(
    lab: &mut Lab,
    output: sessile_runtime::Slot<super::lab::Dev>,
    grad: &View<Memory>,
) -> Outcome<()> {
    let compute = lab.runtime.compute().clone();
    lab.enqueue(&compute, Kernel::Add, vec![output.view().clone(), grad.clone()])?;
    lab.runtime.release(&compute, output)
}

/// Three uses of one weight in one backward, with gradients 1, 10 and 100, on two ranks.
fn uses(pending: Pending) -> Result<Seen, String> {
    let found = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let grad = buffer(&lab.device, 16, 0.0)?;
        let mut in_flight = None;
        for value in [1.0, 10.0, 100.0] {
            let next = reduce(&mut lab, value)?;
            // One handle a weight: whatever was there is gone.
            if let (Pending::Drained, Some(before)) = (pending, in_flight.replace(next)) {
                finalize(&mut lab, before, &grad)?;
            }
        }
        if let Some(last) = in_flight {
            finalize(&mut lab, last, &grad)?;
        }
        lab.first(&grad)
    })?;
    judge("the gradient of uses 1, 10, 100 on two ranks is", found[0], 222.0)
}

/// Layer 0, then layer 1 use a weight in forward; backward runs 1, then 0.
fn flagged(at_reduce: bool) -> Result<Seen, String> {
    let found = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let grad = buffer(&lab.device, 16, 0.0)?;
        let forward = ["layer0", "layer1"];
        let first_in_forward = forward[0];
        for (reduced, (layer, value)) in [("layer1", 10.0), ("layer0", 1.0)].into_iter().enumerate() {
            let overwrites = if at_reduce { reduced == 0 } else { layer == first_in_forward };
            let output = reduce(&mut lab, value)?;
            if overwrites {
                let compute = lab.runtime.compute().clone();
                lab.enqueue(&compute, Kernel::Copy, vec![output.view().clone(), grad.clone()])?;
                lab.runtime.release(&compute, output)?;
            } else {
                finalize(&mut lab, output, &grad)?;
            }
        }
        lab.first(&grad)
    })?;
    judge("the gradient of uses 10 and 1 is", found[0], 11.0)
}

/// One runner with three uses.
fn three_uses(lab: &mut Lab, drained: bool) -> Outcome<()> {
    let (compute, n) = (lab.runtime.compute().clone(), 16 * lab.ranks());
    let mut inputs = Vec::new();
    for _ in 0..3 {
        let input = lab.runtime.request(&compute, spec("head", Role::WgradInput, n))?;
        lab.fill(input.view(), 1.0)?;
        if drained {
            lab.runtime.release(&compute, input)?;
        } else {
            inputs.push(input);
        }
    }
    inputs.into_iter().try_for_each(|input| lab.runtime.release(&compute, input))
}

fn send_bytes(drained: bool) -> Result<Seen, String> {
    let found = well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        lab.capture(|lab| three_uses(lab, drained))?;
        Ok(lab.runtime.plan().map_or(0, sessile_plan::Plan::bytes))
    })?;
    let one = (16 * 2 * 4_u64).next_multiple_of(256);
    let text = format!("{} bytes for three uses of {one} bytes", found[0]);
    Ok(if found[0] == one { Seen::Right(text) } else { Seen::Wrong(text) })
}

/// Two uses take turns in one buffer; the second writes while the first is read, unless it waits.
fn shared_input(waits: bool) -> Result<Seen, String> {
    let found = well(writers_early(2), |device| {
        let mut lab = Lab::new(device)?;
        let grads = [buffer(&lab.device, 16, 0.0)?, buffer(&lab.device, 16, 0.0)?];
        let n = 16 * lab.ranks();
        let shared = buffer(&lab.device, n, 0.0)?;
        let (main, side) = (lab.main.clone(), lab.side.clone());
        for (value, grad) in [(1.0, &grads[0]), (10.0, &grads[1])] {
            lab.fill(&shared, value)?;
            lab.edge(&main, &side)?;
            lab.runtime.collective(&side, GROUP, Collective::ReduceScatter, &shared, grad)?;
            if waits {
                lab.edge(&side, &main)?;
            }
        }
        lab.first(&grads[0])
    })?;
    judge("the first use's gradient on two ranks is", found[0], 2.0)
}

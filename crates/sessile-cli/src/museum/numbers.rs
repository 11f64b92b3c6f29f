//! Padding, precision, scale.

use sessile_hal::{Collective, Device, Kernel, View};
use sessile_plan::{DType, Domain, Role};

use super::lab::{
    GROUP, Lab, Memory, ONE_SHOT, Outcome, bytes, everyone, finding, floats, judge, report, spec, threads,
    well,
};
use super::{Exhibit, Seen};

pub(super) const EXHIBITS: &[Exhibit] = &[
    Exhibit {
        id: "padding-with-old-data",
        behaviour: "rows beyond the tensor are zero at every reduce-scatter",
        without: || padding(false),
        with: || padding(true),
    },
    Exhibit {
        id: "padding-unnoticed",
        behaviour: "padding that was not filled with zeros is reported, whatever it holds",
        without: lucky_padding,
        with: reported_padding,
    },
    Exhibit {
        id: "rounded-at-each-hop",
        behaviour: "a gradient is rounded once: FP32 sums in rank order",
        without: || trap(Collective::ReduceScatter),
        with: || trap(ONE_SHOT),
    },
    Exhibit {
        id: "scaled-before-the-sum",
        behaviour: "the scale is applied once, in FP32, after the sum",
        without: || mean(true),
        with: || mean(false),
    },
    Exhibit {
        id: "scale-of-another-group",
        behaviour: "a weight's scale comes from its own group, also where dense and expert groups differ",
        without: || expert_mean(true),
        with: || expert_mean(false),
    },
    Exhibit {
        id: "windows-that-differ",
        behaviour: "members that give different windows of one group to a collective are reported",
        without: other_window,
        with: reported_window,
    },
];

/// 3 rows of 4 in a buffer padded to 4 rows, poisoned before; this rank's block of the sum.
fn padded(lab: &mut Lab, zeros: bool) -> Outcome<f32> {
    let (main, ranks) = (lab.main.clone(), lab.ranks());
    let mut input = spec("w", Role::WgradInput, 8 * ranks);
    input.unsharded_shape = vec![8 * ranks - 4];
    let slot = lab.runtime.request(&main, input)?;
    lab.fill(slot.view(), f32::NAN)?;
    lab.fill(&slot.view().slice(0, 8 * ranks - 4)?, 1.0)?;
    if zeros {
        lab.fill(&slot.view().slice(8 * ranks - 4, 4)?, 0.0)?;
    }
    let output = lab.runtime.request(&main, spec("w", Role::RsOutput, 8))?;
    lab.runtime.collective(&main, GROUP, Collective::ReduceScatter, slot.view(), output.view())?;
    lab.runtime.release(&main, slot)?;
    let rows = floats(&lab.device.read(&main, output.view())?);
    lab.runtime.release(&main, output)?;
    Ok(rows[7])
}

fn padding(zeros: bool) -> Result<Seen, String> {
    let found = well(threads(2), |device| padded(&mut Lab::new(device)?, zeros))?;
    judge("the last row of the last rank's shard is", found[1], 0.0)
}

/// A runner that leaves its padding as it finds it.
fn unfilled(zeros: bool) -> Result<(f32, sessile_runtime::check::Report), String> {
    let found = well(threads(1), |device| {
        let mut lab = Lab::new(device)?;
        let sum = super::lab::buffer(&lab.device, 64, 0.0)?;
        let to = sum.clone();
        lab.capture(move |lab| {
            let compute = lab.runtime.compute().clone();
            let mut request = spec("w", Role::WgradInput, 64);
            request.unsharded_shape = vec![60];
            let input = lab.runtime.request(&compute, request)?;
            // Zeros by luck: this fills with what is zero today.
            lab.fill(&input.view().slice(60, 4)?, if zeros { 0.0 } else { -0.0 })?;
            lab.fill(&input.view().slice(0, 60)?, 1.0)?;
            lab.runtime.collective(&compute, GROUP, Collective::ReduceScatter, input.view(), &to)?;
            lab.runtime.release(&compute, input)
        })?;
        lab.runtime.replay("layer")?;
        lab.runtime.join()?;
        let all = floats(&lab.device.read(&lab.main, &sum)?);
        Ok((all[63], lab.device.take_log()))
    })?;
    let (logs, sums): (Vec<_>, Vec<f32>) = found.into_iter().map(|(sum, log)| (log, sum)).unzip();
    Ok((sums[0], report(logs)))
}

fn lucky_padding() -> Result<Seen, String> {
    let (sum, _) = unfilled(false)?;
    if sum == 0.0 {
        Ok(Seen::Wrong("the padding happens to add up to 0 today, and nothing says that it must".to_owned()))
    } else {
        Ok(Seen::Wrong(format!("the padding adds up to {sum}")))
    }
}

fn reported_padding() -> Result<Seen, String> {
    let clean = unfilled(true)?.1;
    if !clean.is_clean() {
        return Err(format!("zeros are reported too: {clean}"));
    }
    finding(&unfilled(false)?.1, "dirty_padding").map(Seen::Right).ok_or_else(|| "not reported".to_owned())
}

fn bf16(value: f32) -> [u8; 2] {
    let bits = (value.to_bits() >> 16) as u16; // exact for the values used here
    bits.to_le_bytes()
}

/// Registered bf16 memory that holds one value.
fn wire<D: Device>(device: &D, comm: &D::Comm, elements: u64, value: f32) -> Outcome<View<D::Memory>> {
    use sessile_hal::Comm;
    let memory = device.alloc(elements * 2, &Domain::Symmetric(comm.name().to_owned()), "wire")?;
    device.register_window(comm, &memory)?;
    let view = View::whole(&memory, DType::Bf16)?;
    let stream = device.stream("upload")?;
    let data: Vec<u8> = (0..elements).flat_map(|_| bf16(value)).collect();
    device.write(&stream, &view, &data)?;
    Ok(view)
}

/// Eight ranks: rank 0 holds 256, the others 1.
fn trap(kind: Collective) -> Result<Seen, String> {
    let found = well(threads(8), |device| {
        let comm = everyone(&device, GROUP)?;
        let input = wire(&device, &comm, 8, if device.rank() == 0 { 256.0 } else { 1.0 })?;
        let grad = super::lab::buffer(&device, 1, 0.0)?;
        let stream = device.stream("s")?;
        if kind == ONE_SHOT {
            device.collective(&stream, &comm, kind, &input, &grad)?;
        } else {
            let out = wire(&device, &comm, 1, 0.0)?;
            device.collective(&stream, &comm, kind, &input, &out)?;
            device.enqueue(&stream, sessile_hal::Op::new(Kernel::Add, "add", vec![out, grad.clone()])?)?;
        }
        Ok(floats(&device.read(&stream, &grad)?)[0])
    })?;
    judge("256 and seven ones add up to", found[7], 263.0)
}

/// Three ranks of ones; the mean is 1.
fn mean(before: bool) -> Result<Seen, String> {
    let found = well(threads(3), |device| {
        let comm = everyone(&device, GROUP)?;
        // A third in bf16, rounded to nearest, is 0.333984375.
        let input = wire(&device, &comm, 3, if before { 0.333_984_38 } else { 1.0 })?;
        let grad = super::lab::buffer(&device, 1, 0.0)?;
        let stream = device.stream("s")?;
        let scale = if before { 1.0 } else { 1.0 / 3.0 };
        device.collective(&stream, &comm, Collective::ReduceScatterAccumulate { scale }, &input, &grad)?;
        Ok(floats(&device.read(&stream, &grad)?)[0])
    })?;
    judge("the mean of three ones is", found[0], 1.0)
}

/// Four ranks; experts are sharded over two of them.
fn expert_mean(global: bool) -> Result<Seen, String> {
    let found = well(threads(4), |device| {
        let first = device.rank() / 2 * 2;
        let expert = device.communicator(&format!("expert.{first}"), &[first, first + 1])?;
        let input = wire(&device, &expert, 2, 1.0)?;
        let grad = super::lab::buffer(&device, 1, 0.0)?;
        let stream = device.stream("s")?;
        let group = if global { device.world_size() } else { sessile_hal::Comm::size(&expert) };
        let scale = 1.0 / group as f32;
        device.collective(&stream, &expert, Collective::ReduceScatterAccumulate { scale }, &input, &grad)?;
        Ok(floats(&device.read(&stream, &grad)?)[0])
    })?;
    judge("the mean of an expert's ones is", found[0], 1.0)
}

/// Each rank has two windows of one group; they give different ones to the same call.
fn two_windows(same: bool) -> Result<Vec<(f32, sessile_runtime::log::RankLog)>, String> {
    well(threads(2), |device| {
        let mut lab = Lab::new(device)?;
        let comm = lab.runtime.group(GROUP)?.clone();
        let windows = [wire(&lab.device, &comm, 2, 1.0)?, wire(&lab.device, &comm, 2, 1.0)?];
        let grad: View<Memory> = super::lab::buffer(&lab.device, 1, 0.0)?;
        let at = if same { 0 } else { lab.device.rank() as usize };
        lab.device.write(&lab.main, &grad, &bytes(&[0.0]))?;
        lab.device.collective(&lab.main, &comm, ONE_SHOT, &windows[at], &grad)?;
        Ok((lab.first(&grad)?, lab.device.take_log()))
    })
}

fn other_window() -> Result<Seen, String> {
    let sums: Vec<f32> = two_windows(false)?.into_iter().map(|(sum, _)| sum).collect();
    Ok(Seen::Wrong(format!("no error, and {} by luck: the windows hold the same", sums[0])))
}

fn reported_window() -> Result<Seen, String> {
    let logs = |same| Ok::<_, String>(two_windows(same)?.into_iter().map(|(_, log)| log).collect());
    if !report(logs(true)?).is_clean() {
        return Err("equal windows are reported too".to_owned());
    }
    finding(&report(logs(false)?), "window_mismatch")
        .map(Seen::Right)
        .ok_or_else(|| "not reported".to_owned())
}

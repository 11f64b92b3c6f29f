//! `sessile bench reduce-scatter`: the same work by the one-shot kernels, by NCCL, and as frameworks do it.

mod chart;
mod document;
mod measure;
mod peers;

use sessile_cuda::{
    gpus,
    library::{Library, load},
    nccl, peer_access,
};
use sessile_hal::DeviceError;

use self::{
    document::{Document, Machine},
    measure::{Bench, Load, Row, Variant},
};
use crate::{
    args::ReduceScatterArgs,
    commands::json,
    failure::{Failure, Verdict},
    output,
    ui::{Lines, Progress, table},
};

/// Bytes of the gradient that is reduced beside matrix products.
const LOADED: u64 = 64 << 20;

/// Measures, prints tables, writes files.
pub(super) fn run(args: &ReduceScatterArgs) -> Result<Verdict, Failure> {
    if let Some(wrong) = args.sizes.iter().find(|bytes| **bytes == 0 || !bytes.is_multiple_of(65_536)) {
        return Err(Failure::Input(format!("--sizes {wrong}: give multiples of 65536 bytes")));
    }
    if args.rounds == 0 {
        return Err(Failure::Input("--rounds 0: give at least 1".to_owned()));
    }
    let wanted = [("--json", args.common.json.as_deref()), ("--svg", args.svg.as_deref())];
    let [json_out, svg_out] = output::prepare(wanted, &[])?;
    let machine = machine().map_err(|error| {
        Failure::Input(format!("{error}; this measurement needs two GPUs that can map each other's memory"))
    })?;
    let largest = args.sizes.iter().copied().max().unwrap_or(0);
    if args.part {
        let rows = rows(args, largest, &Variant::symmetric(""), &Progress::new(true, 0))?;
        let mut lines = Lines::new(false);
        lines.line(String::from_utf8_lossy(&json(&rows)?).trim_end())?;
        return Ok(Verdict::Good);
    }
    let variants = Variant::all();
    let progress = Progress::new(args.common.quiet, (variants.len() * args.sizes.len()) as u64);
    progress.phase("this process");
    let mut rows = rows(args, largest, &variants, &progress)?;
    progress.phase("beside matrix products");
    let load = loads(args, largest, &variants)?;
    for blocks in [16, 32, 64] {
        progress.phase("NCCL_SYM_CTAS");
        rows.extend(peers::tuned(args, blocks)?);
    }
    progress.phase("PyTorch");
    let torch = if args.no_torch { Err("left out (--no-torch)".to_owned()) } else { peers::torch(args) };
    progress.end();

    let document = Document::new(machine, args, rows, load, torch);
    let mut lines = Lines::new(args.common.quiet);
    let head: Vec<String> = std::iter::once("us a call".to_owned())
        .chain(args.sizes.iter().map(|bytes| document::size(*bytes)))
        .collect();
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    lines.line(table(&head, 1, document.times()))?;
    lines.line("")?;
    lines.line(table(&head, 1, document.ratios()))?;
    lines.line("")?;
    let head = ["beside products of 64 MiB gradients", "products", "slower by", "reduce", "slower by"];
    lines.line(table(&head, 1, document.loads()))?;
    if let Some(why) = &document.torch_missing {
        lines.line(format_args!("what frameworks run was not measured: {why}"))?;
    }
    let mut files = Vec::new();
    if let Some(file) = svg_out {
        files.push((file, chart::draw(&document).into_bytes()));
    }
    if let Some(file) = json_out {
        files.push((file, json(&document)?));
    }
    output::write_all(files)?;
    Ok(Verdict::Good)
}

/// The machine, if it can run this.
fn machine() -> Result<Machine, DeviceError> {
    let found = gpus()?;
    if found.len() < 2 {
        return Err(DeviceError::NoGpu { ordinal: u32::try_from(found.len()).unwrap_or(0) });
    }
    [Library::Nccl, Library::Nvrtc].into_iter().try_for_each(load)?;
    if !peer_access(0, 1)? {
        return Err(DeviceError::Unreachable {
            kernel: "bench reduce-scatter",
            group: "all".to_owned(),
            why: "GPUs 0 and 1 can't map each other's memory",
        });
    }
    Ok(Machine {
        gpus: found.iter().map(|gpu| gpu.name.clone()).collect(),
        driver: sessile_cuda::driver_version()?,
        nccl: nccl::version()?,
    })
}

fn failed(error: DeviceError) -> Failure {
    Failure::Run(error.to_string())
}

/// All variants at all sizes.
fn rows(
    args: &ReduceScatterArgs,
    largest: u64,
    variants: &[Variant],
    progress: &Progress,
) -> Result<Vec<Row>, Failure> {
    let by_rank = measure::ranks(2, |device| {
        let bench = Bench::new(device, largest, args.rounds)?;
        let (mut rows, mut measured) = (Vec::new(), 0);
        for variant in variants {
            for bytes in &args.sizes {
                rows.extend(bench.row(variant, *bytes)?);
                measured += 1;
                if device.gpu().ordinal == 0 {
                    progress.step("rows", measured, variant.name.clone());
                }
            }
        }
        Ok(rows)
    });
    Ok(by_rank.map_err(failed)?.into_iter().next().unwrap_or_default())
}

fn loads(args: &ReduceScatterArgs, largest: u64, variants: &[Variant]) -> Result<Vec<Load>, Failure> {
    let names = ["one_shot", "one_shot, 8 SMs", "one_shot, 16 SMs", "copy", "ring + add", "symmetric + add"];
    let by_rank = measure::ranks(2, |device| {
        let bench = Bench::new(device, largest, args.rounds)?;
        let chosen = variants.iter().filter(|variant| names.contains(&variant.name.as_str()));
        chosen.map(|variant| bench.load(variant, LOADED)).collect::<Result<Vec<_>, _>>()
    });
    Ok(by_rank.map_err(failed)?.into_iter().next().unwrap_or_default())
}

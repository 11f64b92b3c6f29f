//! `sessile bench reduce-scatter`: the same work by the one-shot kernels, by NCCL, and as frameworks do it.

mod chart;
mod document;
mod expected;
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
    commands::{json, launch},
    failure::{Failure, Verdict},
    output,
    ui::{Lines, Progress, table},
};

/// Bytes of the gradient that is reduced beside matrix products: 64 MiB, or what is next below it and can be shared.
fn loaded(group: u32) -> u64 {
    let most = 64 << 20;
    most - most % (u64::from(group) * UNIT)
}

/// Sizes are multiples of it.
const UNIT: u64 = 65_536;

/// Measures, prints tables, writes files.
pub(super) fn run(args: &ReduceScatterArgs) -> Result<Verdict, Failure> {
    check(args)?;
    if args.part {
        launch::is_rank()?;
    }
    if args.expected {
        let mut lines = Lines::new(args.common.quiet);
        return expected::tell(args, &mut lines).map(|()| Verdict::Good);
    }
    let wanted = [("--json", args.common.json.as_deref()), ("--svg", args.svg.as_deref())];
    let [json_out, svg_out] = output::prepare(wanted, &[])?;
    let machine = machine(args).map_err(|why| {
        Failure::Input(format!(
            "{why}; this measurement needs {} GPUs (--ranks), those of a group with access to each other's memory",
            args.ranks
        ))
    })?;
    let largest = args.sizes.iter().copied().max().unwrap_or(0);
    if args.part {
        let rows = rows(args, largest, &Variant::symmetric(""), &Progress::new(true, 0))?;
        let mut lines = Lines::new(false);
        lines.line(String::from_utf8_lossy(&json(&rows)?).trim_end())?;
        return Ok(Verdict::Good);
    }
    let variants = Variant::all(args.group());
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
    let head = sizes(&format!("us a call, {}", document.groups()), args);
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    lines.line(table(&head, 1, document.times()))?;
    lines.line("")?;
    lines.line(table(&head, 1, document.ratios()))?;
    lines.line("")?;
    let title = format!("beside products, {} gradients", document::size(loaded(args.group())));
    lines.line(table(&[&title, "products", "slower by", "reduce", "slower by"], 1, document.loads()))?;
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

/// Refuses options that can't work together.
fn check(args: &ReduceScatterArgs) -> Result<(), Failure> {
    let error = |why: String| Err(Failure::Input(why));
    let (ranks, group) = (args.ranks, args.group());
    if !(2..=16).contains(&ranks) {
        return error(format!("--ranks {ranks}: give 2 to 16"));
    }
    if group < 2 || !ranks.is_multiple_of(group) {
        return error(format!(
            "--gtp {group}: give at least 2, and what divides the {ranks} ranks (--ranks)"
        ));
    }
    if let Some(wrong) = args
        .sizes
        .iter()
        .find(|bytes| **bytes == 0 || !bytes.is_multiple_of(UNIT) || **bytes % u64::from(group) != 0)
    {
        return error(format!(
            "--sizes {wrong}: give multiples of 65536 bytes that {group} ranks share evenly, such as {}",
            UNIT * u64::from(group)
        ));
    }
    if args.rounds == 0 {
        return error("--rounds 0: give at least 1".to_owned());
    }
    Ok(())
}

/// The head of a table with a column for each size.
fn sizes(first: &str, args: &ReduceScatterArgs) -> Vec<String> {
    std::iter::once(first.to_owned()).chain(args.sizes.iter().map(|bytes| document::size(*bytes))).collect()
}

/// The machine, if it can run this, or why it can't.
fn machine(args: &ReduceScatterArgs) -> Result<Machine, String> {
    let found = gpus().map_err(|error| error.to_string())?;
    if found.len() < args.ranks as usize {
        return Err(format!("{} GPUs are visible", found.len()));
    }
    let said = |error: DeviceError| error.to_string();
    [Library::Nccl, Library::Nvrtc].into_iter().try_for_each(load).map_err(said)?;
    let group = args.group();
    for (from, to) in (0..args.ranks).flat_map(|from| (0..args.ranks).map(move |to| (from, to))) {
        if from != to && from / group == to / group && !peer_access(from, to).map_err(said)? {
            return Err(format!("GPU {from} has no access to the memory of GPU {to}"));
        }
    }
    Ok(Machine {
        gpus: found.iter().map(|gpu| gpu.name.clone()).collect(),
        driver: sessile_cuda::driver_version().map_err(said)?,
        nccl: nccl::version().map_err(said)?,
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
    let by_rank = measure::ranks(args.ranks, |device| {
        let bench = Bench::new(device, args.group(), largest, args.rounds)?;
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
    let by_rank = measure::ranks(args.ranks, |device| {
        let bench = Bench::new(device, args.group(), largest, args.rounds)?;
        let chosen = variants.iter().filter(|variant| names.contains(&variant.name.as_str()));
        chosen.map(|variant| bench.load(variant, loaded(args.group()))).collect::<Result<Vec<_>, _>>()
    });
    Ok(by_rank.map_err(failed)?.into_iter().next().unwrap_or_default())
}

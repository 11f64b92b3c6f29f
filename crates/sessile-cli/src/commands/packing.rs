//! `sessile plan FILE.csv`: a packing file in one total order.

use std::{collections::BTreeMap, time::Instant};

use serde::Serialize;
use sessile_plan::{Packed, PackingBlock, pack, read_packing, write_packing};

use super::{depth::refuse, json};
use crate::{
    args::PlanArgs,
    failure::{Failure, Verdict},
    input, output,
    ui::{Lines, clean, count, milliseconds, some, table},
};

/// Offsets that are printed unless all are asked for.
const SHOWN: usize = 20;

/// What `--json` writes.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    blocks: u64,
    bytes: u64,
    lower_bound_bytes: u64,
    capacity: Option<u64>,
    /// `null` without a capacity.
    fits: Option<bool>,
    solve_ms: f64,
    offsets: BTreeMap<&'a str, u64>,
}

/// Whether the file is one by its name.
pub(super) fn is_packing(args: &PlanArgs) -> bool {
    args.trace.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv"))
}

/// Packs the blocks of a file.
pub(super) fn run(args: &PlanArgs) -> Result<Verdict, Failure> {
    let path = args.trace.as_path();
    let why = format!("{} is a packing file, whose lifetimes are given: use --capacity", path.display());
    refuse(&args.choices, &why)?;
    if args.explain || args.out.is_some() {
        let option = if args.explain { "--explain" } else { "--out" };
        return Err(Failure::Input(format!(
            "{option}: {} is a packing file, which has no runners and fences; use --json and --csv",
            path.display()
        )));
    }
    if args.timeline.is_some() || args.capacity == Some(0) {
        let wrong = match args.timeline {
            Some(_) => {
                format!("--timeline: {} is a packing file, which has no runners to replay", path.display())
            }
            None => "--capacity 0: nothing fits no bytes; use 1 or more".to_owned(),
        };
        return Err(Failure::Input(wrong));
    }
    let wanted = [("--json", args.common.json.as_deref()), ("--csv", args.csv.as_deref())];
    let [json_out, csv_out] = output::prepare(wanted, &[path])?;
    let bytes = input::document(path, "a packing file with the columns id, lower, upper, size")?;
    let text = String::from_utf8(bytes).map_err(|error| input::about(path, error))?;
    let blocks = read_packing(&text).map_err(|error| input::about(path, error))?;
    let started = Instant::now();
    let packed = pack(&blocks, args.capacity).map_err(|error| input::about(path, error))?;
    let document = Document {
        schema: "sessile.packing",
        version: 1,
        blocks: blocks.len() as u64,
        bytes: packed.bytes,
        lower_bound_bytes: packed.lower_bound_bytes,
        capacity: args.capacity,
        fits: args.capacity.map(|capacity| packed.bytes <= capacity),
        solve_ms: milliseconds(started.elapsed()),
        offsets: blocks.iter().map(|block| block.id.as_str()).zip(packed.offsets.iter().copied()).collect(),
    };
    let mut files = Vec::new();
    if let Some(file) = json_out {
        files.push((file, json(&document)?));
    }
    if let Some(file) = csv_out {
        files.push((file, write_packing(&blocks, &packed).into_bytes()));
    }
    output::write_all(files)?;
    print(&document, &blocks, &packed, args)?;
    Ok(if document.fits == Some(false) { Verdict::Bad } else { Verdict::Good })
}

fn print(
    document: &Document<'_>,
    blocks: &[PackingBlock],
    packed: &Packed,
    args: &PlanArgs,
) -> Result<(), Failure> {
    let mut lines = Lines::new(args.common.quiet);
    let (bytes, bound) = (document.bytes, document.lower_bound_bytes);
    lines.line(format_args!(
        "{}: {} bytes; {} must live at once ({:.3} % above that); {:.3} ms",
        some(document.blocks, "block"),
        count(bytes),
        count(bound),
        100.0 * (bytes - bound) as f64 / bound as f64,
        document.solve_ms
    ))?;
    if let Some((capacity, fits)) = document.capacity.zip(document.fits) {
        let fits = if fits { "fits" } else { "was not made to fit" };
        lines.line(format_args!("{fits} {} bytes", count(capacity)))?;
    }
    lines.line("")?;
    let shown = if args.all { usize::MAX } else { SHOWN };
    let with_domain = blocks.iter().any(|block| !block.domain.is_empty());
    let row = |(block, &offset): (&PackingBlock, &u64)| {
        let PackingBlock { id, lower, upper, size, domain, .. } = block;
        let mut row = vec![clean(id), count(*lower), count(*upper), count(*size), count(offset)];
        if with_domain {
            row.insert(1, clean(domain));
        }
        row
    };
    let rows = blocks.iter().zip(&packed.offsets).take(shown).map(row).collect();
    let head: &[&str] = match with_domain {
        true => &["block", "arena", "from", "up to", "size", "offset"],
        false => &["block", "from", "up to", "size", "offset"],
    };
    lines.line(table(head, head.len() - 4, rows))?;
    if blocks.len() > shown {
        let more = count((blocks.len() - shown) as u64);
        lines.line(format_args!("and {more} more blocks: --all shows them"))?;
    }
    Ok(())
}

//! Packing instances in one total order, as MiniMalloc's CSV files have them: interchange, and a test of the solver.
//!
//! ```text
//!  id,lower,upper,size        live from lower up to, not including, upper
//!  a,0,2,4
//!  id,start,end,size          older files: up to and including end
//!  a,0,1,4
//! ```
//!
//! A column `alignment` is kept. Blocks of one `domain` share an arena, whose offsets begin at 0; without the column all
//! share one. `hint` is ignored, and so is `offset` where every line has one, as in files that were written here; values
//! in `gaps`, or offsets of some blocks alone, ask for what is not planned here.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    limits::{NAME_BYTES_MAX, PAIRS_MAX, REQUESTS_MAX, TOTAL_BYTES_MAX},
    solve::{Placed, Problem, solve},
};

/// One buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackingBlock {
    /// Unique in the file.
    pub id: String,
    /// When it begins to live.
    pub lower: u64,
    /// When it does no more.
    pub upper: u64,
    /// Its size.
    pub size: u64,
    /// What its offset is a multiple of.
    pub alignment: u64,
    /// Its arena; empty where the file has no such column.
    pub domain: String,
}

/// Where everything lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Offsets, in the order of the blocks.
    pub offsets: Vec<u64>,
    /// The end of the highest block, summed over the arenas.
    pub bytes: u64,
    /// The largest sum of sizes live at once, summed over the arenas.
    pub lower_bound_bytes: u64,
}

/// What is wrong with a packing file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PackingError {
    /// A header without the columns that are needed, or with one twice.
    #[error("line 1: {problem}; the header names id, size, and lower and upper (or start and end)")]
    Header {
        /// What is wrong.
        problem: String,
    },
    /// A line with too few or too many fields.
    #[error("line {line} has {found} fields: the header has {expected}")]
    Fields {
        /// Which.
        line: usize,
        /// How many it has.
        found: usize,
        /// How many it should have.
        expected: usize,
    },
    /// A field that can't be used.
    #[error("line {line}, column `{column}` is `{found}`: {remedy}")]
    Value {
        /// Which line.
        line: usize,
        /// Which column.
        column: &'static str,
        /// What it holds, shortened.
        found: String,
        /// What would do.
        remedy: &'static str,
    },
    /// No block at all.
    #[error("the file has no block: add a line below the header")]
    Empty,
    /// More blocks, or pairs of blocks that live at once, than are planned.
    #[error("{what} are {count}: the limit is {limit}; split the file where nothing is live")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
        /// The limit.
        limit: usize,
    },
}

/// Columns by their place in a line.
struct Columns {
    count: usize,
    of: BTreeMap<&'static str, usize>,
}

const NAMES: [&str; 11] =
    ["id", "lower", "upper", "start", "end", "size", "alignment", "gaps", "hint", "offset", "domain"];

/// The fields of a line; those in quotes may hold commas, and quotes as two.
fn fields(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut quoted = false;
    let mut rest = line.chars().peekable();
    while let Some(next) = rest.next() {
        match (next, fields.last_mut()) {
            ('"', Some(field)) if quoted && rest.peek() == Some(&'"') => {
                field.push('"');
                rest.next();
            }
            ('"', Some(field)) if quoted || field.trim().is_empty() => quoted = !quoted,
            (',', _) if !quoted => fields.push(String::new()),
            (other, Some(field)) => field.push(other),
            (_, None) => {}
        }
    }
    fields.iter().map(|field| field.trim().to_owned()).collect()
}

impl Columns {
    fn new(header: &str) -> Result<Columns, PackingError> {
        let wrong = |problem: String| PackingError::Header { problem };
        let mut of = BTreeMap::new();
        let fields: Vec<&str> = header.split(',').map(str::trim).collect();
        for (at, field) in fields.iter().enumerate() {
            let Some(name) = NAMES.iter().find(|name| *name == field) else {
                return Err(wrong(format!(
                    "unknown column `{}`",
                    field.chars().take(40).collect::<String>()
                )));
            };
            if of.insert(*name, at).is_some() {
                return Err(wrong(format!("column `{name}` is there twice")));
            }
        }
        let columns = Columns { count: fields.len(), of };
        for needed in ["id", "size"] {
            if !columns.has(needed) {
                return Err(wrong(format!("no column `{needed}`")));
            }
        }
        match (
            ["lower", "upper"].map(|name| columns.has(name)),
            ["start", "end"].map(|name| columns.has(name)),
        ) {
            ([true, true], [false, false]) | ([false, false], [true, true]) => Ok(columns),
            _ => Err(wrong("no pair of columns says how long blocks live".into())),
        }
    }

    fn has(&self, name: &str) -> bool {
        self.of.contains_key(name)
    }
}

/// Reads a packing file.
///
/// # Errors
/// Every [`PackingError`].
pub fn read_packing(text: &str) -> Result<Vec<PackingBlock>, PackingError> {
    let mut lines = text.lines().enumerate();
    let (_, header) = lines.next().ok_or(PackingError::Empty)?;
    let columns = Columns::new(header.trim_start_matches('\u{feff}'))?;
    let mut blocks: Vec<PackingBlock> = Vec::new();
    let mut ids = BTreeSet::new();
    let mut total = 0u64;
    // Lines with an offset, and the first of them.
    let (mut placed, mut first_placed) = (0, None);
    for (at, text) in lines {
        let line = at + 1;
        if text.trim().is_empty() {
            continue;
        }
        if blocks.len() == REQUESTS_MAX {
            return Err(PackingError::TooMany {
                what: "blocks",
                count: blocks.len() + 1,
                limit: REQUESTS_MAX,
            });
        }
        let fields = fields(text);
        if fields.len() != columns.count {
            return Err(PackingError::Fields { line, found: fields.len(), expected: columns.count });
        }
        let field = |name: &str| columns.of.get(name).map_or("", |&at| fields[at].as_str());
        let wrong = |column, remedy| {
            let found = field(column).chars().take(80).collect();
            PackingError::Value { line, column, found, remedy }
        };
        let number = |column| {
            let parsed = field(column).parse::<u64>().ok().filter(|&value| value < TOTAL_BYTES_MAX);
            parsed.ok_or_else(|| wrong(column, "use a whole number from 0, below 2^56"))
        };
        if !field("gaps").is_empty() {
            return Err(wrong("gaps", "this is not planned: leave the column empty"));
        }
        if !field("offset").is_empty() {
            placed += 1;
            first_placed.get_or_insert_with(|| {
                wrong("offset", "blocks that stay where they are, are not planned: leave the column empty")
            });
        }
        let domain = field("domain").to_owned();
        if domain.len() > 2 * NAME_BYTES_MAX {
            return Err(wrong("domain", "use a name of at most 512 bytes"));
        }
        let id = field("id").to_owned();
        if !(1..=NAME_BYTES_MAX).contains(&id.len()) || !ids.insert(id.clone()) {
            return Err(wrong("id", "use an id of 1 to 256 bytes that no other line has"));
        }
        let (lower, upper) = if columns.has("lower") {
            (number("lower")?, number("upper")?)
        } else {
            (number("start")?, number("end")? + 1)
        };
        if lower >= upper {
            let column = if columns.has("lower") { "upper" } else { "end" };
            return Err(wrong(column, "a block lives for some time: it ends after it begins"));
        }
        let size = number("size")?;
        total = total.saturating_add(size);
        if size == 0 || total >= TOTAL_BYTES_MAX {
            return Err(wrong("size", "use a size from 1; all sizes together stay below 2^56"));
        }
        let alignment = if field("alignment").is_empty() { 1 } else { number("alignment")? };
        if !(1..=1 << 32).contains(&alignment) {
            return Err(wrong("alignment", "use a number from 1 to 2^32"));
        }
        blocks.push(PackingBlock { id, lower, upper, size, alignment, domain });
    }
    if blocks.is_empty() {
        return Err(PackingError::Empty);
    }
    match first_placed {
        Some(error) if placed < blocks.len() => Err(error),
        _ => Ok(blocks),
    }
}

/// The blocks with their offsets as a packing file.
pub fn write_packing(blocks: &[PackingBlock], packed: &Packed) -> String {
    let with_domain = blocks.iter().any(|block| !block.domain.is_empty());
    let head = if with_domain { ",domain" } else { "" };
    let mut text = format!("id,lower,upper,size,alignment,offset{head}\n");
    for (block, offset) in blocks.iter().zip(&packed.offsets) {
        let PackingBlock { id, lower, upper, size, alignment, domain } = block;
        text += &format!("{},{lower},{upper},{size},{alignment},{offset}", quoted(id));
        if with_domain {
            text += &format!(",{}", quoted(domain));
        }
        text.push('\n');
    }
    text
}

/// A field, in quotes where it needs them.
pub(crate) fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

/// Packs blocks, those of each domain into an arena of its own; stops at the lower bound, or once all fit `capacity`.
/// What does not fit is packed as low as without one, or lower.
///
/// # Errors
/// [`PackingError::TooMany`] where more pairs of blocks live at once than are planned.
pub fn pack(blocks: &[PackingBlock], capacity: Option<u64>) -> Result<Packed, PackingError> {
    let mut by_domain: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, block) in blocks.iter().enumerate() {
        by_domain.entry(&block.domain).or_default().push(at);
    }
    let arenas = by_domain.into_values().map(|arena| Arena::new(blocks, arena));
    let arenas = arenas.collect::<Result<Vec<_>, _>>()?;
    let lower_bound_bytes = arenas.iter().map(|arena| arena.bound).sum();
    let mut packed = Packed { offsets: vec![0; blocks.len()], bytes: 0, lower_bound_bytes };
    // What the arenas that are not packed yet need at least.
    let mut ahead = lower_bound_bytes;
    for arena in &arenas {
        ahead -= arena.bound;
        let room = capacity.map_or(0, |capacity| capacity.saturating_sub(packed.bytes + ahead));
        let placed = arena.place(room);
        for (&at, &offset) in arena.order.iter().zip(&placed.offsets) {
            packed.offsets[at] = offset;
        }
        packed.bytes += placed.total;
    }
    Ok(packed)
}

/// The blocks of one domain.
struct Arena {
    /// In order of begin, as the solver wants them.
    order: Vec<usize>,
    problem: Problem,
    bound: u64,
}

impl Arena {
    fn new(blocks: &[PackingBlock], mut order: Vec<usize>) -> Result<Arena, PackingError> {
        order.sort_by_key(|&at| (blocks[at].lower, blocks[at].upper, at));
        let mut pairs: Vec<(u32, u32)> = Vec::new();
        let mut live: Vec<usize> = Vec::new();
        let mut bound = 0;
        for (number, &at) in order.iter().enumerate() {
            live.retain(|&other| blocks[order[other]].upper > blocks[at].lower);
            pairs.extend(live.iter().map(|&other| (other as u32, number as u32)));
            if pairs.len() > PAIRS_MAX {
                let what = "pairs of blocks that live at once";
                return Err(PackingError::TooMany { what, count: pairs.len(), limit: PAIRS_MAX });
            }
            live.push(number);
            bound = live.iter().map(|&other| blocks[order[other]].size).sum::<u64>().max(bound);
        }
        let sizes = order.iter().map(|&at| (blocks[at].size, blocks[at].alignment)).collect();
        let problem = Problem::of_pairs(sizes, &pairs);
        Ok(Arena { order, problem, bound })
    }

    /// Within `room` if that is found, else as low as is found.
    fn place(&self, room: u64) -> Placed {
        let target = self.bound.max(room);
        let placed = solve(&self.problem, target, u64::MAX);
        if placed.total <= target {
            return placed;
        }
        // The search for another height ends elsewhere.
        let lower = solve(&self.problem, self.bound, u64::MAX);
        if lower.total < placed.total { lower } else { placed }
    }
}

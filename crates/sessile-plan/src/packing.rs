//! Packing instances in one total order, as MiniMalloc's CSV files have them: interchange, and a test of the solver.
//!
//! ```text
//!  id,lower,upper,size        live from lower up to, not including, upper
//!  a,0,2,4
//!  id,start,end,size          older files: up to and including end
//!  a,0,1,4
//! ```
//!
//! A column `alignment` is kept, `hint` is ignored; values in `gaps` or `offset` ask for what is not planned here.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    limits::{NAME_BYTES_MAX, PAIRS_MAX, REQUESTS_MAX, TOTAL_BYTES_MAX},
    solve::{Problem, solve},
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
}

/// Where everything lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Offsets, in the order of the blocks.
    pub offsets: Vec<u64>,
    /// The end of the highest block.
    pub bytes: u64,
    /// The largest sum of sizes live at once.
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

const NAMES: [&str; 10] =
    ["id", "lower", "upper", "start", "end", "size", "alignment", "gaps", "hint", "offset"];

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
        let fields: Vec<&str> = text.split(',').map(str::trim).collect();
        if fields.len() != columns.count {
            return Err(PackingError::Fields { line, found: fields.len(), expected: columns.count });
        }
        let field = |name: &str| columns.of.get(name).map_or("", |&at| fields[at]);
        let wrong = |column, remedy| {
            let found = field(column).chars().take(80).collect();
            PackingError::Value { line, column, found, remedy }
        };
        let number = |column| {
            let parsed = field(column).parse::<u64>().ok().filter(|&value| value < TOTAL_BYTES_MAX);
            parsed.ok_or_else(|| wrong(column, "use a whole number from 0, below 2^56"))
        };
        for column in ["gaps", "offset"] {
            if !field(column).is_empty() {
                return Err(wrong(column, "this is not planned: leave the column empty"));
            }
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
        blocks.push(PackingBlock { id, lower, upper, size, alignment });
    }
    if blocks.is_empty() {
        return Err(PackingError::Empty);
    }
    Ok(blocks)
}

/// The blocks with their offsets as a packing file.
pub fn write_packing(blocks: &[PackingBlock], packed: &Packed) -> String {
    let mut text = "id,lower,upper,size,alignment,offset\n".to_owned();
    for (block, offset) in blocks.iter().zip(&packed.offsets) {
        let PackingBlock { id, lower, upper, size, alignment } = block;
        text += &format!("{id},{lower},{upper},{size},{alignment},{offset}\n");
    }
    text
}

/// Packs blocks; stops at the lower bound, or once they fit `capacity`.
///
/// # Errors
/// [`PackingError::TooMany`] where more pairs of blocks live at once than are planned.
pub fn pack(blocks: &[PackingBlock], capacity: Option<u64>) -> Result<Packed, PackingError> {
    // In order of begin, as the solver wants them.
    let mut order: Vec<usize> = (0..blocks.len()).collect();
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
    let placed = solve(&problem, bound.max(capacity.unwrap_or(0)), u64::MAX);
    let mut offsets = vec![0; blocks.len()];
    for (&at, &offset) in order.iter().zip(&placed.offsets) {
        offsets[at] = offset;
    }
    Ok(Packed { offsets, bytes: placed.total, lower_bound_bytes: bound })
}

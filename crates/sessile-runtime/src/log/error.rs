//! What can be wrong with a log.

/// An error of a log that was read or built.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// The file is larger than a log may be.
    #[error("log of {bytes} bytes: the limit is {limit}; record fewer steps")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Not JSON, or not of this shape.
    #[error("log is not valid JSON of this format: {text}; write it again with `write_log`")]
    Json {
        /// What the parser says, with line and column.
        text: String,
    },
    /// The file is something else.
    #[error("`schema` is `{found}`, expected `{expected}`: this file is not an event log")]
    Schema {
        /// What it says.
        found: String,
        /// What a log says.
        expected: &'static str,
    },
    /// Another version of the format.
    #[error("`version` is {found}, this build reads {supported}: write the log with the same build")]
    Version {
        /// What it says.
        found: u64,
        /// What this build reads.
        supported: u32,
    },
    /// Nothing was recorded, so nothing can be found.
    #[error("`ranks` is empty: a log of no rank proves nothing; keep at least one rank's")]
    NoRanks,
    /// The ranks do not follow one another.
    #[error("ranks[{at}].rank is {found}, but ranks must rise strictly (the one before is {previous})")]
    RankOrder {
        /// Place in `ranks`.
        at: u64,
        /// What it says.
        found: u32,
        /// The one before.
        previous: u32,
    },
    /// An index points nowhere.
    #[error("rank {rank}: {place}: {field} is {found}, but there are only {limit}")]
    Index {
        /// The rank.
        rank: u32,
        /// Where, as `entries[3]`.
        place: String,
        /// The field.
        field: &'static str,
        /// What it says.
        found: u64,
        /// How many there are.
        limit: u64,
    },
    /// A node depends on itself or on a later one.
    #[error("rank {rank}: {place}: depends on node {found}, but dependencies must come first")]
    DependencyOrder {
        /// The rank.
        rank: u32,
        /// Where.
        place: String,
        /// The dependency.
        found: u32,
    },
    /// A range runs backwards or leaves its allocation.
    #[error("rank {rank}: {place}: range {start}..{end} must not run backwards nor leave its {bytes} bytes")]
    Range {
        /// The rank.
        rank: u32,
        /// Where.
        place: String,
        /// Its start.
        start: u64,
        /// Its end.
        end: u64,
        /// Size of the allocation; `u64::MAX` if it is not listed.
        bytes: u64,
    },
    /// Something that must be unique is there twice.
    #[error("rank {rank}: {place}: {field} {found} is there twice")]
    Duplicate {
        /// The rank.
        rank: u32,
        /// Where.
        place: String,
        /// The field.
        field: &'static str,
        /// What it says.
        found: u64,
    },
    /// A rank made a communicator that it is not in.
    #[error("rank {rank}: {place}: ranks {ranks:?} do not hold the rank that made it")]
    NotMember {
        /// The rank.
        rank: u32,
        /// Where.
        place: String,
        /// The members.
        ranks: Vec<u32>,
    },
    /// The log could not be written.
    #[error("log could not be written: {text}")]
    Write {
        /// What the writer says.
        text: String,
    },
}

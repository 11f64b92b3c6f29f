//! Traces and plans as versioned JSON, read from bytes that nobody vouches for.
//!
//! The size is checked before anything is parsed, the version before the rest is looked at, counts while they are
//! read, and the meaning at the end. Nothing here panics on any input, and memory stays within a small multiple of
//! the document.

mod locate;
mod strict;

use std::{collections::BTreeSet, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, SeqAccess, Visitor},
};

use crate::{
    check::check_trace,
    error::{FormatError, PlanError},
    limits::{DOCUMENT_BYTES_MAX, TOTAL_BYTES_MAX},
    plan::{PLAN_VERSION, Plan},
    planner::check_options,
    request::VIEW_ALIGN,
    trace::{TRACE_VERSION, Trace},
};

/// JSON Schema of the trace format.
pub const TRACE_SCHEMA: &str = include_str!("../../schema/trace.schema.json");
/// JSON Schema of the plan format.
pub const PLAN_SCHEMA: &str = include_str!("../../schema/plan.schema.json");

/// Reads a trace and checks it with [`check_trace`].
///
/// # Errors
/// Every [`FormatError`] but [`FormatError::Plan`].
pub fn read_trace(json: &[u8]) -> Result<Trace, FormatError> {
    let trace: Trace = read(json, Trace::SCHEMA, TRACE_VERSION)?;
    check_trace(&trace)?;
    Ok(trace)
}

/// Writes a trace, on one line.
pub fn write_trace(trace: &Trace) -> String {
    write(trace)
}

/// Reads a plan and checks that it does not contradict itself. Whether it fits a trace is for
/// [`validate`](crate::validate) to say.
///
/// # Errors
/// Every [`FormatError`] but [`FormatError::Trace`].
pub fn read_plan(json: &[u8]) -> Result<Plan, FormatError> {
    let plan: Plan = read(json, Plan::SCHEMA, PLAN_VERSION)?;
    check_plan(&plan)?;
    Ok(plan)
}

/// Writes a plan, on one line.
pub fn write_plan(plan: &Plan) -> String {
    write(plan)
}

fn write(document: &impl serde::Serialize) -> String {
    #[expect(clippy::expect_used, reason = "string keys and integers: there is nothing that can fail")]
    let mut json = serde_json::to_string(document).expect("a document always serializes");
    json.push('\n');
    json
}

/// What every document begins with, whatever its version.
#[derive(Deserialize)]
struct Header {
    schema: String,
    version: u64,
}

fn read<T: DeserializeOwned>(json: &[u8], schema: &'static str, version: u32) -> Result<T, FormatError> {
    if json.len() > DOCUMENT_BYTES_MAX {
        return Err(FormatError::TooLarge { bytes: json.len() });
    }
    let header: Header = serde_json::from_slice(json).map_err(|error| locate::error(json, &error, schema))?;
    if header.schema != schema {
        return Err(FormatError::Schema { found: shorten(&header.schema), expected: schema });
    }
    if header.version != u64::from(version) {
        return Err(FormatError::Version { found: header.version, expected: version, schema });
    }
    let document = serde_json::from_slice(json).map_err(|error| locate::error(json, &error, schema))?;
    strict::check(json, schema)?;
    Ok(document)
}

/// At most 80 characters.
fn shorten(text: &str) -> String {
    text.chars().take(80).collect()
}

fn check_plan(plan: &Plan) -> Result<(), FormatError> {
    let wrong = |field: String, found: String, rule| Err(FormatError::Plan { field, found, rule });
    match check_options(&plan.options) {
        Err(PlanError::OptionOutOfRange { option, value }) => {
            return wrong(format!("options.{option}"), value.to_string(), "it goes from 1 to 1024");
        }
        Err(PlanError::TooManyGroups { count }) => {
            let found = format!("{count} groups");
            return wrong("options.depth_by_group".into(), found, "it names up to 1024");
        }
        Err(PlanError::GroupName { bytes }) => {
            let found = format!("a name of {bytes} bytes");
            return wrong("options.depth_by_group".into(), found, "names have 1 to 256 bytes");
        }
        _ => {}
    }
    if plan.launch_order != plan.options.effective_launch_order() {
        let found = format!("{:?}", plan.launch_order).to_lowercase();
        return wrong(
            "launch_order".into(),
            found,
            "it is serial where no depth is above 1, else as in options",
        );
    }
    if plan.trace_digest.len() != 64
        || !plan.trace_digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    {
        return wrong("trace_digest".into(), shorten(&plan.trace_digest), "it has 64 hexadecimal digits");
    }
    let mut total = 0u64;
    for (at, arena) in plan.arenas.iter().enumerate() {
        total = total.saturating_add(arena.bytes);
        if total >= TOTAL_BYTES_MAX || arena.lower_bound_bytes > arena.bytes {
            let found = format!("{} bytes, bound {}", arena.bytes, arena.lower_bound_bytes);
            return wrong(
                format!("arenas[{at}]"),
                found,
                "the bound is within it, and all are below 2^56 bytes",
            );
        }
    }
    if let Some(at) = plan.arenas.windows(2).position(|pair| pair[0].domain >= pair[1].domain) {
        let (field, found) = (format!("arenas[{}].domain", at + 1), plan.arenas[at + 1].domain.to_string());
        return wrong(field, found, "arenas are in order of domain, one for each");
    }
    if let Some(at) = plan.views.windows(2).position(|pair| pair[0].request >= pair[1].request) {
        let (field, found) = (format!("views[{}].request", at + 1), plan.views[at + 1].request.0.to_string());
        return wrong(field, found, "views are in order of request, one for each");
    }
    for (at, view) in plan.views.iter().enumerate() {
        let Some(arena) = plan.arenas.get(view.arena as usize) else {
            return wrong(
                format!("views[{at}].arena"),
                view.arena.to_string(),
                "it is an index into `arenas`",
            );
        };
        let inside = view.offset.checked_add(view.bytes).is_some_and(|end| end <= arena.bytes);
        if !inside || !view.offset.is_multiple_of(VIEW_ALIGN) || !view.bytes.is_multiple_of(VIEW_ALIGN) {
            let found = format!("{} bytes at {}", view.bytes, view.offset);
            return wrong(format!("views[{at}]"), found, "it lies inside its arena, in multiples of 256");
        }
    }
    if let Some(at) = plan.fences.windows(2).position(|pair| pair[0] >= pair[1]) {
        let found = format!("({}, {})", plan.fences[at + 1].release.0, plan.fences[at + 1].acquire.0);
        return wrong(format!("fences[{}]", at + 1), found, "fences are sorted, each there once");
    }
    let known: BTreeSet<_> = plan.views.iter().map(|view| view.request).collect();
    for (at, fence) in plan.fences.iter().enumerate() {
        for (part, request) in [("release", fence.release), ("acquire", fence.acquire)] {
            if !known.contains(&request) {
                return wrong(
                    format!("fences[{at}].{part}"),
                    request.0.to_string(),
                    "it is a request with a view",
                );
            }
        }
    }
    Ok(())
}

/// Reads a list and stops with an error at the first item beyond `MAX`.
pub(crate) fn at_most<'de, D, T, const MAX: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Bounded<T, const MAX: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Bounded<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX}")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Vec<T>, A::Error> {
            let mut list = Vec::new();
            while let Some(item) = items.next_element()? {
                if list.len() == MAX {
                    return Err(A::Error::custom(format_args!("more than {MAX} items, which is the limit")));
                }
                list.push(item);
            }
            Ok(list)
        }
    }

    deserializer.deserialize_seq(Bounded::<T, MAX>(PhantomData))
}

/// The same for a list of at most `OUTER` lists of at most `INNER` items.
pub(crate) fn at_most_each<'de, D, T, const OUTER: usize, const INNER: usize>(
    deserializer: D,
) -> Result<Vec<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Inner<T, const MAX: usize>(Vec<T>);

    impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Inner<T, MAX> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            at_most::<D, T, MAX>(deserializer).map(Inner)
        }
    }

    let lists = at_most::<D, Inner<T, INNER>, OUTER>(deserializer)?;
    Ok(lists.into_iter().map(|list| list.0).collect())
}

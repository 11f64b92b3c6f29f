//! What serde lets pass and the schema does not: a struct written as a list of its fields, and a bare variant
//! written as an object with a null. Runs on documents that were parsed already, so that their syntax is known.

use super::locate;
use crate::error::FormatError;

/// Fields that are lists.
const LISTS: [&[u8]; 11] = [
    b"runners",
    b"requests",
    b"points",
    b"steps",
    b"shape",
    b"unsharded_shape",
    b"arenas",
    b"peak",
    b"views",
    b"fences",
    b"durations_ns",
];
/// Fields that are lists of lists.
const LISTS_OF_LISTS: [&[u8]; 2] = [b"steps", b"durations_ns"];
/// Fields that may be null.
const NULLABLE: [&[u8]; 3] = [b"group", b"expert", b"accumulates_into"];

/// What is open at a place of the document.
enum Open<'a> {
    /// An object, and its latest key.
    Object(&'a [u8]),
    List {
        of_lists: bool,
    },
}

/// Accepts lists and nulls only where the schemas have them.
pub(super) fn check(json: &[u8], schema: &'static str) -> Result<(), FormatError> {
    let mut open: Vec<Open<'_>> = Vec::new();
    let mut text: &[u8] = b"";
    let mut at = 0;
    while at < json.len() {
        let (key, in_outer) = match open.last() {
            Some(Open::Object(key)) => (Some(*key), false),
            Some(Open::List { of_lists }) => (None, *of_lists),
            None => (None, false),
        };
        let problem = match json[at] {
            b'[' if !in_outer && !key.is_some_and(|key| LISTS.contains(&key)) => {
                Some("a list where an object or value belongs")
            }
            b'n' if !key.is_some_and(|key| NULLABLE.contains(&key)) => Some("null where a value belongs"),
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(locate::at_offset(json, at, locate::position(json, at), problem, schema));
        }
        match json[at] {
            b'{' => open.push(Open::Object(b"")),
            b'[' => open.push(Open::List { of_lists: key.is_some_and(|key| LISTS_OF_LISTS.contains(&key)) }),
            b'}' | b']' => _ = open.pop(),
            b':' => {
                if let Some(Open::Object(key)) = open.last_mut() {
                    *key = text;
                }
            }
            b'n' => at += 3,
            b'"' => {
                let start = at + 1;
                at = start;
                while at < json.len() && json[at] != b'"' {
                    at += if json[at] == b'\\' { 2 } else { 1 };
                }
                text = &json[start..at.min(json.len())];
            }
            _ => {}
        }
        at += 1;
    }
    Ok(())
}

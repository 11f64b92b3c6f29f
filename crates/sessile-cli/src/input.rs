//! Files that the user names, read with bounded memory.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read},
    path::Path,
};

use serde::Deserialize;
use sessile_plan::Trace;

use crate::{failure::Failure, special};

/// Largest text to train on, in bytes.
const DATA_BYTES_MAX: u64 = 256 << 20;
/// Largest document of any kind, in bytes.
const DOCUMENT_BYTES_MAX: u64 = 1 << 30;

/// The text of `--data`.
///
/// # Errors
/// What is missing, a folder, empty, too short for one sequence and its target, too large, or binary.
pub(crate) fn data(path: &Path, seq: u64, needed: u64) -> Result<Vec<u8>, Failure> {
    let bytes = read("--data", path, DATA_BYTES_MAX, "a text file")?;
    let shown = path.display();
    if bytes.is_empty() {
        return Err(Failure::Input(format!("--data {shown} is empty: name a text file")));
    }
    if let Some(at) = bytes.iter().position(|&byte| byte == 0) {
        return Err(Failure::Input(format!(
            "--data {shown} is binary (a NUL byte at offset {at}): name a text file"
        )));
    }
    if (bytes.len() as u64) < needed {
        return Err(Failure::Input(format!(
            "--data {shown} has {} bytes: --seq {seq} needs at least {needed}; name a longer text or lower --seq",
            bytes.len()
        )));
    }
    Ok(bytes)
}

/// A document that a command takes as its argument.
pub(crate) fn document(path: &Path, expected: &str) -> Result<Vec<u8>, Failure> {
    read("file", path, DOCUMENT_BYTES_MAX, expected)
}

/// A trace.
pub(crate) fn trace(path: &Path) -> Result<Trace, Failure> {
    let bytes = document(path, "a trace (`sessile train --trace-out FILE` writes one)")?;
    sessile_plan::read_trace(&bytes).map_err(|error| {
        let packing = std::str::from_utf8(&bytes).is_ok_and(|text| sessile_plan::read_packing(text).is_ok());
        if packing {
            return about(
                path,
                "is a packing file by its columns: name it .csv, and `sessile plan` packs it",
            );
        }
        about(path, error)
    })
}

/// A message about a file.
pub(crate) fn about(path: &Path, what: impl std::fmt::Display) -> Failure {
    Failure::Input(format!("{}: {what}", path.display()))
}

/// The field that says which kind of document this is.
#[derive(Deserialize)]
struct Header {
    schema: String,
}

/// Value of the field `schema`, shortened.
pub(crate) fn schema(bytes: &[u8]) -> Result<String, serde_json::Error> {
    serde_json::from_slice::<Header>(bytes).map(|header| header.schema.chars().take(80).collect())
}

fn read(option: &str, path: &Path, limit: u64, expected: &str) -> Result<Vec<u8>, Failure> {
    let fail = |why: String| Failure::Input(format!("{option} {} {why}", path.display()));
    if path.is_dir() {
        return Err(fail(format!("is a folder: name {expected}")));
    }
    // Opening a FIFO would wait for a writer.
    if let Ok(found) = fs::metadata(path) {
        let kind = found.file_type();
        if !kind.is_file() && !special::is_character_device(kind) && special::descriptor(path).is_none() {
            let kind = special::kind_name(kind);
            return Err(fail(format!("is {kind}: name {expected} in a regular file, or /dev/stdin")));
        }
    }
    let file = File::open(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => fail(format!("does not exist: name {expected}")),
        _ => fail(format!("cannot be opened ({error}): name {expected}")),
    })?;
    let mut bytes = Vec::new();
    let read = file.take(limit + 1).read_to_end(&mut bytes);
    read.map_err(|error| fail(format!("cannot be read ({error}): name {expected}")))?;
    if bytes.len() as u64 > limit {
        return Err(fail(format!("is larger than {} MiB, the limit: name a smaller file", limit >> 20)));
    }
    Ok(bytes)
}

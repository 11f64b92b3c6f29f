//! Logs as JSON.

use std::io::Write;

use serde::Deserialize;

use super::{LOG_VERSION, Log, LogError};

/// The JSON Schema of a log.
pub const LOG_SCHEMA: &str = include_str!("../../schema/log.schema.json");

/// Largest log that is read, in bytes.
pub const MAX_LOG_BYTES: u64 = 1 << 30;

/// Read before all else, so that another file or version gets its own error and not one about a field.
#[derive(Deserialize)]
struct Header {
    schema: String,
    version: u64,
}

/// Reads a log and checks every index in it.
///
/// # Errors
/// Any [`LogError`] but [`LogError::Write`]; permanent. Nothing of a bad log is returned.
pub fn read_log(bytes: &[u8]) -> Result<Log, LogError> {
    let size = bytes.len() as u64;
    if size > MAX_LOG_BYTES {
        return Err(LogError::TooLarge { bytes: size, limit: MAX_LOG_BYTES });
    }
    let header: Header = parse(bytes)?;
    if header.schema != Log::SCHEMA {
        // The text may be as long as the file.
        let found = header.schema.chars().take(64).collect();
        return Err(LogError::Schema { found, expected: Log::SCHEMA });
    }
    if header.version != u64::from(LOG_VERSION) {
        return Err(LogError::Version { found: header.version, supported: LOG_VERSION });
    }
    let log: Log = parse(bytes)?;
    if log.ranks.is_empty() {
        return Err(LogError::NoRanks);
    }
    log.validate()?;
    Ok(log)
}

/// Writes a log as one line of JSON.
///
/// # Errors
/// [`LogError::Write`] if the writer fails.
pub fn write_log(log: &Log, out: &mut impl Write) -> Result<(), LogError> {
    let failed = |text: String| LogError::Write { text };
    serde_json::to_writer(&mut *out, log).map_err(|error| failed(error.to_string()))?;
    out.write_all(b"\n").and_then(|()| out.flush()).map_err(|error| failed(error.to_string()))
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, LogError> {
    serde_json::from_slice(bytes).map_err(|error| {
        // An unknown name may be as long as the file.
        let text = error.to_string();
        let text = if text.chars().count() > 400 {
            format!(
                "{}… at line {} column {}",
                text.chars().take(300).collect::<String>(),
                error.line(),
                error.column()
            )
        } else {
            text
        };
        LogError::Json { text }
    })
}

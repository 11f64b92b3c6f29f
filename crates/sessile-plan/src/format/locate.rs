//! Where in a document an error is: `runners[3].requests[0].shape[1]` instead of a bare line and column.

use crate::error::FormatError;

/// Bytes of text shown on each side of an error.
const NEAR_BYTES: usize = 16;
/// Parts of a path that are shown; a hostile document may nest deeper.
const PATH_PARTS_MAX: usize = 12;
/// Bytes of a key, or of a parser's message, that are shown.
const TEXT_BYTES_MAX: usize = 160;

/// Turns a parser's error into one that names the field.
pub(super) fn error(json: &[u8], error: &serde_json::Error, schema: &'static str) -> FormatError {
    let (line, column) = (error.line(), error.column());
    let at = offset(json, line, column);
    let mut problem = error.to_string();
    // The parser appends the position, which has fields of its own here.
    if let Some(end) = problem.rfind(" at line ") {
        problem.truncate(end);
    }
    at_offset(json, at, (line, column), &problem, schema)
}

/// The same for a problem that was found at a byte offset.
pub(super) fn at_offset(
    json: &[u8],
    at: usize,
    (line, column): (usize, usize),
    problem: &str,
    schema: &'static str,
) -> FormatError {
    let near = &json[at.saturating_sub(NEAR_BYTES)..(at + NEAR_BYTES).min(json.len())];
    FormatError::Json {
        line,
        column,
        field: path(&json[..at]),
        problem: clip(problem),
        near: clip(&String::from_utf8_lossy(near)),
        schema,
    }
}

/// Line and column of a byte offset, as the parser counts them.
pub(super) fn position(json: &[u8], at: usize) -> (usize, usize) {
    let before = &json[..at.min(json.len())];
    let start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
    (1 + before.iter().filter(|&&byte| byte == b'\n').count(), before.len() - start)
}

/// At most [`TEXT_BYTES_MAX`] bytes of printable text.
fn clip(text: &str) -> String {
    let mut clipped = String::new();
    for symbol in text.chars().map(|symbol| if symbol.is_control() { ' ' } else { symbol }) {
        if clipped.len() + symbol.len_utf8() > TEXT_BYTES_MAX {
            clipped.push('…');
            break;
        }
        clipped.push(symbol);
    }
    clipped
}

/// Byte offset of a position as the parser counts it: lines from 1, columns in bytes.
fn offset(json: &[u8], line: usize, column: usize) -> usize {
    let mut start = 0;
    for _ in 1..line {
        match json[start..].iter().position(|&byte| byte == b'\n') {
            Some(length) => start += length + 1,
            None => break,
        }
    }
    start.saturating_add(column).min(json.len())
}

/// One level of nesting.
enum Level<'a> {
    Object(&'a [u8]),
    Array(usize),
}

/// The path of the value that is being read where `json` breaks off.
fn path(json: &[u8]) -> String {
    let mut levels: Vec<Level<'_>> = Vec::new();
    let mut text: &[u8] = b"";
    let mut at = 0;
    while at < json.len() {
        match json[at] {
            b'{' => levels.push(Level::Object(b"")),
            b'[' => levels.push(Level::Array(0)),
            b'}' | b']' if at + 1 < json.len() => _ = levels.pop(),
            b',' => {
                if let Some(Level::Array(index)) = levels.last_mut() {
                    *index += 1;
                }
            }
            b':' => {
                if let Some(Level::Object(key)) = levels.last_mut() {
                    *key = text;
                }
            }
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
    let mut path = String::new();
    for level in levels.iter().take(PATH_PARTS_MAX) {
        match level {
            Level::Object(b"") => {}
            Level::Object(key) => {
                if !path.is_empty() {
                    path.push('.');
                }
                path.push_str(&clip(&String::from_utf8_lossy(key)));
            }
            Level::Array(index) => path.push_str(&format!("[{index}]")),
        }
    }
    if levels.len() > PATH_PARTS_MAX {
        path.push('…');
    }
    if path.is_empty() { "(document)".into() } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_keys_and_indices_up_to_the_break() {
        assert_eq!(path(br#"{"runners":[{"name":"a"},{"points":[1,2,"#), "runners[1].points[2]");
        assert_eq!(path(br#"{"a":{"b":1},"c":"x\"{[","d":-1"#), "d");
        assert_eq!(path(b"nonsense"), "(document)");
    }

    #[test]
    fn positions_beyond_the_document_stay_inside() {
        assert_eq!(offset(b"ab\ncd", 2, 1), 4);
        assert_eq!(offset(b"ab", 9, 9), 2);
        assert_eq!(offset(b"", 1, 0), 0);
    }
}

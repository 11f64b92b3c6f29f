//! The text to train on by default: the project's own documentation.

use crate::failure::Failure;

/// Compiled in, so that the program needs no files.
const TEXTS: [&str; 5] = [
    include_str!("../../../README.md"),
    include_str!("../../../docs/DESIGN.md"),
    include_str!("../../../docs/ARCHITECTURE.md"),
    include_str!("../../../CONTRIBUTING.md"),
    include_str!("../../../docs/GLOSSARY.md"),
];

/// The text, if it has the `needed` bytes for a sequence of `seq` tokens and its targets.
pub(crate) fn built_in(seq: u64, needed: u64) -> Result<Vec<u8>, Failure> {
    let text = TEXTS.concat().into_bytes();
    if (text.len() as u64) < needed {
        return Err(Failure::Input(format!(
            "--seq {seq} is longer than the built-in text of {} bytes: lower --seq or name a longer --data",
            text.len()
        )));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_long_enough_for_the_longest_sequence() {
        assert!(built_in(8192, 8192 + 18).is_ok());
    }

    #[test]
    fn the_text_is_text() {
        assert!(TEXTS.iter().all(|text| !text.is_empty() && !text.contains('\0')));
    }
}

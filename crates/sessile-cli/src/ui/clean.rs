//! Text from files, which may hold anything.

/// The text on one line, with what a terminal would obey or not show written as escapes.
pub(crate) fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '"' | '\'' | '\\' => clean.push(char),
            _ => clean.extend(char.escape_debug()),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_the_rest_is_kept() {
        assert_eq!(clean("a\u{1b}[2J\n\r\u{202e}"), r"a\u{1b}[2J\n\r\u{202e}");
        let kept = r#"/tmp/"it's" \ größe"#;
        assert_eq!(clean(kept), kept);
    }
}

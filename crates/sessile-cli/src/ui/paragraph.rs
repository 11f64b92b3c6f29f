//! Long texts beside a label.

use super::clean;

/// Columns that a line has at most, unless a word is longer.
const WIDTH: usize = 100;

/// The label, and the text beside it in lines of [`WIDTH`] columns, indented as far as the label reaches.
pub(crate) fn paragraph(label: &str, text: &str) -> String {
    let indent = label.chars().count();
    let (mut lines, mut line) = (Vec::new(), label.to_owned());
    let mut used = indent;
    for word in clean(text).split_whitespace() {
        let length = word.chars().count();
        if used > indent && used + 1 + length > WIDTH {
            lines.push(std::mem::replace(&mut line, " ".repeat(indent)));
            used = indent;
        }
        if used > indent {
            line.push(' ');
            used += 1;
        }
        line.push_str(word);
        used += length;
    }
    lines.push(line);
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_stay_beside_their_label_and_keep_all_words() {
        let text = "word ".repeat(60);
        let shown = paragraph("  label  ", &text);
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines.len() > 2 && lines.iter().all(|line| line.chars().count() <= WIDTH), "{shown}");
        assert!(lines[1..].iter().all(|line| line.starts_with("         word")), "{shown}");
        assert_eq!(shown.matches("word").count(), 60);
    }

    #[test]
    fn a_word_longer_than_a_line_is_kept() {
        let long = "x".repeat(2 * WIDTH);
        assert_eq!(paragraph("a ", &format!("b {long}")), format!("a b\n  {long}"));
    }
}

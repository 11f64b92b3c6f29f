//! Tables of numbers.

use super::clean;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

/// A line under the head and nothing else.
const STYLE: TableStyle = TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// A table with a head; all columns but the first `texts` are numbers, aligned right.
pub(crate) fn table(head: &[&str], texts: usize, rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(head.to_vec());
    for row in rows {
        table.add_row(row.iter().map(|cell| clean(cell)));
    }
    for column in table.column_iter_mut().skip(texts) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let text = table.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n")
}

/// A number with its thousands apart: `1,234,567`.
pub(crate) fn count(number: impl Into<u64>) -> String {
    let digits = number.into().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of things: `1 step`, `2 steps`.
pub(crate) fn some(number: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(number), if number == 1 { "" } else { "s" })
}

/// How many times as large as `base`: `1.86x`. Empty if there is no base.
pub(crate) fn ratio(bytes: u64, base: u64) -> String {
    if base == 0 { String::new() } else { format!("{:.2}x", bytes as f64 / base as f64) }
}

/// A duration in milliseconds.
pub(crate) fn milliseconds(duration: std::time::Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_are_apart() {
        let texts = [0_u64, 7, 999, 1000, 1_234_567, u64::MAX].map(count);
        assert_eq!(texts, ["0", "7", "999", "1,000", "1,234,567", "18,446,744,073,709,551,615"]);
    }

    #[test]
    fn one_thing_has_no_plural() {
        assert_eq!([0, 1, 2].map(|number| some(number, "step")), ["0 steps", "1 step", "2 steps"]);
    }

    #[test]
    fn numbers_are_aligned_right() {
        let text =
            table(&["what", "bytes"], 1, vec![vec!["a".into(), "1".into()], vec!["b".into(), "100".into()]]);
        assert!(text.lines().any(|line| line.ends_with("   1")), "{text}");
    }
}

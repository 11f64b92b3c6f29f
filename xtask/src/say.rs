//! The one place that prints.

/// Prints a line to stdout.
#[expect(clippy::print_stdout, reason = "the checks' output is for people at a terminal")]
pub(crate) fn say(line: &str) {
    println!("{line}");
}

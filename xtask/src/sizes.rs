//! One noun a file: source files stay short.

use anyhow::Result;

use crate::{
    say::say,
    tally::Tally,
    tree::{Source, Tree},
};

/// Lines of code to aim for.
const AIM: usize = 400;
/// Lines of code at which a file must be split.
const LIMIT: usize = 700;

/// Counts the lines of code of all files.
pub(crate) fn run(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let sources = tree.sources(&["rs", "py", "cu"])?;
    for source in &sources {
        let lines = lines_of_code(source);
        if (AIM + 1..=LIMIT).contains(&lines) {
            say(&format!("sizes: warning: {} has {lines} lines of code, aim for {AIM}", source.path));
        }
    }
    tally.findings("sizes", &check(&sources));
    Ok(())
}

fn check(sources: &[Source]) -> Vec<String> {
    let long = |source: &Source| {
        let lines = lines_of_code(source);
        let finding = format!("{} has {lines} lines of code, the limit is {LIMIT}: split it", source.path);
        (lines > LIMIT).then_some(finding)
    };
    sources.iter().filter_map(long).collect()
}

/// Lines that are neither blank nor a comment of their own.
fn lines_of_code(source: &Source) -> usize {
    let comment = if source.path.ends_with(".py") { "#" } else { "//" };
    let code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with(comment);
    source.text.lines().filter(code).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_fails_and_its_comments_do_not_count() {
        let short = Source::new("a.rs", &"// why\n\nlet a = 1;\n".repeat(LIMIT));
        let long = Source::new("b.rs", &"let a = 1;\n".repeat(LIMIT + 1));
        let findings = check(&[short, long]);
        assert_eq!(findings, ["b.rs has 701 lines of code, the limit is 700: split it"]);
    }

    #[test]
    fn comments_of_python_are_known() {
        assert_eq!(lines_of_code(&Source::new("a.py", "# why\nimport os\n#[x]\n")), 1);
        assert_eq!(lines_of_code(&Source::new("a.rs", "#[x]\nfn f() {}\n")), 2);
    }
}

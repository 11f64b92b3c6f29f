//! Each invariant names tests, and these exist.
//!
//! `docs/INVARIANTS.md` has a table with a column `Test`. Each row of it begins with an invariant's name, `I1` to `I10`,
//! and its cell `Test` holds one or more `` `path/to/file.rs::name_of_the_test` ``, paths from the root.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::{tally::Tally, tree::Tree};

const FILE: &str = "docs/INVARIANTS.md";
const COUNT: u32 = 10;

/// Checks the table against the tree.
pub(crate) fn run(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let findings = match tree.read(FILE)? {
        None => vec![format!("{FILE} does not exist")],
        Some(text) => {
            let mut files = BTreeMap::new();
            for (_, path, _) in rows(&text).iter().flat_map(|row| &row.tests) {
                if let Some(source) = tree.read(path)? {
                    files.insert(path.clone(), source);
                }
            }
            check(&text, &files)
        }
    };
    tally.findings("invariants", &findings);
    Ok(())
}

/// A row of the table.
#[derive(Debug)]
struct Row {
    invariant: String,
    /// As written, path, name.
    tests: Vec<(String, String, String)>,
    /// What stands in backticks and is no test.
    unclear: Vec<String>,
}

fn check(text: &str, files: &BTreeMap<String, String>) -> Vec<String> {
    let rows = rows(text);
    let mut findings = Vec::new();
    for number in 1..=COUNT {
        let name = format!("I{number}");
        if !rows.iter().any(|row| row.invariant == name) {
            findings.push(format!("{FILE}: no row for {name}"));
        }
    }
    for row in &rows {
        if row.tests.is_empty() && row.unclear.is_empty() {
            findings.push(format!("{FILE}: {} names no test", row.invariant));
        }
        for unclear in &row.unclear {
            findings.push(format!(
                "{FILE}: {}: `{unclear}` is not of the form `path/to/file.rs::name`",
                row.invariant
            ));
        }
        for (written, path, name) in &row.tests {
            let problem = match files.get(path) {
                None => Some("that file does not exist"),
                Some(source) => find_test(source, name).err(),
            };
            findings.extend(problem.map(|why| format!("{FILE}: {}: `{written}`: {why}", row.invariant)));
        }
    }
    findings
}

fn rows(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut column = None;
    for line in text.lines() {
        let Some(inner) = line.trim().strip_prefix('|') else {
            column = None;
            continue;
        };
        let cells: Vec<&str> = inner.trim_end_matches('|').split('|').map(str::trim).collect();
        let Some(at) = column else {
            column = cells.iter().position(|cell| cell.eq_ignore_ascii_case("test"));
            continue;
        };
        let invariant = cells[0].trim_matches(['*', '`', ' ']).to_owned();
        let numbered = invariant.strip_prefix('I').is_some_and(|n| n.parse::<u32>().is_ok());
        if !numbered {
            continue;
        }
        let mut row = Row { invariant, tests: Vec::new(), unclear: Vec::new() };
        for written in cells.get(at).copied().unwrap_or("").split('`').skip(1).step_by(2) {
            match written.rsplit_once("::") {
                Some((path, name)) if path.ends_with(".rs") || path.ends_with(".py") => {
                    row.tests.push((written.to_owned(), path.to_owned(), name.to_owned()));
                }
                _ => row.unclear.push(written.to_owned()),
            }
        }
        rows.push(row);
    }
    rows
}

/// Looks for `fn name(` below a line `#[test]`, with nothing but attributes and comments in between.
fn find_test(source: &str, name: &str) -> Result<(), &'static str> {
    let wanted = format!("fn {name}(");
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let Some(at) = lines.iter().position(|line| line.contains(&wanted) && !line.starts_with("//")) else {
        return Err("no such function in that file");
    };
    let above = lines[..at].iter().rev().take_while(|line| line.starts_with('#') || line.starts_with("//"));
    let attributes: Vec<&str> = above.copied().collect();
    if attributes.iter().any(|line| line.starts_with("#[ignore")) {
        return Err("is ignored: a test that guards an invariant must run");
    }
    if !attributes.contains(&"#[test]") {
        return Err("is no test (no #[test] above it)");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
/// Why.
#[test]
// a comment
fn good_one() {}

fn no_test() {}

#[test]
#[ignore = \"slow\"]
fn slow_one() {}
";

    fn document(test: &str) -> String {
        let mut text = String::from("# Invariants\n\n| | Statement | Test |\n|---|---|---|\n");
        for number in 1..=COUNT {
            text.push_str(&format!("| **I{number}** | that | {test} |\n"));
        }
        text
    }

    fn files() -> BTreeMap<String, String> {
        BTreeMap::from([("a/b.rs".to_owned(), SOURCE.to_owned())])
    }

    #[test]
    fn a_table_of_existing_tests_passes() {
        assert_eq!(check(&document("`a/b.rs::good_one`, `a/b.rs::good_one`"), &files()), [] as [String; 0]);
    }

    #[test]
    fn each_fault_of_a_row_is_found() {
        let cases = [
            ("", "names no test"),
            ("good_one", "names no test"),
            ("`good_one`", "is not of the form"),
            ("`a/b.rs::missing`", "no such function"),
            ("`a/c.rs::good_one`", "does not exist"),
            ("`a/b.rs::no_test`", "is no test"),
            ("`a/b.rs::slow_one`", "is ignored"),
        ];
        for (cell, why) in cases {
            let findings = check(&document(cell), &files());
            assert!(findings.len() >= COUNT as usize && findings[0].contains(why), "{cell}: {findings:?}");
        }
    }

    #[test]
    fn a_missing_row_is_found() {
        let text = document("`a/b.rs::good_one`").replace("| **I7** |", "| **J7** |");
        assert_eq!(check(&text, &files()), ["docs/INVARIANTS.md: no row for I7"]);
    }

    #[test]
    fn a_page_without_the_table_fails() {
        assert_eq!(check("# Invariants\n", &files()).len(), COUNT as usize);
    }
}

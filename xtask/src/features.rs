//! Dependencies are built with the same features whichever packages are selected, so that the program, the Python module
//! and the tests share their outputs. `crates/workspace-hack` sees to that.

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{tally::Tally, tree::Tree};

/// Packages that are built on their own, too.
const ALONE: [&str; 3] = ["sessile-cli", "sessile-python", "xtask"];

/// Compares the features of what is built on its own with those of the whole workspace.
pub(crate) fn run(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let all = list(tree, &["--workspace", "--edges", "normal,build,dev"])?;
    let mut findings = Vec::new();
    for package in ALONE {
        let alone = list(tree, &["--package", package, "--edges", "normal,build"])?;
        findings.extend(differing(&alone, &all).map(|line| {
            format!("building {package} alone takes `{line}`, the workspace has other features: ask for them in crates/workspace-hack")
        }));
    }
    tally.findings("features", &findings);
    Ok(())
}

/// Packages with their features, a line each.
fn list(tree: &Tree, selection: &[&str]) -> Result<BTreeSet<String>> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["tree", "--prefix", "none", "--format", "{p} {f}"]).args(selection);
    let output = command.current_dir(tree.root()).output().context("cannot start cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(lines(&String::from_utf8_lossy(&output.stdout)))
}

/// Lines without the marks for what was shown before.
fn lines(text: &str) -> BTreeSet<String> {
    text.lines().map(|line| line.replace(" (*)", "").replace(" (proc-macro)", "").trim().to_owned()).collect()
}

fn differing<'a>(alone: &'a BTreeSet<String>, all: &'a BTreeSet<String>) -> impl Iterator<Item = &'a String> {
    alone.difference(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_with_fewer_features_is_found_and_marks_are_not() {
        let all = lines("serde v1.0.0 alloc,std\nsyn v3.0.0 (proc-macro) full\n");
        let alone = lines("serde v1.0.0 std (*)\nsyn v3.0.0 full\n");
        assert_eq!(differing(&alone, &all).collect::<Vec<_>>(), ["serde v1.0.0 std"]);
        assert_eq!(differing(&all, &all).count(), 0);
    }
}

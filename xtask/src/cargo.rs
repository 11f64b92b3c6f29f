//! Checks that are commands of cargo.
//!
//! Everything is built with the release profile, so that the README's commands, the tests and the lints share
//! one set of build outputs.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{
    say::say,
    tally::{Counts, Tally},
    tree::Tree,
};

/// A command of the cargo that runs this program.
fn cargo(tree: &Tree, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(tree.root());
    say(&format!("$ cargo {}", arguments.join(" ")));
    command
}

fn status(tally: &mut Tally, name: &str, mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    tally.one(name, status.success());
    Ok(())
}

/// Format.
pub(crate) fn fmt(tree: &Tree, tally: &mut Tally) -> Result<()> {
    status(tally, "fmt", cargo(tree, &["fmt", "--all", "--check"]))
}

/// Lints.
pub(crate) fn lint(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let arguments =
        ["clippy", "--workspace", "--all-targets", "--release", "--quiet", "--", "-D", "warnings"];
    status(tally, "lint", cargo(tree, &arguments))
}

/// Documentation.
pub(crate) fn docs(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let mut command = cargo(tree, &["doc", "--workspace", "--no-deps", "--release", "--quiet"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    status(tally, "docs", command)
}

/// Tests. `full` sets `SESSILE_FULL=1`, which tests with a full matrix read, and runs ignored tests too.
pub(crate) fn tests(tree: &Tree, tally: &mut Tally, full: bool) -> Result<()> {
    let mut arguments = vec!["test", "--workspace", "--release", "--no-fail-fast"];
    if full {
        arguments.extend(["--", "--include-ignored"]);
    }
    let mut command = cargo(tree, &arguments);
    if full {
        command.env("SESSILE_FULL", "1");
    }
    counted(tally, "rust", command)?;

    let shuttle = ["crates/sessile-host/tests/shuttle.rs", "crates/sessile-host/tests/shuttle/main.rs"];
    if shuttle.iter().any(|path| tree.root().join(path).exists()) {
        // The whole workspace is selected, so that dependencies have the features that they are built with.
        let arguments =
            ["test", "--release", "--workspace", "--features", "sessile-host/shuttle", "--test", "shuttle"];
        counted(tally, "shuttle", cargo(tree, &arguments))?;
    }
    Ok(())
}

/// Runs `cargo test`, passes its output on and counts its results.
fn counted(tally: &mut Tally, name: &str, mut command: Command) -> Result<()> {
    // A snapshot that is missing or differs fails; nothing is written into the tree.
    command.env("INSTA_UPDATE", "no").stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let mut counts = Counts::default();
    let output = child.stdout.take().context("the child's output is a pipe")?;
    for line in BufReader::new(output).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        counts.add_line(&line);
        say(&line);
    }
    let status = child.wait()?;
    tally.tests(name, counts, status.success());
    Ok(())
}

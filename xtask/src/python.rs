//! The Python package: it installs, its tests pass.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{
    say::say,
    tally::{Counts, Tally},
    tree::Tree,
};

/// Builds and installs the package with `pip install .` into an environment of its own, then runs `python/tests`.
pub(crate) fn run(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let Some(interpreter) = interpreter() else {
        say("skipped: no python3 with venv and pip");
        return Ok(());
    };
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| tree.root().join("target"), PathBuf::from);
    let environment = target.join("python");
    let python = environment.join("bin/python");
    // One that was made before torch was installed, or by another interpreter, is of no use.
    if !python.exists() || runs(&interpreter, TORCH) != runs(&python, TORCH) {
        // Sees what the system has, so that a torch that is installed there is used.
        let arguments = ["-m", "venv", "--clear", "--system-site-packages"];
        let mut command = command(tree, &interpreter, &arguments);
        command.arg(&environment);
        if !command.status().context("cannot start python3")?.success() {
            say("skipped: python3 has no venv (Debian: python3-venv)");
            return Ok(());
        }
    }
    // Outputs of the workspace are used again.
    let mut install = command(tree, &python, &["-m", "pip", "install", "--quiet", ".", "pytest"]);
    install.env("CARGO_TARGET_DIR", &target);
    let installed = install.status().context("cannot start pip")?.success();
    tally.one("pip install .", installed);
    if !installed {
        return Ok(());
    }
    let code = "import sessile; print(sessile.__version__, sessile.doctor())";
    let imported = command(tree, &python, &["-c", code]).status()?.success();
    tally.one("import sessile", imported);

    let mut tests = command(tree, &python, &["-m", "pytest", "-q", "-p", "no:cacheprovider", "python/tests"]);
    let mut child = tests.stdout(Stdio::piped()).spawn().context("cannot start pytest")?;
    let mut counts = Counts::default();
    let output = child.stdout.take().context("the child's output is a pipe")?;
    for line in BufReader::new(output).lines() {
        let line = line?;
        add_line(&mut counts, &line);
        say(&line);
    }
    let status = child.wait()?;
    tally.tests("pytest", counts, status.success());
    Ok(())
}

fn command(tree: &Tree, program: &Path, arguments: &[&str]) -> Command {
    say(&format!("$ {} {}", program.display(), arguments.join(" ")));
    let mut command = Command::new(program);
    command.args(arguments).current_dir(tree.root());
    command
}

/// The first interpreter that has torch; else the first there is.
fn interpreter() -> Option<PathBuf> {
    let named = std::env::var_os("SESSILE_PYTHON").map(PathBuf::from);
    let known = ["python3", "/usr/bin/python3"].map(PathBuf::from);
    let candidates: Vec<PathBuf> = named.into_iter().chain(known).collect();
    let with_torch = candidates.iter().find(|python| runs(python, TORCH));
    with_torch.or_else(|| candidates.iter().find(|python| runs(python, "import venv, ensurepip"))).cloned()
}

/// What an interpreter with torch can run.
const TORCH: &str = "import torch, venv, ensurepip";

/// Whether an interpreter runs this code.
fn runs(python: &Path, code: &str) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", code]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Adds a line of the form `3 failed, 20 passed, 1 skipped in 1.25s`, and no other.
fn add_line(counts: &mut Counts, line: &str) {
    let Some((list, _)) = line.rsplit_once(" in ") else { return };
    for part in list.split(", ") {
        match part.split_once(' ') {
            Some((number, "passed")) => counts.passed += number.parse().unwrap_or(0),
            Some((number, "failed" | "error" | "errors")) => counts.failed += number.parse().unwrap_or(0),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_of_pytest_are_counted() {
        let mut counts = Counts::default();
        for line in
            ["29 passed in 3.20s", "1 failed, 2 passed, 4 skipped in 0.1s", "2 errors in 1s", "a in b"]
        {
            add_line(&mut counts, line);
        }
        assert_eq!((counts.passed, counts.failed), (31, 3));
    }
}

//! `cargo xtask CHECK`: everything that must hold before a change is good.
//!
//! Each check is a function from the working tree to findings, and has unit tests with examples that must fail.
#![forbid(unsafe_code)]

mod cargo;
mod direction;
mod features;
mod invariants;
mod python;
mod readme;
mod say;
mod sizes;
mod tally;
mod tree;

use std::process::ExitCode;

use anyhow::Result;

use crate::{say::say, tally::Tally, tree::Tree};

const USAGE: &str = "\
usage: cargo xtask CHECK

  test [--full]   all checks below; --full also runs the tests that take long
  fmt             format of the Rust sources
  lint            clippy, warnings are errors
  docs            rustdoc, warnings are errors
  features        all selections of packages build dependencies alike
  direction       which crate may name which
  invariants      each invariant names tests that exist
  sizes           length of source files
  rust [--full]   all Rust tests, and the shuttle tests of the host device
  readme          the README's commands
  python          the Python package installs and its tests pass";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (check, full) = match words.as_slice() {
        [check] => (*check, false),
        [check @ ("test" | "rust"), "--full"] => (*check, true),
        _ => ("", false),
    };
    match run(check, full) {
        Ok(Some(tally)) => {
            say(&tally.summary());
            if tally.good() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Ok(None) => {
            say(USAGE);
            ExitCode::from(2)
        }
        Err(error) => {
            say(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs one check or all; `None` for an unknown name.
fn run(check: &str, full: bool) -> Result<Option<Tally>> {
    type Check = fn(&Tree, &mut Tally, bool) -> Result<()>;
    let checks: [(&str, Check); 10] = [
        ("fmt", |tree, tally, _| cargo::fmt(tree, tally)),
        ("sizes", |tree, tally, _| sizes::run(tree, tally)),
        ("features", |tree, tally, _| features::run(tree, tally)),
        ("direction", |tree, tally, _| direction::run(tree, tally)),
        ("invariants", |tree, tally, _| invariants::run(tree, tally)),
        ("lint", |tree, tally, _| cargo::lint(tree, tally)),
        ("docs", |tree, tally, _| cargo::docs(tree, tally)),
        ("rust", cargo::tests),
        ("readme", |tree, tally, _| readme::run(tree, tally)),
        ("python", |tree, tally, _| python::run(tree, tally)),
    ];
    let tree = Tree::here()?;
    let mut tally = Tally::default();
    let mut found = false;
    for (name, run) in checks {
        if check == name || check == "test" {
            found = true;
            tally.heading(name);
            run(&tree, &mut tally, full)?;
        }
    }
    Ok(found.then_some(tally))
}

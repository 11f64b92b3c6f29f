//! Which crate may name which.
//!
//! ```text
//!  plan < hal < conformance < { host, cuda } < runtime < gtp < model < { cli, python }
//! ```
//!
//! A crate names only crates to its left. `host` and `cuda` never name each other. `runtime` and `gtp` are generic
//! over the device: they name a backend only in tests. `cudarc` is named in `sessile-cuda` alone, `torch` in
//! `python/sessile/torch` alone, and in tests and examples of it.

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    tally::Tally,
    tree::{Source, Tree},
};

/// Crates with their height; a crate names only lower ones.
const HEIGHTS: [(&str, u32); 12] = [
    ("workspace-hack", 0),
    ("sessile-plan", 0),
    ("sessile-hal", 1),
    ("sessile-conformance", 2),
    ("sessile-host", 3),
    ("sessile-cuda", 3),
    ("sessile-runtime", 4),
    ("sessile-gtp", 5),
    ("sessile-model", 6),
    ("sessile-cli", 7),
    ("sessile-python", 7),
    ("xtask", 8),
];
const BACKENDS: [&str; 2] = ["sessile-host", "sessile-cuda"];
/// Generic over the device: backends are named in their tests only.
const GENERIC: [&str; 2] = ["sessile-runtime", "sessile-gtp"];
const CUDARC_HOME: &str = "sessile-cuda";
const TORCH_HOME: &str = "python/sessile/torch";
/// Users of the package, which are no part of it.
const TORCH_USERS: [&str; 2] = ["python/tests/", "examples/"];

/// What a manifest says of a dependency.
#[derive(Debug)]
struct Dependency {
    name: String,
    /// Used by tests only.
    dev: bool,
}

/// What a manifest says.
#[derive(Debug)]
struct Package {
    name: String,
    /// Folder from the root.
    folder: String,
    dependencies: Vec<Dependency>,
}

/// Checks manifests and sources.
pub(crate) fn run(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let packages = packages(tree)?;
    let mut findings = Vec::new();
    for package in &packages {
        findings.extend(manifest(package));
    }
    for source in tree.sources(&["rs", "py", "pyi"])? {
        findings.extend(names(&packages, &source));
    }
    tally.findings("direction", &findings);
    Ok(())
}

fn packages(tree: &Tree) -> Result<Vec<Package>> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(tree.root());
    let output = command.output().context("cannot start cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let list = metadata["packages"].as_array().context("cargo metadata lists packages")?;
    list.iter().map(|package| read_package(tree, package)).collect()
}

fn read_package(tree: &Tree, package: &Value) -> Result<Package> {
    let text = |value: &Value| value.as_str().map(str::to_owned).context("cargo metadata: text expected");
    let manifest = text(&package["manifest_path"])?;
    let folder = std::path::Path::new(&manifest).parent().context("a manifest lies in a folder")?;
    let dependencies = package["dependencies"].as_array().context("cargo metadata lists dependencies")?;
    let dependencies = dependencies
        .iter()
        .map(|d| Ok(Dependency { name: text(&d["name"])?, dev: d["kind"] == "dev" }))
        .collect::<Result<_>>()?;
    Ok(Package {
        name: text(&package["name"])?,
        folder: folder.strip_prefix(tree.root())?.to_string_lossy().replace('\\', "/"),
        dependencies,
    })
}

fn height(name: &str) -> Option<u32> {
    HEIGHTS.iter().find(|(known, _)| *known == name).map(|(_, height)| *height)
}

/// Why `from` must not name `to`, if it must not.
fn refusal(from: &str, to: &str, in_tests: bool) -> Option<String> {
    if to == "cudarc" {
        return (from != CUDARC_HOME).then(|| format!("{from} names cudarc: only {CUDARC_HOME} may"));
    }
    let to_height = height(to)?;
    let from_height = height(from)?;
    if BACKENDS.contains(&from) && BACKENDS.contains(&to) && from != to {
        return Some(format!("{from} names {to}: backends do not know each other"));
    }
    if to_height >= from_height && from != to {
        return Some(format!("{from} names {to}, which is above it"));
    }
    if !in_tests && GENERIC.contains(&from) && BACKENDS.contains(&to) {
        return Some(format!(
            "{from} names the backend {to} outside its tests: it is generic over the device"
        ));
    }
    None
}

fn manifest(package: &Package) -> Vec<String> {
    let mut findings = Vec::new();
    if height(&package.name).is_none() {
        findings.push(format!("{}: no height; give it one in xtask/src/direction.rs", package.name));
    }
    for dependency in &package.dependencies {
        if dependency.name.starts_with("sessile") && height(&dependency.name).is_none() {
            findings.push(format!("{} depends on the unknown crate {}", package.name, dependency.name));
        }
        let refused = refusal(&package.name, &dependency.name, dependency.dev);
        findings.extend(refused.map(|why| format!("{}/Cargo.toml: {why}", package.folder)));
    }
    findings
}

/// Names of crates in a source file. A crate can use a dev-dependency in tests only, so the compiler sees to
/// the difference, and a source may name all that its tests may.
fn names(packages: &[Package], source: &Source) -> Vec<String> {
    let python = source.path.ends_with(".py") || source.path.ends_with(".pyi");
    if python {
        return torch(source);
    }
    let home = packages.iter().find(|p| source.path.starts_with(&format!("{}/", p.folder)));
    let Some(home) = home.filter(|p| p.name != "xtask") else { return Vec::new() };
    let mut findings = BTreeSet::new();
    for (number, line) in source.text.lines().enumerate() {
        if line.trim_start().starts_with("//") {
            continue;
        }
        for (word, path) in words(line) {
            let name = word.replace('_', "-");
            if (name == "cudarc" || height(&name).is_some()) && path && name != home.name {
                let refused = refusal(&home.name, &name, true);
                findings.extend(refused.map(|why| format!("{}:{}: {why}", source.path, number + 1)));
            }
        }
    }
    findings.into_iter().collect()
}

/// Words of a line, and whether each is used as the start of a path (`word::`) or as a whole `use word;`.
fn words(line: &str) -> Vec<(&str, bool)> {
    let word_char = |c: char| c.is_alphanumeric() || c == '_';
    let mut words = Vec::new();
    let mut rest = line;
    while let Some(start) = rest.find(word_char) {
        let from = &rest[start..];
        let end = from.find(|c| !word_char(c)).unwrap_or(from.len());
        let after = from[end..].trim_start();
        let before = rest[..start].trim_end();
        let used = line.trim_start().starts_with("use ") || line.trim_start().starts_with("extern crate ");
        let path = after.starts_with("::") || (used && !before.ends_with("::"));
        words.push((&from[..end], path));
        rest = &from[end..];
    }
    words
}

fn torch(source: &Source) -> Vec<String> {
    let home =
        source.path.starts_with(&format!("{TORCH_HOME}/")) || source.path == format!("{TORCH_HOME}.py");
    if home || TORCH_USERS.iter().any(|folder| source.path.starts_with(folder)) {
        return Vec::new();
    }
    let imports = |line: &str| {
        let module = line.trim_start().strip_prefix("import ").or(line.trim_start().strip_prefix("from "));
        module.is_some_and(|m| {
            let list = m.split(" import").next().unwrap_or(m);
            list.split(',').any(|m| m.trim().split(['.', ' ']).next() == Some("torch"))
        })
    };
    let finding = |(number, _): (usize, &str)| {
        format!("{}:{}: imports torch: only {TORCH_HOME} may", source.path, number + 1)
    };
    source.text.lines().enumerate().filter(|(_, line)| imports(line)).map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, dependencies: &[(&str, bool)]) -> Package {
        let dependency = |&(name, dev): &(&str, bool)| Dependency { name: name.to_owned(), dev };
        Package {
            name: name.to_owned(),
            folder: format!("crates/{name}"),
            dependencies: dependencies.iter().map(dependency).collect(),
        }
    }

    #[test]
    fn a_crate_may_name_what_is_below_it() {
        assert!(manifest(&package("sessile-model", &[("sessile-host", false), ("serde", false)])).is_empty());
        assert!(
            manifest(&package("sessile-runtime", &[("sessile-plan", false), ("sessile-host", true)]))
                .is_empty()
        );
    }

    #[test]
    fn a_crate_may_not_name_what_is_above_it() {
        let findings = manifest(&package("sessile-plan", &[("sessile-runtime", false)]));
        assert_eq!(
            findings,
            ["crates/sessile-plan/Cargo.toml: sessile-plan names sessile-runtime, which is above it"]
        );
        assert_eq!(manifest(&package("sessile-hal", &[("sessile-host", true)])).len(), 1);
    }

    #[test]
    fn backends_do_not_name_each_other() {
        assert_eq!(manifest(&package("sessile-host", &[("sessile-cuda", true)])).len(), 1);
        assert_eq!(manifest(&package("sessile-cuda", &[("sessile-host", false)])).len(), 1);
    }

    #[test]
    fn generic_crates_name_a_backend_in_tests_only() {
        assert_eq!(manifest(&package("sessile-gtp", &[("sessile-host", false)])).len(), 1);
        assert!(manifest(&package("sessile-gtp", &[("sessile-host", true)])).is_empty());
    }

    #[test]
    fn cudarc_stays_at_home() {
        assert!(manifest(&package("sessile-cuda", &[("cudarc", false)])).is_empty());
        assert_eq!(manifest(&package("sessile-model", &[("cudarc", false)])).len(), 1);
    }

    #[test]
    fn an_unknown_crate_is_a_finding() {
        assert_eq!(manifest(&package("sessile-new", &[])).len(), 1);
        assert_eq!(manifest(&package("sessile-cli", &[("sessile-new", false)])).len(), 1);
    }

    #[test]
    fn sources_are_read_for_names() {
        let packages = [package("sessile-plan", &[]), package("sessile-gtp", &[])];
        let source = |text| Source::new("crates/sessile-plan/src/a.rs", text);
        assert_eq!(names(&packages, &source("use sessile_hal::Stream;")).len(), 1);
        assert_eq!(names(&packages, &source("use {sessile_hal, std::fmt};")).len(), 1);
        assert_eq!(names(&packages, &source("let x = ::sessile_gtp::step();")).len(), 1);
        assert_eq!(names(&packages, &source("let x = cudarc::driver::init();")).len(), 1);
        assert!(names(&packages, &source("// sessile_hal::Stream does this")).is_empty());
        assert!(names(&packages, &source("let sessile_hal = 1;")).is_empty());
        assert!(names(&packages, &source("use sessile_plan::Trace;")).is_empty());
        let test = Source::new("crates/sessile-gtp/tests/it/a.rs", "use sessile_host::Host;");
        assert!(names(&packages, &test).is_empty());
    }

    #[test]
    fn torch_stays_at_home() {
        for line in
            ["import torch", "import os, torch", "from torch.nn import Linear", "    import torch.cuda as c"]
        {
            assert_eq!(names(&[], &Source::new("python/sessile/plan.py", line)).len(), 1, "{line}");
            assert!(names(&[], &Source::new("python/sessile/torch/a.py", line)).is_empty(), "{line}");
        }
        assert!(names(&[], &Source::new("python/sessile/plan.py", "from .torch_names import x")).is_empty());
    }
}

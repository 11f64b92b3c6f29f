//! `sessile doctor`.

use serde::Serialize;
use sessile_cuda::doctor::{Finding, State, cuda_can_run, examine};

use super::json;
use crate::{
    args::DoctorArgs,
    failure::{Failure, Verdict},
    output,
    ui::{Lines, clean, table},
};

/// The document of `--json`.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    sessile: &'static str,
    /// Whether `--device cuda` would find what it needs.
    cuda: bool,
    findings: &'a [Finding],
}

/// Looks at the machine, prints what there is and how to get the rest. What is missing is no bad verdict.
pub(super) fn run(args: &DoctorArgs) -> Result<Verdict, Failure> {
    let [file] = output::prepare([("--json", args.common.json.as_deref())], &[])?;
    let findings = examine();
    let cuda = cuda_can_run(&findings);
    if let Some(file) = file {
        let document = Document {
            schema: "sessile.doctor",
            version: 1,
            sessile: env!("CARGO_PKG_VERSION"),
            cuda,
            findings: &findings,
        };
        output::write_all(vec![(file, json(&document)?)])?;
    }
    let mut lines = Lines::new(args.common.quiet);
    let state = |finding: &Finding| match finding.state {
        State::Good => "good",
        State::Limited => "limited",
        State::Missing => "missing",
    };
    let row = |finding: &Finding| {
        let found = clean(&finding.found).to_string();
        vec![finding.name.clone(), state(finding).to_owned(), found, finding.enables.clone()]
    };
    lines.line(table(&["what", "state", "found", "needed for"], 0, findings.iter().map(row).collect()))?;
    lines.line("")?;
    for finding in findings.iter().filter(|finding| !finding.remedy.is_empty()) {
        lines.line(format_args!("{}: {}", finding.name, clean(&finding.remedy)))?;
    }
    let verdict = if cuda { "can run" } else { "can't run here" };
    lines.line(format_args!("--device host can run; --device cuda {verdict}"))?;
    Ok(Verdict::Good)
}

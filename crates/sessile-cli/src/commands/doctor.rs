//! `sessile doctor`.

use serde::Serialize;
use sessile_cuda::doctor::{Finding, State, cuda_can_run, examine};

use super::json;
use crate::{
    args::DoctorArgs,
    failure::{Failure, Verdict},
    output,
    ui::{Lines, paragraph},
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
    for finding in &findings {
        lines.line(format_args!("{}: {}", finding.name, state(finding)))?;
        lines.line(paragraph("  found       ", &finding.found))?;
        lines.line(paragraph("  needed for  ", &finding.enables))?;
        if !finding.remedy.is_empty() {
            lines.line(paragraph("  remedy      ", &finding.remedy))?;
        }
    }
    lines.line("")?;
    let verdict = if cuda { "can run" } else { "can't run here" };
    lines.line(format_args!("--device host can run; --device cuda {verdict}"))?;
    Ok(Verdict::Good)
}

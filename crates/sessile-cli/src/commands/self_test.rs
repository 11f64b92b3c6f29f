//! `sessile check --self-test`: every known fault, without sessile's rule and with it.

use serde::Serialize;

use super::{depth::refuse, json};
use crate::{
    args::CheckArgs,
    failure::{Failure, Verdict},
    museum::{self, Row},
    output,
    ui::{Lines, Progress, paragraph, some},
};

/// What `--json` writes.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    version: u32,
    good: bool,
    rows: &'a [Row],
}

/// Shows all exhibits.
pub(super) fn run(args: &CheckArgs) -> Result<Verdict, Failure> {
    refuse(&args.choices, "--self-test plans what it shows by itself: leave it out")?;
    let [json_out] = output::prepare([("--json", args.common.json.as_deref())], &[])?;
    let exhibits = museum::exhibits();
    let progress = Progress::new(args.common.quiet, exhibits.len() as u64);
    progress.phase("self-test");
    let rows = silently(|| {
        let mut rows = Vec::new();
        for (number, exhibit) in (1_u64..).zip(&exhibits) {
            rows.push(exhibit.show());
            progress.step("self-test", number, exhibit.id.to_owned());
        }
        rows
    });
    progress.end();
    let failed = rows.iter().filter(|row| !row.ok).count() as u64;
    let mut lines = Lines::new(args.common.quiet);
    for row in &rows {
        let ok = if row.ok { "ok" } else { "NOT AS EXPECTED" };
        lines.line(format_args!("{}: {ok}", row.id))?;
        lines.line(paragraph("  without the rule  ", &row.without))?;
        lines.line(paragraph("  with it           ", &row.with))?;
    }
    if failed == 0 {
        lines.line(format_args!(
            "good: {}, each shown and each prevented or detected",
            some(rows.len() as u64, "fault")
        ))?;
    } else {
        lines.line(format_args!("BAD: {} not as expected", some(failed, "fault")))?;
    }
    if let Some(file) = json_out {
        let document = Document { schema: "sessile.self-test", version: 1, good: failed == 0, rows: &rows };
        output::write_all(vec![(file, json(&document)?)])?;
    }
    Ok(Verdict::from_good(failed == 0))
}

/// Exhibits panic on purpose; what a panic says belongs into their rows.
fn silently<T>(body: impl FnOnce() -> T) -> T {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let value = body();
    std::panic::set_hook(hook);
    value
}

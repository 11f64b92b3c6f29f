//! What passed and what failed.

use std::fmt::Display;

use crate::say::say;

/// Counts of all checks and tests so far.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: u64,
    failed: u64,
    ignored: u64,
    failures: Vec<String>,
}

impl Tally {
    /// Announces a check.
    pub(crate) fn heading(&mut self, name: &str) {
        say(&format!("\n== {name}"));
    }

    /// Counts one check that passes if it has no findings, and prints those it has.
    pub(crate) fn findings<F: Display>(&mut self, name: &str, findings: &[F]) {
        for finding in findings {
            say(&format!("{name}: {finding}"));
        }
        self.one(name, findings.is_empty());
    }

    /// Counts one check.
    pub(crate) fn one(&mut self, name: &str, good: bool) {
        say(&format!("{name}: {}", if good { "ok" } else { "FAILED" }));
        if good {
            self.passed += 1;
        } else {
            self.failed += 1;
            self.failures.push(name.to_owned());
        }
    }

    /// Counts many tests of one run. That none ran is a failure; so is an exit status that the counts do not
    /// explain (a test that did not build, a crash).
    pub(crate) fn tests(&mut self, name: &str, counts: Counts, exited_well: bool) {
        self.passed += counts.passed;
        self.ignored += counts.ignored;
        let unexplained = (!exited_well && counts.failed == 0) || counts.passed + counts.failed == 0;
        self.failed += counts.failed + u64::from(unexplained);
        if counts.failed > 0 || unexplained {
            self.failures.push(format!("{name} ({} failed)", counts.failed));
        }
    }

    /// Whether nothing failed and something ran.
    pub(crate) fn good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// The closing line, after the names of what failed.
    pub(crate) fn summary(&self) -> String {
        let mut text = String::from("\n");
        for failure in &self.failures {
            text.push_str(&format!("FAILED: {failure}\n"));
        }
        text.push_str(&format!("{} passed, {} failed", self.passed, self.failed));
        if self.ignored > 0 {
            text.push_str(&format!(", {} ignored (cargo xtask test --full runs them)", self.ignored));
        }
        text
    }
}

/// Counts of one run of `cargo test`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl Counts {
    /// Adds a line of the form `test result: ok. 3 passed; 0 failed; 1 ignored; ...`, and no other.
    pub(crate) fn add_line(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for part in counts.split(';') {
            let mut words = part.split_whitespace();
            let (Some(Ok(n)), Some(what)) = (words.next().map(str::parse::<u64>), words.next()) else {
                continue;
            };
            match what {
                "passed" => self.passed += n,
                "failed" => self.failed += n,
                "ignored" => self.ignored += n,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_added_and_others_are_not() {
        let mut counts = Counts::default();
        counts.add_line(
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.0s",
        );
        counts.add_line("test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured");
        counts.add_line("test a::b ... ok");
        assert_eq!(counts, Counts { passed: 4, failed: 2, ignored: 1 });
    }

    #[test]
    fn a_run_without_tests_fails() {
        let mut tally = Tally::default();
        tally.one("x", true);
        tally.tests("none", Counts::default(), true);
        assert!(!tally.good());
    }

    #[test]
    fn a_bad_exit_without_a_failed_test_fails() {
        let mut tally = Tally::default();
        tally.tests("crash", Counts { passed: 3, ..Counts::default() }, false);
        assert!(!tally.good());
        assert_eq!(tally.summary(), "\nFAILED: crash (0 failed)\n3 passed, 1 failed");
    }

    #[test]
    fn one_finding_fails() {
        let mut tally = Tally::default();
        tally.findings("good", &[] as &[String]);
        assert!(tally.good());
        tally.findings("bad", &["this"]);
        assert!(!tally.good());
    }
}

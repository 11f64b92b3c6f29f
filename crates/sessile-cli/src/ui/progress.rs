//! How far a run is: a bar on a terminal (without a known end only its name and time), a line now and then elsewhere, nothing if quiet. Always on stderr.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::note;

/// Plain lines of a phase, about this many.
const LINES: u64 = 6;

/// Progress through a run of several phases.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    steps: u64,
}

impl Progress {
    /// For phases of `steps` steps each; 0: how many is not known.
    pub(crate) fn new(quiet: bool, steps: u64) -> Progress {
        let bar = (!quiet && stderr().is_terminal()).then(|| {
            let known = (steps > 0).then_some(steps);
            let bar = ProgressBar::with_draw_target(known, ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template(template(steps));
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "))
        });
        Progress { bar, quiet, steps }
    }

    /// A phase begins.
    pub(crate) fn phase(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_message("");
            bar.set_prefix(name.to_owned());
        }
    }

    /// Something worth knowing once.
    pub(crate) fn message(&self, message: String) {
        match &self.bar {
            Some(bar) => bar.set_message(message),
            None if !self.quiet => note(message),
            None => {}
        }
    }

    /// A step of the phase `name` has ended; steps count from 1.
    pub(crate) fn step(&self, name: &str, step: u64, message: String) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(step);
            }
            None if !self.quiet && notable(step, self.steps, LINES) => {
                note(format_args!("{name} step {step}/{}: {message}", self.steps));
            }
            None => {}
        }
    }

    /// Clears the bar.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// What a line shows of phases of `steps` steps.
fn template(steps: u64) -> &'static str {
    if steps == 0 { "{prefix} {msg} {elapsed}" } else { "{prefix:10} [{bar:30}] {pos}/{len} {msg} {eta}" }
}

/// Whether to show `step` of `steps` where about `lines` are to be shown: the first, the last, and some between.
pub(crate) fn notable(step: u64, steps: u64, lines: u64) -> bool {
    let every = steps.div_ceil(lines).max(1);
    step == 1 || step == steps || step.is_multiple_of(every)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_without_a_known_end_shows_no_full_bar() {
        assert!(!template(0).contains("{bar") && !template(0).contains("{len}"));
        assert!(template(1).contains("{bar"));
    }

    #[test]
    fn first_and_last_step_are_always_shown() {
        for steps in 1..200 {
            let shown = (1..=steps).filter(|&step| notable(step, steps, LINES)).count() as u64;
            assert!(notable(1, steps, LINES) && notable(steps, steps, LINES));
            assert!(shown <= LINES + 2, "{steps}: {shown}");
        }
    }
}

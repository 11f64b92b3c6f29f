//! The comparison as one picture: a panel of bars for each trace.

use std::fmt::Write as _;

use super::{Compared, Planned};
use crate::ui::{count, ratio};

const WIDTH: u32 = 960;
const NAME: u32 = 230;
const BAR: u32 = 440;
const ROW: u32 = 24;
const HEAD: u32 = 48;

const STYLE: &str = "
svg { background: #ffffff; font: 13px system-ui, sans-serif; }
text { fill: #1b1b1f; } .dim { fill: #5c5c66; } .head { font-weight: 600; font-size: 15px; }
.base { fill: #9aa0a6; } .own { fill: #2f6fde; } .bound { stroke: #c0392b; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
svg { background: #16181d; } text { fill: #ececf1; } .dim { fill: #a5a7b0; }
.base { fill: #5f656e; } .own { fill: #6ea0ff; } .bound { stroke: #ff7b6b; }
}";

/// An SVG of all traces.
pub(super) fn picture(traces: &[Compared]) -> String {
    let mut body = String::new();
    let mut y = 12;
    for compared in traces {
        y = panel(&mut body, compared, y);
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" viewBox=\"0 0 {WIDTH} {y}\" \
         role=\"img\" aria-label=\"Bytes of all strategies\">\n<style>{STYLE}\n</style>\n{body}</svg>\n"
    )
}

/// What one bar shows.
struct Bar<'a> {
    name: String,
    /// `None`: cannot capture.
    bytes: Option<u64>,
    own: Option<&'a Planned>,
}

fn panel(body: &mut String, compared: &Compared, top: u32) -> u32 {
    let baselines =
        compared.baselines.rows().map(|(name, bytes)| Bar { name: name.to_owned(), bytes, own: None });
    let ours =
        compared.sessile.rows().map(|(name, own)| Bar { name, bytes: Some(own.bytes), own: Some(own) });
    // One buffer a request is off the scale.
    let longest = baselines[1..].iter().chain(&ours).filter_map(|bar| bar.bytes).max().unwrap_or(1).max(1);
    let base = compared.sessile.two.bytes;
    let title = format!(
        "{} · {} requests of {} runners",
        compared.name,
        count(compared.requests),
        count(compared.runners)
    );
    text(body, 16, top + 20, "head", &title);
    text(body, 16, top + 38, "dim", "bytes of rank 0; red: lower bound; exposed communication, of a step");
    let mut y = top + HEAD;
    for bar in baselines.iter().chain(&ours) {
        text(body, 16, y + 16, "", &bar.name);
        let length =
            |bytes: u64| (u128::from(bytes.min(longest)) * u128::from(BAR) / u128::from(longest)) as u32;
        let Some(bytes) = bar.bytes else {
            text(body, NAME + 8, y + 16, "dim", "cannot capture");
            y += ROW;
            continue;
        };
        let class = if bar.own.is_some() { "own" } else { "base" };
        // Writing into a string does not fail.
        let _ = writeln!(
            body,
            "<rect class=\"{class}\" x=\"{NAME}\" y=\"{}\" width=\"{}\" height=\"{}\"/>",
            y + 3,
            length(bytes).max(1),
            ROW - 6
        );
        let mut label =
            format!("{}{} ({})", if bytes > longest { "… " } else { "" }, count(bytes), ratio(bytes, base));
        if let Some(own) = bar.own {
            let x = NAME + length(own.lower_bound_bytes);
            let _ = writeln!(
                body,
                "<line class=\"bound\" x1=\"{x}\" y1=\"{}\" x2=\"{x}\" y2=\"{}\"/>",
                y + 1,
                y + ROW - 1
            );
            label += &format!(" · {:.2} % exposed", 100.0 * own.exposed_fraction);
        }
        text(body, NAME + length(bytes) + 8, y + 16, "dim", &label);
        y += ROW;
    }
    y + 20
}

fn text(body: &mut String, x: u32, y: u32, class: &str, words: &str) {
    let mut safe = String::with_capacity(words.len());
    for letter in words.chars() {
        match letter {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            letter if letter.is_control() => safe.push(' '),
            letter => safe.push(letter),
        }
    }
    let _ = writeln!(body, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{safe}</text>");
}

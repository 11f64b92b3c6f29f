//! The rates as a picture.

use std::fmt::Write as _;

use super::document::{Document, size};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 460.0;
/// What is drawn, with its colour.
const DRAWN: [(&str, &str); 6] = [
    ("one_shot", "#c2410c"),
    ("one_shot, 16 SMs", "#f59e0b"),
    ("symmetric, 64 CTAs + add", "#1d4ed8"),
    ("ring + add", "#60a5fa"),
    ("torch mul_ + ring + add_", "#6b7280"),
    ("peer copy", "#15803d"),
];

/// Bytes that a rank receives over the time, by size, as SVG.
pub(super) fn draw(document: &Document) -> String {
    let sizes = document.sizes();
    let rate =
        |name: &str, bytes: u64| document.median(name, bytes).map(|us| document.received(bytes) / us / 1e3);
    let most = DRAWN
        .iter()
        .flat_map(|(name, _)| sizes.iter().filter_map(|bytes| rate(name, *bytes)))
        .fold(1.0, f64::max);
    let x = |at: usize| 70.0 + (WIDTH - 300.0) * at as f64 / (sizes.len().max(2) - 1) as f64;
    let y = |rate: f64| HEIGHT - 50.0 - (HEIGHT - 90.0) * rate / most;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"70\" y=\"24\">GB/s that a rank \
         receives, by bytes of the gradient; {}</text>\n",
        document.groups()
    );
    let mut put = |text: String| {
        let _ = writeln!(svg, "{text}");
    };
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let (at, end) = (y(value), WIDTH - 230.0);
        put(format!("<line x1=\"70\" x2=\"{end}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>"));
        put(format!("<text x=\"62\" y=\"{:.1}\" text-anchor=\"end\">{value:.0}</text>", at + 4.0));
    }
    for (at, bytes) in sizes.iter().enumerate() {
        let (x, y) = (x(at), HEIGHT - 30.0);
        put(format!("<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>", size(*bytes)));
    }
    for (number, (name, colour)) in DRAWN.iter().enumerate() {
        let points: Vec<String> = sizes
            .iter()
            .enumerate()
            .filter_map(|(at, bytes)| rate(name, *bytes).map(|rate| format!("{:.1},{:.1}", x(at), y(rate))))
            .collect();
        if points.is_empty() {
            continue;
        }
        let (points, at) = (points.join(" "), 60.0 + 20.0 * number as f64);
        put(format!("<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"));
        put(format!("<text x=\"{}\" y=\"{at}\" fill=\"{colour}\">{name}</text>", WIDTH - 215.0));
    }
    svg.push_str("</svg>\n");
    svg
}

//! What is told: tables and JSON.

use serde::Serialize;

use super::measure::{CALLS, Load, Row};
use crate::args::ReduceScatterArgs;

/// The machine.
#[derive(Serialize)]
pub(super) struct Machine {
    pub(super) gpus: Vec<String>,
    pub(super) driver: i32,
    pub(super) nccl: i32,
}

/// What `--json` writes.
#[derive(Serialize)]
pub(super) struct Document {
    schema: &'static str,
    version: u32,
    machine: Machine,
    ranks: u32,
    /// Ranks of a group; the groups ran at once.
    gtp: u32,
    rounds: u32,
    /// Calls of a graph.
    calls: usize,
    sizes: Vec<u64>,
    pub(super) rows: Vec<Row>,
    /// What frameworks run; null if it was not measured.
    torch: Option<Vec<Row>>,
    /// Why it was not.
    pub(super) torch_missing: Option<String>,
    /// Beside matrix products.
    load: Vec<Load>,
}

impl Document {
    pub(super) fn new(
        machine: Machine,
        args: &ReduceScatterArgs,
        rows: Vec<Row>,
        load: Vec<Load>,
        torch: Result<Vec<Row>, String>,
    ) -> Self {
        let (torch, torch_missing) = match torch {
            Ok(rows) => (Some(rows), None),
            Err(why) => (None, Some(why)),
        };
        Document {
            schema: "sessile.bench-reduce-scatter",
            version: 1,
            machine,
            ranks: args.ranks,
            gtp: args.group(),
            rounds: args.rounds,
            calls: CALLS,
            sizes: args.sizes.clone(),
            rows,
            torch,
            torch_missing,
            load,
        }
    }

    fn all(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().chain(self.torch.iter().flatten())
    }

    pub(super) fn sizes(&self) -> &[u64] {
        &self.sizes
    }

    /// Bytes that a rank gets from its peers.
    pub(super) fn received(&self, bytes: u64) -> f64 {
        received(bytes, self.gtp)
    }

    /// Who took part.
    pub(super) fn groups(&self) -> String {
        match self.ranks / self.gtp {
            1 => format!("{} ranks", self.ranks),
            groups => format!("{groups} groups of {} ranks at once", self.gtp),
        }
    }

    /// Names, each once, as measured.
    pub(super) fn variants(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for row in self.all() {
            if !names.contains(&row.variant.as_str()) {
                names.push(&row.variant);
            }
        }
        names
    }

    pub(super) fn median(&self, variant: &str, bytes: u64) -> Option<f64> {
        self.all().find(|row| row.variant == variant && row.bytes == bytes).map(|row| row.median_us)
    }

    /// Medians, a line for each variant.
    pub(super) fn times(&self) -> Vec<Vec<String>> {
        let line = |name: &&str| {
            let times = self.sizes.iter().map(|bytes| match self.median(name, *bytes) {
                Some(us) if us < 100.0 => format!("{us:.2}"),
                Some(us) => format!("{us:.1}"),
                None => String::new(),
            });
            std::iter::once((*name).to_owned()).chain(times).collect()
        };
        self.variants().iter().map(line).collect()
    }

    /// How many times as long the others take as `one_shot`, and its share of the copy engines' rate.
    pub(super) fn ratios(&self) -> Vec<Vec<String>> {
        let best = |which: &dyn Fn(&str) -> bool, bytes: u64| {
            let times =
                self.all().filter(|row| row.bytes == bytes && which(&row.variant)).map(|row| row.median_us);
            times.reduce(f64::min)
        };
        type Which = fn(&str) -> bool;
        let whose: [(&str, Which); 4] = [
            ("best NCCL + add, to one_shot", |name| !name.starts_with("torch") && name.ends_with("+ add")),
            ("best NCCL + add_ of PyTorch, to one_shot", |name| {
                name.starts_with("torch") && !name.contains("mul_")
            }),
            ("mul_ + ring + add_ of PyTorch, to one_shot", |name| name == "torch mul_ + ring + add_"),
            ("peer copy, to one_shot", |name| name == "peer copy"),
        ];
        let line = |(title, which): (&str, Which)| {
            let ratios = self.sizes.iter().map(|bytes| {
                let ours = self.median("one_shot", *bytes);
                best(&which, *bytes)
                    .zip(ours)
                    .map_or_else(String::new, |(other, ours)| format!("{:.2}", other / ours))
            });
            std::iter::once(title.to_owned()).chain(ratios).collect()
        };
        whose.into_iter().map(line).collect()
    }

    /// Beside products.
    pub(super) fn loads(&self) -> Vec<Vec<String>> {
        let percent = |with: f64, alone: f64| format!("{:+.1} %", 100.0 * (with / alone - 1.0));
        self.load
            .iter()
            .map(|load| {
                vec![
                    load.variant.clone(),
                    format!("{:.0}", load.product_us),
                    percent(load.product_us, load.product_alone_us),
                    format!("{:.0}", load.reduce_us),
                    percent(load.reduce_us, load.reduce_alone_us),
                ]
            })
            .collect()
    }
}

/// Bytes of a gradient that a rank of a group gets from the others.
pub(super) fn received(bytes: u64, group: u32) -> f64 {
    bytes as f64 * f64::from(group - 1) / f64::from(group)
}

/// A size in the largest unit that divides it.
pub(super) fn size(bytes: u64) -> String {
    for (unit, name) in [(1 << 30, "GiB"), (1 << 20, "MiB")] {
        if bytes.is_multiple_of(unit) {
            return format!("{} {name}", bytes / unit);
        }
    }
    format!("{} KiB", bytes >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::path::PathBuf;

    use crate::{args::Common, commands::bench::reduce_scatter::chart};

    fn document(torch: Result<Vec<Row>, String>) -> Document {
        let common = Common { json: None, quiet: true };
        let sizes = vec![65_536, 1 << 20];
        let python = PathBuf::from("python3");
        let args = ReduceScatterArgs {
            common,
            ranks: 8,
            gtp: Some(4),
            sizes,
            rounds: 3,
            python,
            no_torch: false,
            svg: None,
            expected: false,
            part: false,
        };
        let row = |variant: &str, bytes, median_us| Row {
            variant: variant.to_owned(),
            bytes,
            median_us,
            least_us: median_us - 0.5,
            most_us: median_us + 0.5,
            kernel: Some("one_shot_push_bf16_2".to_owned()),
            blocks: Some(19),
        };
        let rows = vec![
            row("one_shot", 65_536, 4.0),
            row("one_shot", 1 << 20, 5.0),
            row("ring + add", 65_536, 9.0),
            row("ring + add", 1 << 20, 14.0),
            row("symmetric + add", 1 << 20, 12.5),
        ];
        let load = Load {
            variant: "one_shot".to_owned(),
            bytes: 64 << 20,
            product_alone_us: 100.0,
            product_us: 125.0,
            reduce_alone_us: 50.0,
            reduce_us: 130.0,
        };
        let machine = Machine { gpus: vec!["a GPU".to_owned(); 8], driver: 13_000, nccl: 22_809 };
        Document::new(machine, &args, rows, vec![load], torch)
    }

    #[test]
    fn tables_compare_with_the_best_that_does_the_same_work() {
        let document = document(Err("no torch".to_owned()));
        assert_eq!(document.times()[2], ["symmetric + add", "", "12.50"]);
        assert_eq!(document.ratios()[0], ["best NCCL + add, to one_shot", "2.25", "2.50"]);
        assert_eq!(document.ratios()[1][1..], ["", ""]);
        assert_eq!(document.loads(), [["one_shot", "125", "+25.0 %", "130", "+160.0 %"]]);
    }

    #[test]
    fn documents_are_what_the_schema_says() {
        let schema = include_str!("../../../../schema/bench-reduce-scatter.schema.json");
        let schema: serde_json::Value = serde_json::from_str(schema).expect("JSON");
        let validator = jsonschema::validator_for(&schema).expect("schema");
        for torch in [Err("no torch".to_owned()), Ok(document(Err(String::new())).rows)] {
            let document = serde_json::to_value(document(torch)).expect("JSON");
            let errors: Vec<String> = validator
                .iter_errors(&document)
                .map(|error| format!("{}: {error}", error.instance_path()))
                .collect();
            assert!(errors.is_empty(), "{errors:#?}");
        }
    }

    #[test]
    fn the_chart_has_a_line_for_each_variant_that_was_measured() {
        let svg = chart::draw(&document(Err(String::new())));
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(
            svg.contains("1 MiB") && svg.contains("2 groups of 4 ranks at once") && svg.ends_with("</svg>\n")
        );
        // 3 of 4 parts of 1 MiB in 5 us, the most there is: at the top.
        assert!(svg.contains(">157</text>") && svg.contains(",40.0\""), "{svg}");
    }

    #[test]
    fn sizes_are_told_in_their_unit() {
        assert_eq!([65_536, 1 << 20, 3 << 19, 1 << 30].map(size), ["64 KiB", "1 MiB", "1536 KiB", "1 GiB"]);
    }
}

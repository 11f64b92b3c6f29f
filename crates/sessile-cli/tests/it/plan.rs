//! `plan` and `compare` on a small trace.

use std::{
    io::Read,
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{
    sandbox::{Sandbox, program},
    schema::validate,
};

#[test]
fn the_tables_of_a_plan() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!("plan_depth_2", sandbox.run("plan trace.json").good());
    insta::assert_snapshot!("plan_per_request", sandbox.run("plan trace.json --strategy per-request").good());
    assert_eq!(sandbox.names(), ["trace.json"]);
}

#[test]
fn an_explanation_names_the_peak_what_would_need_fewer_bytes_and_how_groups_reduce() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!("plan_explain", sandbox.run("plan trace.json --explain").good());
}

#[test]
fn the_table_of_a_comparison() {
    let sandbox = Sandbox::new();
    insta::with_settings!({filters => vec![(r"\d+\.\d{3}$", "[ms]"), (r"(?m) +\d+\.\d{3}$", " [ms]")]}, {
        insta::assert_snapshot!("compare", sandbox.run("compare trace.json").good());
    });
}

#[test]
fn a_comparison_holds_every_trace_in_order() {
    let sandbox = Sandbox::new();
    sandbox.write("other.json", sandbox.read("trace.json").replace("two layers", "other"));
    sandbox.run("compare trace.json other.json --json c.json --quiet").good();
    let document: Value = serde_json::from_str(&sandbox.read("c.json")).unwrap();
    let names: Vec<&Value> = document["traces"].as_array().unwrap().iter().map(|t| &t["name"]).collect();
    assert_eq!(names, ["two layers", "other"]);
    for trace in document["traces"].as_array().unwrap() {
        assert_eq!(trace["durations"], "modelled");
        for (depth, by_group) in [("1", false), ("2", false), ("3", false), ("auto", true)] {
            assert_eq!(trace["sessile"][depth]["by_group"], by_group, "{depth}");
            let exposed = trace["sessile"][depth]["exposed_fraction"].as_f64().unwrap();
            assert!((0.0..1.0).contains(&exposed), "{exposed}");
            let depths = trace["sessile"][depth]["depth"].as_object().unwrap();
            assert!(!depths.is_empty() && depths.values().all(|depth| depth.as_u64().is_some()));
        }
        for depth in ["1", "2", "3"] {
            let ours = trace["sessile"][depth]["bytes"].as_u64().unwrap();
            let theirs = trace["baselines"][format!("generations:{depth}")].as_u64().unwrap();
            assert!(ours <= theirs, "depth {depth}: {ours} > {theirs}");
            assert!(trace["sessile"][depth]["lower_bound_bytes"].as_u64().unwrap() <= ours);
        }
    }
}

#[test]
fn a_plan_is_written_twice_to_the_same_bytes() {
    let sandbox = Sandbox::new();
    sandbox.run("plan trace.json --depth 3 --step-cut wrap --out a.json").good();
    sandbox.run("plan trace.json --depth 3 --step-cut wrap --out b.json --quiet").good();
    assert_eq!(sandbox.read("a.json"), sandbox.read("b.json"));
    assert!(sandbox.read("a.json").contains("\"sessile.plan\""));
}

#[test]
fn more_rows_are_shown_on_request_only() {
    let sandbox = Sandbox::new();
    let mut trace: Value = serde_json::from_str(&sandbox.read("trace.json")).unwrap();
    let runners = trace["runners"].as_array_mut().unwrap();
    let mut more = runners.clone();
    for runner in &mut more {
        runner["name"] = format!("again.{}", runner["name"].as_str().unwrap()).into();
        runner["points"] = Value::Array(Vec::new());
        for request in runner["requests"].as_array_mut().unwrap() {
            request["id"] = (request["id"].as_u64().unwrap() + 100).into();
        }
    }
    runners.extend(more);
    trace["steps"] = Value::Array(vec![(0..8).collect()]);
    sandbox.write("long.json", trace.to_string());
    let short = sandbox.run("plan long.json").good();
    assert!(short.contains("and 4 more views: --all shows them"), "{short}");
    let all = sandbox.run("plan long.json --all").good();
    assert!(!all.contains("more views") && all.len() > short.len());
}

#[test]
fn quiet_prints_nothing() {
    let sandbox = Sandbox::new();
    let ran = sandbox.run("plan trace.json --quiet");
    assert_eq!((ran.code, ran.stdout.as_str(), ran.stderr.as_str()), (0, "", ""));
}

#[test]
fn a_reader_that_goes_away_is_no_fault() {
    let sandbox = Sandbox::new();
    let mut child = Command::new(program())
        .args(["plan", "trace.json", "--all"])
        .current_dir(sandbox.path("."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{stderr}");
    assert_eq!(stderr, "");
}

#[test]
fn a_packing_file_is_packed_and_a_plan_is_written_as_one() {
    let sandbox = Sandbox::new();
    sandbox.write("new.csv", "id,lower,upper,size,alignment\na,0,2,4,\nb,1,3,8,8\nc,2,4,4,\n");
    sandbox.write("old.CSV", "id,start,end,size,alignment\na,0,1,4,\nb,1,2,8,8\nc,2,3,4,\n");
    insta::with_settings!({filters => vec![(r"\d+\.\d{3} ms", "[ms]")]}, {
        insta::assert_snapshot!("packing", sandbox.run("plan new.csv --capacity 12").good());
    });
    for (file, capacity, fits) in [("new.csv", 12, true), ("old.CSV", 11, false)] {
        let ran = sandbox.run(&format!("plan {file} --capacity {capacity} --json p.json --csv p.csv -q"));
        assert_eq!(ran.code, i32::from(!fits), "{}", ran.stderr);
        validate(&sandbox.read("p.json"), "packing.schema.json");
        let document: Value = serde_json::from_str(&sandbox.read("p.json")).unwrap();
        assert_eq!((&document["bytes"], &document["fits"]), (&12.into(), &fits.into()));
        assert_eq!(document["lower_bound_bytes"], 12);
        assert_eq!(document["offsets"].as_object().unwrap().len(), 3);
        assert_eq!(sandbox.read("p.csv").lines().count(), 4);
    }
    sandbox.run("plan new.csv --json p.json -q").good();
    validate(&sandbox.read("p.json"), "packing.schema.json");
    sandbox.run("plan trace.json --csv t.csv -q").good();
    assert_eq!(sandbox.read("t.csv").lines().count(), 13);
    for (file, blocks) in [("p.csv", 3), ("t.csv", 12)] {
        sandbox.run(&format!("plan {file} --json r.json --csv again.csv -q")).good();
        validate(&sandbox.read("r.json"), "packing.schema.json");
        let document: Value = serde_json::from_str(&sandbox.read("r.json")).unwrap();
        assert_eq!(document["blocks"], blocks, "what was written is read");
        sandbox.run("plan again.csv -q").good();
    }
    assert!(sandbox.run("plan t.csv").good().contains("arena"));
}

#[test]
fn what_a_packing_file_can_not_mean_is_bad_input_with_line_and_column() {
    let sandbox = Sandbox::new();
    sandbox.write("bad.csv", "id,lower,upper,size\na,0,2,4\nb,1,x,8\n");
    sandbox.write("good.csv", "id,lower,upper,size\na,0,2,4\n");
    sandbox.write("good", "id,lower,upper,size\na,0,2,4\n");
    sandbox.write("bytes.csv", b"id,lower,upper,size\n\xff,0,1,4\n");
    let cases = [
        ("plan bad.csv --json p.json", "line 3, column `upper` is `x`"),
        ("plan bytes.csv", "utf-8"),
        ("plan none.csv", "does not exist"),
        ("plan good.csv --explain", "--explain"),
        ("plan good.csv --out p.json", "--out"),
        ("plan good.csv --json good.csv", "is read"),
        ("plan good.csv --capacity -1", "whole number"),
        ("plan good.csv --depth auto", "--depth: good.csv is a packing file"),
        ("plan good.csv --depth-group a=2", "--depth-group: good.csv"),
        ("plan good.csv --memory-limit 5", "--memory-limit: good.csv"),
        ("plan good.csv --strategy sessile", "--strategy: good.csv"),
        ("plan good.csv --step-cut wrap", "--step-cut: good.csv"),
        ("plan good.csv --overlap off", "--overlap: good.csv"),
        ("plan good.csv --capacity 0", "use 1 or more"),
        ("plan good.csv --timeline t.json", "no runners"),
        ("plan good", "name it .csv"),
        ("plan trace.json --capacity 5", "packing files"),
    ];
    for (line, expected) in cases {
        let ran = sandbox.run(line);
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line}: {}", ran.stderr);
        assert_eq!(ran.stdout, "", "{line}");
    }
    assert_eq!(sandbox.names(), ["bad.csv", "bytes.csv", "good", "good.csv", "trace.json"]);
}

#[test]
fn depths_are_chosen_and_the_table_is_part_of_the_plan() {
    let sandbox = Sandbox::new();
    insta::assert_snapshot!("plan_auto", sandbox.run("plan trace.json --depth auto").good());
    sandbox.run("plan trace.json --depth auto --json p.json -q").good();
    validate(&sandbox.read("p.json"), "plan-report.schema.json");
    let document: Value = serde_json::from_str(&sandbox.read("p.json")).unwrap();
    let rows = document["auto"]["candidates"].as_array().unwrap();
    let chosen: Vec<&Value> = rows.iter().filter(|row| row["chosen"] == true).collect();
    assert_eq!((rows.len(), chosen.len()), (3, 1));
    assert_eq!(chosen[0]["bytes"], document["bytes"]);
    let least = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).min().unwrap();
    sandbox.run(&format!("plan trace.json --depth auto --memory-limit {least} --json q.json -q")).good();
    let tight: Value = serde_json::from_str(&sandbox.read("q.json")).unwrap();
    assert_eq!(tight["bytes"], least);
    sandbox.run("report p.json --trace trace.json -o r.html -q").good();
    for (line, expected) in [
        (format!("plan trace.json --depth auto --memory-limit {}", least - 1), "in the way are"),
        ("plan trace.json --memory-limit 5".to_owned(), "--depth auto"),
        ("check trace.json --depth none".to_owned(), "or auto"),
        ("train --memory-limit 5".to_owned(), "--depth auto"),
        ("train --depth auto --schedule-seed 1".to_owned(), "no clock"),
    ] {
        let ran = sandbox.run(&line);
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line}: {}", ran.stderr);
    }
}

#[test]
fn what_is_in_the_way_of_a_limit_is_the_peak_and_remedies_are_those_that_apply() {
    let sandbox = Sandbox::new();
    let request = |id: u32, weight: &str, rows: u64, dtype: &str| {
        let shape = [rows, 256];
        serde_json::json!({ "id": id, "weight": weight, "role": "wgrad_input", "dtype": dtype, "shape": shape,
            "unsharded_shape": shape, "domain": "default", "group": "dense" })
    };
    // The largest request is alone in its runner; two smaller ones need more together.
    let trace = |dtype| {
        let runner = |name, requests| serde_json::json!({ "name": name, "requests": requests, "points": [] });
        let small = vec![request(1, "left", 300, dtype), request(2, "right", 300, dtype)];
        let runners = vec![runner("a", vec![request(0, "large", 400, dtype)]), runner("b", small)];
        serde_json::json!({ "schema": "sessile.trace", "version": 1, "name": "peak", "runners": runners,
            "steps": [[0, 1]] })
    };
    for (dtype, bytes, remedy) in [
        ("bf16", 307_200, "raise the limit\n"),
        ("f32", 614_400, "raise the limit, or use --wgrad-dtype bf16\n"),
    ] {
        sandbox.write("peak.json", trace(dtype).to_string());
        let ran = sandbox.run("plan peak.json --depth auto --memory-limit 5");
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{ran:?}");
        assert!(ran.stderr.contains(&format!("the smallest plan takes {bytes} bytes (dense 1)")), "{ran:?}");
        assert!(ran.stderr.contains("in the way are left wgrad_input"), "{ran:?}");
        assert!(ran.stderr.contains("right wgrad_input") && !ran.stderr.contains("large"), "{ran:?}");
        assert!(ran.stderr.ends_with(remedy), "{ran:?}");
    }
}

#[test]
fn a_comparison_is_drawn() {
    let sandbox = Sandbox::new();
    sandbox.write("odd.json", sandbox.read("trace.json").replace("two layers", "<two> & more"));
    sandbox.run("compare trace.json odd.json --svg c.svg --json c.json -q").good();
    let (svg, json) = (sandbox.read("c.svg"), sandbox.read("c.json"));
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("&lt;two&gt; &amp; more") && !svg.contains("<two>"));
    let document: Value = serde_json::from_str(&json).unwrap();
    for trace in document["traces"].as_array().unwrap() {
        for depth in ["1", "2", "3", "auto"] {
            let bytes = trace["sessile"][depth]["bytes"].as_u64().unwrap().to_string();
            let tail = &bytes[bytes.len() - 3..];
            assert!(
                svg.contains(&format!("{},{tail} (", &bytes[..bytes.len() - 3])),
                "{bytes} in the picture"
            );
        }
    }
}

//! `report`: the page holds the numbers of the documents it was made from, and a browser shows them.

use std::{collections::BTreeMap, path::PathBuf, process::Command, time::Instant};

use serde_json::Value;

use crate::sandbox::Sandbox;

/// The JSON inside a page.
fn inside(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"data\">").expect("has data");
    let (data, _) = rest.split_once("</script>").expect("ends");
    serde_json::from_str(data).expect("is JSON")
}

fn document(sandbox: &Sandbox, name: &str) -> Value {
    serde_json::from_str(&sandbox.read(name)).unwrap()
}

/// A run and its report.
fn reported() -> (Sandbox, Value, String) {
    let sandbox = Sandbox::new();
    sandbox.run("train --steps 6 --layers 2 --hidden 48 --json run.json --trace-out t.json -q").good();
    sandbox.run("report run.json -o report.html").good();
    let run = document(&sandbox, "run.json");
    let page = sandbox.read("report.html");
    (sandbox, run, page)
}

#[test]
fn the_page_holds_the_numbers_of_the_run_and_nothing_from_elsewhere() {
    let (sandbox, run, page) = reported();
    let data = inside(&page);
    let memory: BTreeMap<&str, &Value> = data["memory"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["name"].as_str().unwrap(), &row["bytes"]))
        .collect();
    assert_eq!(memory["this plan (sessile)"], &run["memory"]["arena_bytes"]);
    assert_eq!(memory["lower bound"], &run["memory"]["lower_bound_bytes"]);
    assert_eq!(memory["generations:2"], &run["memory"]["generations_bytes"]["2"]);
    assert_eq!(memory["ring:2"], &run["memory"]["ring2_bytes"]);
    assert_eq!(memory["per-request"], &run["memory"]["per_request_bytes"]);
    assert_eq!(data["fences"].as_array().unwrap().len() as u64, run["fences"].as_u64().unwrap());
    assert_eq!(
        data["requests"].as_array().unwrap().len() as u64,
        run["memory"]["requests"].as_u64().unwrap()
    );
    for (shown, step) in data["run"]["steps"].as_array().unwrap().iter().zip(run["steps"].as_array().unwrap())
    {
        assert_eq!(shown["eager"], step["eager"]["loss"]);
        assert_eq!(shown["graphs"], step["graphs"]["loss"]);
    }
    assert_eq!(data["run"]["operations"], run["checker"]["operations"]);
    assert_eq!(data["run"]["violations"], run["checker"]["violations"]);
    assert_eq!(data["findings"].as_array().unwrap().len(), 0);
    let lives =
        data["requests"].as_array().unwrap().iter().flat_map(|request| request["lives"].as_array().unwrap());
    assert!(lives.clone().count() > 0);
    for life in lives {
        assert!(life[0].as_f64().unwrap() < life[1].as_f64().unwrap(), "{life}");
    }
    for word in ["http://", "https://", "src=", "@import", "url(", "fetch(", "XMLHttpRequest"] {
        assert!(!page.contains(word), "{word}");
    }
    sandbox.run("report run.json -o again.html -q").good();
    assert_eq!(sandbox.read("again.html"), page, "the same bytes each time");
}

#[test]
fn plans_and_traces_are_reported_with_and_without_names() {
    let sandbox = Sandbox::new();
    sandbox.run("plan trace.json --out plan.json --json report.json -q").good();
    sandbox.run("report plan.json -o bare.html -q").good();
    sandbox.run("report plan.json --trace trace.json -o named.html -q").good();
    sandbox.run("report report.json --trace trace.json -o inner.html -q").good();
    sandbox.run("report trace.json -o planned.html -q").good();
    let bytes = document(&sandbox, "plan.json")["arenas"][0]["bytes"].clone();
    for name in ["bare.html", "named.html", "inner.html", "planned.html"] {
        let data = inside(&sandbox.read(name));
        assert_eq!(data["arenas"][0]["bytes"], bytes, "{name}");
        assert_eq!(data["launches"].is_null(), name == "bare.html", "{name}");
    }
}

#[test]
fn the_table_of_depths_comes_from_a_simulation() {
    let sandbox = Sandbox::new();
    sandbox.run("simulate --model nemotron4-quarter --depth auto --json s.json --trace-out t.json -q").good();
    let simulated = document(&sandbox, "s.json");
    let known = simulated["auto"]["candidates"].as_array().unwrap();
    for depth in 1..=3 {
        sandbox.run(&format!("report t.json --simulation s.json --depth {depth} -o r.html -q")).good();
        let data = inside(&sandbox.read("r.html"));
        let shown = data["depths"].as_array().unwrap();
        assert_eq!(shown.len(), known.len());
        for (shown, known) in shown.iter().zip(known) {
            for field in ["bytes", "lower_bound_bytes", "fences", "exposed_fraction"] {
                assert_eq!(shown[field], known[field], "{field}");
            }
            // The mark is on the plan that the page draws, whatever the simulation chose.
            assert_eq!(shown["shown"], known["depth"]["dense"] == depth);
            assert!(shown["shown"] == false || shown["bytes"] == data["bytes"]);
        }
    }
    let foreign = sandbox.run("report trace.json --simulation s.json -o f.html");
    assert_eq!((foreign.code, foreign.stdout.as_str()), (2, ""), "{foreign:?}");
    assert!(
        foreign.stderr.contains("s.json") && foreign.stderr.contains("is of another trace"),
        "{foreign:?}"
    );
    assert!(!sandbox.names().contains(&"f.html".to_owned()));
}

#[test]
fn what_cannot_be_reported_is_bad_input() {
    let sandbox = Sandbox::new();
    sandbox.write("other.json", sandbox.read("trace.json").replace("two layers", "</script><b>"));
    sandbox.run("plan trace.json --out plan.json -q").good();
    sandbox.write("far.json", sandbox.read("trace.json").replacen("mlp.1.down", "mlp.1.out", 1));
    let cases = [
        ("report plan.json --trace far.json -o r.html", "another trace"),
        ("report absent.json -o r.html", "does not exist"),
        ("report trace.json -o trace.json", "is read"),
        ("report plan.json --depth 3 -o r.html", "--depth: plan.json holds its plan"),
        ("report trace.json --trace far.json -o r.html", "--trace is for a plan"),
        ("report trace.json --depth-group nope=1 -o r.html", "name gtp0"),
        ("report trace.json --simulation plan.json -o r.html", "simulate --depth auto"),
    ];
    for (line, expected) in cases {
        let ran = sandbox.run(line);
        assert_eq!(ran.code, 2, "{line}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{line}: {}", ran.stderr);
    }
    assert!(!sandbox.names().contains(&"r.html".to_owned()));
    sandbox.run("report other.json -o r.html -q").good();
    let page = sandbox.read("r.html");
    assert!(!page.contains("<b>"), "a name cannot end the script");
    assert_eq!(inside(&page)["title"], "</script><b>");
}

/// A headless browser, or why there is none.
fn browser() -> Result<PathBuf, String> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path)
        .find_map(|folder| names.iter().map(|name| folder.join(name)).find(|program| program.is_file()));
    found.ok_or_else(|| format!("skipped: none of {} is installed", names.join(", ")))
}

/// The page as the browser has built it, and the milliseconds its script took.
fn shown(sandbox: &Sandbox, browser: &std::path::Path, page: &str) -> (String, u64) {
    let profile = sandbox.path("profile");
    let output = Command::new(browser)
        .args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--window-size=1300,1000",
        ])
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(["--timeout=20000", "--dump-dom"])
        .arg(format!("file://{}", sandbox.path(page).display()))
        .output()
        .expect("the browser starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (_, rest) = text
        .split_once("data-ready=\"")
        .unwrap_or_else(|| panic!("the script did not end: {}", String::from_utf8_lossy(&output.stderr)));
    let millis = rest.split('"').next().and_then(|number| number.parse().ok()).expect("a number");
    (text, millis)
}

/// `data-name` and `data-value` of every cell.
fn cells(page: &str) -> BTreeMap<String, String> {
    let attribute = |tag: &str, name: &str| {
        let (_, rest) = tag.split_once(&format!("{name}=\""))?;
        Some(rest.split('"').next()?.to_owned())
    };
    let tags = page.split('<').filter(|tag| tag.starts_with("td"));
    tags.filter_map(|tag| Some((attribute(tag, "data-name")?, attribute(tag, "data-value")?))).collect()
}

#[test]
#[allow(clippy::print_stderr, reason = "why the test is skipped")]
fn a_browser_shows_the_numbers_of_the_run() {
    let browser = match browser() {
        Ok(browser) => browser,
        Err(why) => return eprintln!("{why}"),
    };
    let (sandbox, run, _) = reported();
    let (page, _) = shown(&sandbox, &browser, "report.html");
    let cells = cells(&page);
    let expected = [
        ("this plan (sessile)", &run["memory"]["arena_bytes"]),
        ("lower bound", &run["memory"]["lower_bound_bytes"]),
        ("generations:1", &run["memory"]["generations_bytes"]["1"]),
        ("generations:2", &run["memory"]["generations_bytes"]["2"]),
        ("generations:3", &run["memory"]["generations_bytes"]["3"]),
        ("per-request", &run["memory"]["per_request_bytes"]),
        ("depth 2", &run["memory"]["arena_bytes"]),
        ("graph launches", &run["replays"]),
        ("launches outside the sealed order", &run["order_deviations"]),
    ];
    for (name, value) in expected {
        assert_eq!(cells.get(name), Some(&value.to_string()), "{name} in {cells:?}");
    }
    let checker = format!("happens-before checker, of {}", "");
    let violations = cells.iter().find(|(name, _)| name.starts_with(&checker)).expect("is shown");
    assert_eq!(*violations.1, run["checker"]["violations"].to_string());
}

#[test]
#[allow(clippy::print_stderr, reason = "why the test is skipped")]
fn a_plan_of_ten_thousand_requests_opens_in_two_seconds() {
    let browser = match browser() {
        Ok(browser) => browser,
        Err(why) => return eprintln!("{why}"),
    };
    let sandbox = Sandbox::new();
    let weights: Vec<String> = (0..4)
        .map(|at| format!("{{ name = \"w{at}\", rows = {}, cols = {} }}", 512 * (at + 1), 1024 - 128 * at))
        .collect();
    let model = format!(
        "name = \"many\"\ntokens = 128\n[[groups]]\nname = \"dense\"\nsize = 8\n[[layers]]\ncount = 1250\n\
         [[layers.modules]]\nname = \"m\"\nweights = [{}]\n",
        weights.join(", ")
    );
    sandbox.write("many.toml", model);
    sandbox.run("simulate --model many.toml --trace-out t.json -q").good();
    sandbox.run("report t.json -o r.html -q").good();
    assert_eq!(inside(&sandbox.read("r.html"))["requests"].as_array().unwrap().len(), 10_000);
    let begun = Instant::now();
    let (_, millis) = shown(&sandbox, &browser, "r.html");
    eprintln!("script {millis} ms, browser start to end {} ms", begun.elapsed().as_millis());
    assert!(millis < 2_000, "{millis} ms");
}

//! `doctor`.

use serde_json::Value;

use crate::sandbox::Sandbox;

#[test]
fn doctor_prints_all_that_its_document_says() {
    let sandbox = Sandbox::new();
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = words(&sandbox.run("doctor --json doctor.json").good());
    let document: Value = serde_json::from_str(&sandbox.read("doctor.json")).unwrap();
    let findings = document["findings"].as_array().unwrap();
    assert!(findings.len() >= 5, "{document}");
    for finding in findings {
        for field in ["name", "state", "found", "enables", "remedy"] {
            let said = words(finding[field].as_str().unwrap());
            assert!(text.contains(&said), "{said}:\n{text}");
        }
    }
}

//! The reader meets input that nobody vouches for: it never panics, and what it takes is valid.

use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use sessile_plan::{
    FormatError, PlanOptions, check_trace, plan, read_plan, read_trace, validate, write_plan, write_trace,
};

use crate::support::four;

fn runner(cases: u32) -> TestRunner {
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let rng = proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, rng)
}

/// Reads, and uses what was read.
fn feed(bytes: &[u8]) -> Result<bool, TestCaseError> {
    let mut taken = false;
    if let Ok(trace) = read_trace(bytes) {
        taken = true;
        prop_assert_eq!(check_trace(&trace), Ok(()));
        if trace.steps[0].len() < 64 {
            let made =
                plan(&trace, &PlanOptions::default()).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let found = validate(&trace, &made);
            prop_assert!(found.is_empty(), "{:?}", found);
        }
    }
    if let Ok(plan) = read_plan(bytes) {
        taken = true;
        prop_assert_eq!(read_plan(write_plan(&plan).as_bytes()), Ok(plan.clone()));
        // A plan of another trace is a finding, not a panic.
        prop_assert!(plan.bytes() >= plan.lower_bound_bytes());
        _ = validate(&four(), &plan);
    }
    Ok(taken)
}

#[test]
fn arbitrary_bytes_are_read_or_refused() {
    runner(20_000)
        .run(&vec(any::<u8>(), 0..300), |bytes| {
            prop_assert!(!feed(&bytes)?);
            Ok(())
        })
        .unwrap();
}

/// Valid documents with a few bytes changed, inserted, removed or doubled.
#[test]
fn damaged_documents_are_read_or_refused() {
    let trace = write_trace(&four());
    let plan = write_plan(&plan(&four(), &PlanOptions::default()).unwrap());
    let taken = std::cell::Cell::new(0u32);
    let alphabet = b"0123456789-+.eE\"\\{}[],: ntru\x00\xff";
    let damage = (0..10_000usize, 0..4u8, 0..alphabet.len());
    runner(60_000)
        .run(&(prop::bool::ANY, vec(damage, 1..4)), |(which, damages)| {
            let mut bytes = if which { &trace } else { &plan }.clone().into_bytes();
            for (at, kind, letter) in damages {
                if bytes.is_empty() {
                    break;
                }
                let at = at % bytes.len();
                match kind {
                    0 => bytes[at] = alphabet[letter],
                    1 => bytes.insert(at, alphabet[letter]),
                    2 => _ = bytes.remove(at),
                    _ => bytes.truncate(at),
                }
            }
            taken.set(taken.get() + u32::from(feed(&bytes)?));
            Ok(())
        })
        .unwrap();
    eprintln!("{} of 60000 damaged documents are still valid", taken.get());
    assert!(taken.get() > 100, "the damage never leaves a valid document: {}", taken.get());
}

#[test]
fn every_prefix_of_a_document_is_refused() {
    let json = write_trace(&four());
    let body = json.trim_end().len();
    for length in 0..body {
        assert!(matches!(read_trace(&json.as_bytes()[..length]), Err(FormatError::Json { .. })), "{length}");
    }
    assert!(read_trace(&json.as_bytes()[..body]).is_ok());
}

#[test]
fn deep_nesting_is_refused() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let deep = open.repeat(1_000_000);
        assert!(matches!(read_trace(deep.as_bytes()), Err(FormatError::Json { .. })));
        let inside = format!(
            "{{\"schema\":\"sessile.trace\",\"version\":1,\"name\":{}1{},\"runners\":[],\"steps\":[]}}",
            open.repeat(100_000),
            close.repeat(100_000)
        );
        assert!(matches!(read_trace(inside.as_bytes()), Err(FormatError::Json { .. })));
    }
}

/// Lists far beyond their limits stop while they are read, not after.
#[test]
fn long_lists_are_refused_while_they_are_read() {
    let head = "{\"schema\":\"sessile.trace\",\"version\":1,\"name\":\"\",\"runners\":[],\"steps\":[[0";
    let long = format!("{head}{}]]}}", ",0".repeat(5_000_000));
    let Err(FormatError::Json { problem, column, .. }) = read_trace(long.as_bytes()) else {
        panic!("five million launches were read");
    };
    assert_eq!(problem, "more than 1048576 items, which is the limit");
    assert!(column < 3_000_000, "read on to column {column}");
}

#[test]
fn a_document_at_the_size_limit_is_parsed_and_one_byte_more_is_not() {
    let mut bytes = write_trace(&four()).into_bytes();
    bytes.resize(64 << 20, b' ');
    assert!(read_trace(&bytes).is_ok());
    bytes.push(b' ');
    assert_eq!(read_trace(&bytes), Err(FormatError::TooLarge { bytes: (64 << 20) + 1 }));
}

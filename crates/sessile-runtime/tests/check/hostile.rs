//! Logs from strangers.

use sessile_runtime::check::check;
use sessile_runtime::log::{Entry, Log, LogError, LogNode, Mode, Work, read_log, write_log};

use crate::build::{Rank, codes, job, kernel, write};

fn json(log: &Log) -> Vec<u8> {
    let mut bytes = Vec::new();
    write_log(log, &mut bytes).unwrap();
    bytes
}

fn sample() -> Log {
    let (mut zero, mut one) = (Rank::new(0, 2), Rank::new(1, 2));
    let graph = zero.graph("g", vec![kernel("a", &[write((0, 1), (0, 8))], &[]), kernel("b", &[], &[0])]);
    zero.launch(graph, 0);
    zero.op(1, "op", &[write((1, 1), (0, 8))]);
    zero.record(1, 4);
    zero.wait(0, 4);
    for rank in [&mut zero, &mut one] {
        rank.collective(0, "all_reduce", &[]);
        rank.host(0, &[]);
        rank.exchange();
    }
    job(vec![one, zero])
}

#[test]
fn a_log_survives_json() {
    let log = sample();
    assert_eq!(log.ranks[0].rank, 0, "ranks are sorted");
    assert_eq!(read_log(&json(&log)).unwrap(), log);
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = json(&sample());
    for end in 0..bytes.len() - 2 {
        assert!(matches!(read_log(&bytes[..end]), Err(LogError::Json { .. })), "cut at {end}");
    }
}

#[test]
fn every_flipped_byte_is_a_log_or_an_error_and_never_a_panic() {
    let bytes = json(&sample());
    for at in 0..bytes.len() {
        for flip in [1, 2, 4, 16, 128] {
            let mut bad = bytes.clone();
            bad[at] ^= flip;
            if let Ok(log) = read_log(&bad) {
                check(&log);
            }
        }
    }
}

#[test]
fn another_file_or_version_is_named() {
    assert_eq!(
        read_log(br#"{"schema":"sessile.trace","version":1,"what":[]}"#),
        Err(LogError::Schema { found: "sessile.trace".into(), expected: "sessile.log" })
    );
    assert_eq!(
        read_log(br#"{"schema":"sessile.log","version":99,"ranks":"new"}"#),
        Err(LogError::Version { found: 99, supported: 1 })
    );
    assert_eq!(read_log(br#"{"schema":"sessile.log","version":1,"ranks":[]}"#), Err(LogError::NoRanks));
    for bad in ["", "{}", "[]", "null", "\u{0}", r#"{"schema":"sessile.log","version":-1,"ranks":[]}"#] {
        assert!(matches!(read_log(bad.as_bytes()), Err(LogError::Json { .. })), "{bad}");
    }
    let unknown = r#"{"schema":"sessile.log","version":1,"ranks":[],"extra":1}"#;
    assert!(matches!(read_log(unknown.as_bytes()), Err(LogError::Json { .. })));
}

#[test]
fn deep_nesting_is_an_error() {
    let bytes = "[".repeat(1 << 20);
    assert!(matches!(read_log(bytes.as_bytes()), Err(LogError::Json { .. })));
}

/// Breaks one thing in the sample; both the reader and the checker must refuse it.
#[track_caller]
fn refused(spoil: impl FnOnce(&mut Log)) -> LogError {
    let mut log = sample();
    spoil(&mut log);
    assert_eq!(codes(&check(&log)), ["malformed"]);
    read_log(&json(&log)).expect_err("the reader refuses")
}

#[test]
fn indices_that_point_nowhere_are_refused() {
    let entry = |entry: Entry| refused(|log| log.ranks[0].entries.push(entry));
    let index = |error| match error {
        LogError::Index { field, found, limit, .. } => (field, found, limit),
        other => panic!("{other}"),
    };
    let enqueue =
        |stream, work| Entry::Enqueue { ticket: 0, stream, work, label: String::new(), accesses: Vec::new() };
    assert_eq!(index(entry(enqueue(2, Work::Empty))), ("stream", 2, 2));
    assert_eq!(index(entry(Entry::HostWait { stream: u32::MAX, accesses: vec![] })).0, "stream");
    assert_eq!(index(entry(Entry::Launch { ticket: 0, stream: 2, graph: 0 })), ("stream", 2, 2));
    assert_eq!(index(entry(Entry::Launch { ticket: 0, stream: 0, graph: 1 })), ("graph", 1, 1));
    assert_eq!(index(entry(Entry::Exchange { comm: 1 })), ("comm", 1, 1));
    let collective = Work::Collective { comm: 9, kind: String::new() };
    assert_eq!(index(entry(enqueue(0, collective.clone()))), ("comm", 9, 1));
    let node = LogNode { work: collective, label: String::new(), accesses: vec![], dependencies: vec![] };
    assert_eq!(index(refused(|log| log.ranks[0].graphs[0].nodes.push(node))), ("comm", 9, 1));
}

#[test]
fn dependencies_that_do_not_come_first_are_refused() {
    for found in [1, 2, u32::MAX] {
        let error = refused(|log| log.ranks[0].graphs[0].nodes[1].dependencies = vec![0, found]);
        assert!(matches!(error, LogError::DependencyOrder { found: at, .. } if at == found), "{error}");
    }
}

#[test]
fn ranges_that_run_backwards_or_leave_their_memory_are_refused() {
    for bytes in [(9, 8), (0, 65), (u64::MAX, 0), (0, u64::MAX)] {
        let error = refused(|log| log.ranks[0].graphs[0].nodes[0].accesses = vec![write((0, 1), bytes)]);
        assert!(matches!(error, LogError::Range { .. }), "{error}");
        let error = refused(|log| {
            log.ranks[1].entries.push(Entry::HostWait { stream: 0, accesses: vec![write((1, 1), bytes)] });
        });
        assert!(matches!(error, LogError::Range { .. }), "{error}");
    }
}

#[test]
fn ranks_groups_and_serials_that_make_no_sense_are_refused() {
    assert!(matches!(refused(|log| log.ranks[1].rank = 0), LogError::RankOrder { .. }));
    assert!(matches!(refused(|log| log.ranks.swap(0, 1)), LogError::RankOrder { .. }));
    assert!(matches!(refused(|log| log.ranks[0].comms[0].ranks = vec![0, 0]), LogError::Duplicate { .. }));
    assert!(matches!(refused(|log| log.ranks[0].comms[0].ranks = vec![1]), LogError::NotMember { .. }));
    assert!(matches!(refused(|log| log.ranks[0].memories[1].serial = 0), LogError::Duplicate { .. }));
}

#[test]
fn an_unlisted_memory_is_checked_all_the_same() {
    let mut rank = Rank::new(0, 2);
    rank.op(0, "one", &[write((5, 99), (0, u64::MAX))]);
    rank.op(1, "other", &[write((5, 99), (u64::MAX - 1, u64::MAX))]);
    assert_eq!(codes(&check(&job(vec![rank]))), ["unordered"]);
}

#[test]
fn a_few_bytes_that_ask_for_billions_of_operations_are_refused() {
    let mut rank = Rank::new(0, 1);
    let graph = rank.graph("g", (0..10_000).map(|_| kernel("", &[], &[])).collect());
    for _ in 0..10_000 {
        rank.launch(graph, 0);
    }
    assert_eq!(codes(&check(&job(vec![rank]))), ["too_large"]);
}

#[test]
fn too_many_chains_are_refused() {
    let mut rank = Rank::new(0, 1);
    let nodes = (0..20_000).map(|_| kernel("", &[write((0, 1), (0, 8))], &[])).collect();
    let graph = rank.graph("g", nodes);
    rank.launch(graph, 0);
    assert_eq!(codes(&check(&job(vec![rank]))), ["too_large"]);
}

#[test]
fn an_empty_log_is_clean() {
    assert!(check(&Log::from_ranks(Vec::new())).is_clean());
    assert!(check(&job(vec![Rank::new(1, 0)])).is_clean());
}

#[test]
fn modes_are_written_as_the_schema_says() {
    let text = serde_json::to_string(&[Mode::Read, Mode::Write, Mode::Update]).unwrap();
    assert_eq!(text, r#"["read","write","update"]"#);
    let schema: serde_json::Value = serde_json::from_str(sessile_runtime::log::LOG_SCHEMA).unwrap();
    let modes = &schema["$defs"]["accesses"]["items"]["properties"]["mode"]["enum"];
    assert_eq!(modes.to_string(), text);
}

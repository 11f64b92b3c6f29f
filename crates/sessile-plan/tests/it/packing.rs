//! Packing files: both kinds of columns, every refusal, and placements checked pair by pair.
#![allow(clippy::print_stderr, reason = "why a test is skipped, and what it measured")]

use proptest::{collection::vec, prelude::*};
use sessile_plan::{PackingBlock, PackingError, pack, read_packing, write_packing};

/// The files of a set of instances, or why there are none.
fn instances(set: &str) -> Result<Vec<(String, Vec<PackingBlock>)>, String> {
    let Some(folder) = std::env::var_os("SESSILE_PACKING_DATA") else {
        return Err("SESSILE_PACKING_DATA does not name the folder with packing instances".into());
    };
    let folder = std::path::Path::new(&folder).join(set);
    let entries = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "csv"));
    paths.sort();
    let read = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        (name, read_packing(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
    };
    Ok(paths.into_iter().map(read).collect())
}

/// Times are printed, not asserted: the machine is not ours.
#[test]
fn published_instances_of_real_programs_are_packed_within_a_thousandth_of_their_load() {
    let found = match instances("idealloc") {
        Ok(found) => found,
        Err(why) => return eprintln!("skipped: instances of idealloc: {why}"),
    };
    for name in ["resnet50", "G_1"] {
        let (_, blocks) = found.iter().find(|(other, _)| other == name).expect("the folder holds it");
        let begun = std::time::Instant::now();
        let (bytes, bound) = holds(blocks);
        eprintln!("{name}: {bytes} bytes, load {bound}, {:?}", begun.elapsed());
        assert!(bytes - bound <= bound / 1000, "{name}: {bytes} bytes, load {bound}");
    }
}

#[test]
fn puzzles_of_minimalloc_are_packed_without_overlap() {
    let found = match instances("minimalloc") {
        Ok(found) => found,
        Err(why) => return eprintln!("skipped: instances of minimalloc: {why}"),
    };
    assert!(!found.is_empty(), "the folder has no .csv file");
    for (name, blocks) in found {
        let begun = std::time::Instant::now();
        let (bytes, bound) = holds(&blocks);
        eprintln!("{name}: {bytes} bytes, load {bound}, {:?}", begun.elapsed());
        // What an ordinary best fit reaches.
        assert!(bytes * 2 <= bound * 3, "{name}: {bytes} bytes, load {bound}");
    }
}

/// Fails unless blocks that live at once share no byte, are aligned, and end below `bytes`.
fn holds(blocks: &[PackingBlock]) -> (u64, u64) {
    let packed = pack(blocks, None).expect("few pairs");
    for (at, block) in blocks.iter().enumerate() {
        let from = packed.offsets[at];
        assert!(from.is_multiple_of(block.alignment) && from + block.size <= packed.bytes, "{}", block.id);
        for (other_at, other) in blocks.iter().enumerate().skip(at + 1) {
            let start = packed.offsets[other_at];
            let both_live = block.lower < other.upper && other.lower < block.upper;
            let share = from < start + other.size && start < from + block.size;
            assert!(!(both_live && share), "{} and {}", block.id, other.id);
        }
    }
    assert!(packed.bytes >= packed.lower_bound_bytes);
    (packed.bytes, packed.lower_bound_bytes)
}

proptest! {
    // The solver works long where the bound can not be reached.
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn random_instances_are_packed_without_overlap_as_aligned_as_asked(
        drawn in vec((0u64..40, 1u64..12, 1u64..500, 0u32..5), 1..60)
    ) {
        let block = |(at, (lower, lives, size, shift)): (usize, (u64, u64, u64, u32))| PackingBlock {
            id: format!("b{at}"),
            lower,
            upper: lower + lives,
            size,
            alignment: 1 << shift,
            domain: String::new(),
        };
        holds(&drawn.into_iter().enumerate().map(block).collect::<Vec<_>>());
    }
}

#[test]
fn the_search_stops_once_the_blocks_fit_and_writes_where_they_lie() {
    let blocks = read_packing("id,lower,upper,size\na,0,4,8\nb,0,4,4\nc,4,8,9\n").unwrap();
    let packed = pack(&blocks, Some(100)).unwrap();
    assert!(packed.bytes <= 100);
    let packed = pack(&blocks, Some(1)).unwrap();
    assert_eq!((packed.bytes, packed.lower_bound_bytes), (12, 12), "less than the bound is not possible");
    let written = write_packing(&blocks, &packed);
    assert_eq!(written, "id,lower,upper,size,alignment,offset\na,0,4,8,1,0\nb,0,4,4,1,8\nc,4,8,9,1,0\n");
}

#[test]
fn half_open_and_older_columns_say_the_same() {
    let newer = read_packing("id,lower,upper,size,alignment\na,0,2,4,\nb,1,3,8,8\n\nc,2,4,4,4\n").unwrap();
    let older =
        read_packing("size,id,start,end,alignment,hint\n4,a,0,1,1,9\n8,b,1,2,8,\n4,c,2,3,4,\n").unwrap();
    assert_eq!(newer, older);
    assert_eq!(holds(&newer), (12, 12)); // a and c take turns beside b
}

#[test]
fn what_a_file_can_not_mean_is_refused_with_line_and_column() {
    let value = |text: &str| match read_packing(text).unwrap_err() {
        PackingError::Value { line, column, .. } => (line, column),
        other => panic!("{text}: {other}"),
    };
    let line = |line: &str| format!("id,lower,upper,size,alignment,gaps,offset\n{line}\n");
    assert_eq!(value(&line("a,2,2,4,,,")), (2, "upper"));
    assert_eq!(value(&line("a,0,1,0,,,")), (2, "size"));
    assert_eq!(value(&line("a,-1,1,4,,,")), (2, "lower"));
    assert_eq!(value(&line("a,0,1,18446744073709551616,,,")), (2, "size"));
    assert_eq!(value(&line("a,0,1,4,0,,")), (2, "alignment"));
    assert_eq!(value(&line("a,0,1,4,,0-1,")), (2, "gaps"));
    assert_eq!(value(&line("b,0,1,4,,,\na,0,1,4,,,0")), (3, "offset"));
    assert_eq!(value(&line("a,0,1,4,,,\na,0,1,4,,,")), (3, "id"));
    assert_eq!(value("id,start,end,size\na,3,1,4\n"), (2, "end"));
    for header in ["id,lower,upper", "id,size,lower,end", "id,id,lower,upper,size", "id,x,size", "id,size"] {
        let error = read_packing(header).unwrap_err();
        assert!(matches!(error, PackingError::Header { .. }), "{header}: {error}");
    }
    assert_eq!(
        read_packing("id,lower,upper,size\na,0,1\n").unwrap_err(),
        PackingError::Fields { line: 2, found: 3, expected: 4 }
    );
    assert_eq!(read_packing("").unwrap_err(), PackingError::Empty);
    assert_eq!(read_packing("id,lower,upper,size\n").unwrap_err(), PackingError::Empty);
}

#[test]
fn blocks_of_each_domain_share_an_arena_and_what_was_written_reads_back() {
    let text = "id,lower,upper,size,offset,domain\na,0,4,8,0,default\nb,0,4,4,0,\"symmetric(x,\"\"y)\"\nc,4,8,9,0,default\n";
    let blocks = read_packing(text).unwrap();
    assert_eq!(blocks[1].domain, "symmetric(x,\"y)");
    let packed = pack(&blocks, None).unwrap();
    assert_eq!((packed.bytes, packed.lower_bound_bytes), (9 + 4, 9 + 4));
    assert_eq!(packed.offsets, [0, 0, 0]);
    assert_eq!(read_packing(&write_packing(&blocks, &packed)), Ok(blocks));
}

/// These sizes leave gaps at any height that is found first; a capacity once made the result larger.
#[test]
fn a_capacity_that_is_not_reached_makes_nothing_larger() {
    let mut seed = 1u64;
    let mut draw = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    let mut missed = 0;
    for _ in 0..4 {
        let mut text = "id,lower,upper,size\n".to_owned();
        for id in 0..100 {
            let lower = draw(60);
            text += &format!("{id},{lower},{},{}\n", lower + 1 + draw(30), 1 + draw(40));
        }
        let blocks = read_packing(&text).unwrap();
        let free = pack(&blocks, None).unwrap();
        for part in [1, 3, 6] {
            let capacity = free.lower_bound_bytes + (free.bytes - free.lower_bound_bytes) * part / 8;
            let tight = pack(&blocks, Some(capacity)).unwrap();
            missed += u32::from(tight.bytes > capacity);
            assert!(tight.bytes <= free.bytes.max(capacity), "{} > {}", tight.bytes, free.bytes);
        }
    }
    assert!(missed > 0, "every capacity was reached");
}

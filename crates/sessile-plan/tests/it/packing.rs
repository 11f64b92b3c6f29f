//! Packing files: both kinds of columns, every refusal, and placements checked pair by pair.

use proptest::{collection::vec, prelude::*};
use sessile_plan::{PackingBlock, PackingError, pack, read_packing};

/// Fails unless blocks that live at once share no byte, are aligned, and end below `bytes`.
fn holds(blocks: &[PackingBlock]) -> (u64, u64) {
    let packed = pack(blocks).expect("few pairs");
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
        };
        holds(&drawn.into_iter().enumerate().map(block).collect::<Vec<_>>());
    }
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
    assert_eq!(value(&line("a,0,1,4,,,0")), (2, "offset"));
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

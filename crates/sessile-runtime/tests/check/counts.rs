//! Pairs of operations of different runners that were in flight at once.

use sessile_hal::{Span, Ticket};
use sessile_runtime::check::{Overlap, overlap};
use sessile_runtime::log::Work;

use crate::build::{Rank, job, kernel, node, read, write};

fn span(ticket: u64, node: u32, begin: u64, end: u64) -> Span {
    Span { ticket: Ticket(ticket), node: Some(node), begin, end }
}

/// Two runners: A has two kernels on the arena (memory 0) and a record, B one on the arena and one beside it.
fn two_runners() -> (Rank, u64, u64) {
    let mut rank = Rank::new(0, 2);
    let a = rank.graph(
        "A",
        vec![
            kernel("a0", &[write((0, 0), (0, 8))], &[]),
            kernel("a1", &[read((0, 0), (0, 8))], &[0]),
            node(Work::Record(1), "", &[], &[1]),
        ],
    );
    let b = rank.graph(
        "B",
        vec![kernel("b0", &[write((0, 0), (8, 16))], &[]), kernel("b1", &[write((0, 1), (0, 8))], &[])],
    );
    let (a, b) = (rank.launch(a, 0), rank.launch(b, 1));
    (rank, a, b)
}

fn counted(spans: &[Span]) -> Overlap {
    let (rank, _, _) = two_runners();
    overlap(&job(vec![rank]), &[spans])
}

#[test]
fn pairs_of_one_runner_and_pairs_that_only_touch_do_not_count() {
    assert_eq!(counted(&[span(1, 0, 0, 10), span(1, 1, 5, 10)]), Overlap::default());
    assert_eq!(counted(&[span(1, 0, 0, 10), span(2, 0, 10, 20)]), Overlap::default());
    assert_eq!(counted(&[span(1, 0, 0, 10), span(2, 0, 5, 5)]), Overlap::default());
}

#[test]
fn every_pair_in_flight_counts_and_those_on_one_arena_apart() {
    let spans = [span(1, 0, 0, 10), span(1, 1, 0, 10), span(2, 0, 9, 20), span(2, 1, 0, 3)];
    assert_eq!(counted(&spans), Overlap { cross_runner_pairs: 4, sharing_arena: 2 });
}

#[test]
fn records_eager_work_and_unknown_launches_do_not_count() {
    let spans = [
        span(1, 2, 0, 10),
        span(2, 0, 0, 10),
        Span { ticket: Ticket(1), node: None, begin: 0, end: 10 },
        span(77, 0, 0, 10),
        span(1, 99, 0, 10),
    ];
    assert_eq!(counted(&spans), Overlap::default());
}

#[test]
fn the_sweep_counts_as_all_pairs_do() {
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let (rank, _, _) = two_runners();
        let spans: Vec<Span> = (0..random.usize(0..40))
            .map(|_| {
                let begin = random.u64(0..30);
                span(random.u64(1..3), random.u32(0..2), begin, begin + random.u64(0..9))
            })
            .collect();
        let mut expected = Overlap::default();
        for (at, one) in spans.iter().enumerate() {
            for two in &spans[at + 1..] {
                let met = one.begin < two.end && two.begin < one.end;
                if one.ticket != two.ticket && met && one.begin < one.end && two.begin < two.end {
                    expected.cross_runner_pairs += 1;
                    let arena = |span: &Span| (span.ticket.0, span.node) != (2, Some(1));
                    expected.sharing_arena += u64::from(arena(one) && arena(two));
                }
            }
        }
        assert_eq!(overlap(&job(vec![rank]), &[&spans]), expected);
    }
}

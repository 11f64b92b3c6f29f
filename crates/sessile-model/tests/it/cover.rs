//! Covering arrays: every pair of values of any two parameters in some row.

/// Rows of value indices, one index a parameter, such that every allowed pair occurs. `allowed` may forbid rows;
/// pairs that occur in no allowed row are given up after the search has failed to place them.
pub(crate) fn pairwise(sizes: &[usize], allowed: impl Fn(&[usize]) -> bool) -> Vec<Vec<usize>> {
    let mut open: std::collections::BTreeSet<(usize, usize, usize, usize)> = (0..sizes.len())
        .flat_map(|a| (a + 1..sizes.len()).map(move |b| (a, b)))
        .flat_map(|(a, b)| (0..sizes[a]).flat_map(move |x| (0..sizes[b]).map(move |y| (a, x, b, y))))
        .collect();
    let mut rng = fastrand::Rng::with_seed(42);
    let mut rows = Vec::new();
    while let Some(&(a, x, b, y)) = open.iter().next() {
        let best = (0..200)
            .map(|_| {
                let mut row: Vec<usize> = sizes.iter().map(|&size| rng.usize(..size)).collect();
                (row[a], row[b]) = (x, y);
                row
            })
            .filter(|row| allowed(row))
            .max_by_key(|row| open.iter().filter(|&&(a, x, b, y)| row[a] == x && row[b] == y).count());
        match best {
            Some(row) => {
                open.retain(|&(a, x, b, y)| row[a] != x || row[b] != y);
                rows.push(row);
            }
            None => {
                open.remove(&(a, x, b, y));
            }
        }
    }
    rows
}

#[test]
fn a_covering_array_holds_every_pair() {
    let sizes = [4, 2, 3, 5];
    let rows = pairwise(&sizes, |_| true);
    for a in 0..4 {
        for b in a + 1..4 {
            for x in 0..sizes[a] {
                for y in 0..sizes[b] {
                    assert!(rows.iter().any(|row| row[a] == x && row[b] == y), "{a}={x} {b}={y}");
                }
            }
        }
    }
    assert!(rows.len() < 4 * 2 * 3 * 5 / 2, "{} rows are no saving", rows.len());
}

//! Geometry of one sharded weight.

/// Rows of every shard are a multiple of this, so that shards stay aligned for GEMMs and collectives.
pub(crate) const ROW_ALIGN: u64 = 16;

/// A `[rows, cols]` weight cut along dim 0 into `parts` equal shards, padded at the tail:
///
/// ```text
///  rows 1000, parts 4          0        256       512       768     1000 1024
///  padded rows 1024            | shard 0 | shard 1 | shard 2 | shard 3 |pad|
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Rows of the weight.
    pub rows: u64,
    /// Columns of the weight.
    pub cols: u64,
    /// Ranks that share it.
    pub parts: u64,
}

impl Shard {
    /// Rows with the padding.
    pub fn padded_rows(self) -> u64 {
        self.rows.next_multiple_of(ROW_ALIGN * self.parts)
    }

    /// Rows of one shard.
    pub fn shard_rows(self) -> u64 {
        self.padded_rows() / self.parts
    }

    /// Elements of the padded weight.
    pub fn padded_elements(self) -> u64 {
        self.padded_rows() * self.cols
    }

    /// Elements of one shard.
    pub fn shard_elements(self) -> u64 {
        self.shard_rows() * self.cols
    }

    /// Elements without padding.
    pub fn elements(self) -> u64 {
        self.rows * self.cols
    }

    /// Rows of shard `part` that exist in the weight; the rest of the shard is padding.
    pub fn real_rows(self, part: u64) -> std::ops::Range<u64> {
        let first = (part * self.shard_rows()).min(self.rows);
        first..((part + 1) * self.shard_rows()).min(self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_rows_over_four_ranks_have_twenty_four_tail_rows() {
        let shard = Shard { rows: 1000, cols: 256, parts: 4 };
        assert_eq!(shard.padded_rows(), 1024);
        assert_eq!(shard.shard_rows(), 256);
        assert_eq!(shard.real_rows(3), 768..1000);
    }

    #[test]
    fn a_shard_may_be_all_padding() {
        let shard = Shard { rows: 20, cols: 8, parts: 4 };
        assert_eq!(shard.padded_rows(), 64);
        assert_eq!(shard.real_rows(1), 16..20);
        assert_eq!(shard.real_rows(2), 20..20);
    }

    #[test]
    fn real_rows_cover_the_weight_once() {
        for rows in 1..200 {
            for parts in 1..7 {
                let shard = Shard { rows, cols: 1, parts };
                let covered: Vec<u64> = (0..parts).flat_map(|part| shard.real_rows(part)).collect();
                assert_eq!(covered, (0..rows).collect::<Vec<_>>(), "rows {rows}, parts {parts}");
            }
        }
    }
}

//! Which ranks share weights, and which hold replicas.

/// Ranks of a job cut into groups that share weights. Ranks of one group are neighbours:
///
/// ```text
///  4 ranks, gtp 2      rank   0  1 | 2  3
///                      group  0    | 1        share weights: {0,1} {2,3}
///                      index  0  1 | 0  1     replicas:      {0,2} {1,3}
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLayout {
    ranks: u32,
    gtp: u32,
}

impl RankLayout {
    /// `None` unless `ranks` is a positive multiple of a positive `gtp`.
    pub fn new(ranks: u32, gtp: u32) -> Option<Self> {
        (ranks > 0 && gtp > 0 && ranks.is_multiple_of(gtp)).then_some(RankLayout { ranks, gtp })
    }

    /// Size of a weight's group.
    pub fn gtp(self) -> u32 {
        self.gtp
    }

    /// Number of replicas.
    pub fn replicas(self) -> u32 {
        self.ranks / self.gtp
    }

    /// Number of the group that shares weights with `rank`.
    pub fn group_of(self, rank: u32) -> u32 {
        rank / self.gtp
    }

    /// Ranks that share weights with `rank`.
    pub fn group(self, rank: u32) -> Vec<u32> {
        let first = self.group_of(rank) * self.gtp;
        (first..first + self.gtp).collect()
    }

    /// Ranks that hold the same shards as `rank`.
    pub fn replica_group(self, rank: u32) -> Vec<u32> {
        (0..self.replicas()).map(|replica| replica * self.gtp + rank % self.gtp).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_neighbours_and_replicas_stride() {
        let layout = RankLayout::new(6, 3).unwrap();
        assert_eq!(layout.group(4), [3, 4, 5]);
        assert_eq!(layout.replica_group(4), [1, 4]);
        assert_eq!(RankLayout::new(4, 3), None);
        assert_eq!(RankLayout::new(0, 1), None);
    }
}

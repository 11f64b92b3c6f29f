//! Bytes to train on.

/// Draws sequences from a text; equal seeds draw equal sequences.
pub(crate) struct Sampler<'a> {
    text: &'a [u8],
    rng: fastrand::Rng,
}

/// Tokens, and the token that follows each by one, two, ...: all `[batch, seq]`.
pub(crate) struct Batch {
    pub(crate) inputs: Vec<u32>,
    pub(crate) targets: Vec<Vec<u32>>,
}

impl<'a> Sampler<'a> {
    /// `stream` separates draws of one seed, as ranks.
    pub(crate) fn new(text: &'a [u8], seed: u64, stream: u64) -> Self {
        let rng = fastrand::Rng::with_seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (stream + 1));
        Sampler { text, rng }
    }

    /// `batch` sequences of `seq` tokens with so many predictions. The text is longer than `seq + predictions - 1`.
    pub(crate) fn draw(&mut self, batch: usize, seq: usize, predictions: usize) -> Batch {
        let mut drawn = Batch { inputs: Vec::new(), targets: vec![Vec::new(); predictions] };
        for _ in 0..batch {
            let start = self.rng.usize(..self.text.len() - (seq + predictions - 1));
            let tokens = |from: usize| self.text[from..][..seq].iter().map(|&byte| u32::from(byte));
            drawn.inputs.extend(tokens(start));
            for (on, targets) in drawn.targets.iter_mut().enumerate() {
                targets.extend(tokens(start + 1 + on));
            }
        }
        drawn
    }
}

/// Standard normal numbers from a name and a seed: equal on every rank, whatever the sharding.
pub(crate) fn normal(seed: u64, name: &str, count: usize) -> Vec<f32> {
    // FNV-1a: a fixed hash, unlike std's.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut rng = fastrand::Rng::with_seed(seed ^ hash);
    (0..count)
        .map(|_| {
            // The sum of twelve uniform numbers: close enough to normal, and free of libm.
            let sum: f64 = (0..12).map(|_| rng.f64()).sum();
            (sum - 6.0) as f32
        })
        .collect()
}

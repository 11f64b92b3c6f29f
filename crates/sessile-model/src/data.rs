//! Bytes to train on.

/// Draws sequences from a text; equal seeds draw equal sequences.
pub(crate) struct Sampler<'a> {
    text: &'a [u8],
    rng: fastrand::Rng,
}

/// Tokens and the token that follows each, both `[batch, seq]`.
pub(crate) struct Batch {
    pub(crate) inputs: Vec<u32>,
    pub(crate) targets: Vec<u32>,
}

impl<'a> Sampler<'a> {
    /// `stream` separates draws of one seed, as ranks.
    pub(crate) fn new(text: &'a [u8], seed: u64, stream: u64) -> Self {
        let rng = fastrand::Rng::with_seed(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (stream + 1));
        Sampler { text, rng }
    }

    /// `batch` sequences of `seq` tokens. The text is longer than `seq`.
    pub(crate) fn draw(&mut self, batch: usize, seq: usize) -> Batch {
        let mut drawn = Batch { inputs: Vec::new(), targets: Vec::new() };
        for _ in 0..batch {
            let start = self.rng.usize(..self.text.len() - seq);
            let bytes = &self.text[start..=start + seq];
            drawn.inputs.extend(bytes[..seq].iter().map(|&byte| u32::from(byte)));
            drawn.targets.extend(bytes[1..].iter().map(|&byte| u32::from(byte)));
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

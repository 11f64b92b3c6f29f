//! Models that come with the program.

use super::shapes::{GroupShape, LayerShape, ModelShape, ModuleShape, WeightShape};

/// Names that [`built_in`] knows.
pub const BUILT_IN: [&str; 4] = ["nemotron4-340b", "nemotron4-quarter", "hybrid-mamba-moe", "dsv3"];

fn weight(name: &str, rows: u64, cols: u64) -> WeightShape {
    WeightShape {
        name: name.to_owned(),
        rows,
        cols,
        group: None,
        experts: None,
        tokens: None,
        uses: 1,
        fp32: false,
    }
}

fn module(name: &str, weights: Vec<WeightShape>) -> ModuleShape {
    ModuleShape { name: name.to_owned(), weights }
}

fn layers(count: u32, modules: Vec<ModuleShape>) -> LayerShape {
    LayerShape { name: None, count, modules }
}

fn group(name: &str, size: u32, stride: u32) -> GroupShape {
    GroupShape { name: name.to_owned(), size, stride }
}

/// A model by its name. `mtp` and `heads` (the captured output layer) count for `dsv3` alone.
///
/// ```text
///                      tensor  dense  expert               experts   tokens of an expert
///  nemotron4-340b      TP4     GTP16  -                    -         -
///  nemotron4-quarter   TP4     GTP16  -                    -         -
///  hybrid-mamba-moe    TP1     GTP64  GTP2, 64 ranks apart  8 of 512  8192 · 64 · 22 / 512
///  dsv3                TP1     GTP16  GTP4, 64 ranks apart  4 of 256  4096 · 64 · 8 / 256
/// ```
///
/// An expert sees the tokens of all 64 ranks that its layer's experts are spread over.
pub fn built_in(name: &str, mtp: u32, heads: bool) -> Option<ModelShape> {
    match name {
        "nemotron4-340b" => Some(nemotron(name, 18432, 73728, 96)),
        "nemotron4-quarter" => Some(nemotron(name, 9216, 36864, 48)),
        "hybrid-mamba-moe" => Some(hybrid()),
        "dsv3" => Some(dsv3(mtp, heads)),
        _ => None,
    }
}

/// 96 layers of squared-ReLU MLP and grouped-query attention, TP4.
fn nemotron(name: &str, hidden: u64, ffn: u64, heads: u64) -> ModelShape {
    let (tp, head_dim, kv_heads) = (4, 192, 8);
    let qkv = (heads * head_dim + 2 * kv_heads * head_dim) / tp;
    let mlp = module("mlp", vec![weight("fc2", hidden, ffn / tp), weight("fc1", ffn / tp, hidden)]);
    let attention =
        module("attention", vec![weight("proj", hidden, hidden / tp), weight("qkv", qkv, hidden)]);
    ModelShape {
        name: name.to_owned(),
        tokens: 4096,
        groups: vec![group("dense", 16, 4)],
        layers: vec![layers(96, vec![mlp, attention])],
    }
}

fn expert(name: &str, rows: u64, cols: u64, experts: u32, tokens: u64) -> WeightShape {
    WeightShape {
        group: Some("expert".to_owned()),
        experts: Some(experts),
        tokens: Some(tokens),
        ..weight(name, rows, cols)
    }
}

/// Ten times `MEMEMEM*E`: Mamba, experts, attention.
fn hybrid() -> ModelShape {
    let tokens = 8192 * 64 * 22 / 512;
    let mamba = || vec![module("mamba", vec![weight("out", 8192, 16384), weight("in", 35072, 8192)])];
    let attention = vec![module("attention", vec![weight("proj", 8192, 8192), weight("qkv", 10240, 8192)])];
    let experts = || {
        let routed = vec![expert("fc2", 2048, 5120, 8, tokens), expert("fc1", 5120, 2048, 8, tokens)];
        let shared = vec![weight("fc2", 8192, 10240), weight("fc1", 10240, 8192)];
        vec![module("experts", routed), module("shared", shared)]
    };
    let pattern = "MEMEMEM*E".repeat(10);
    let of = |letter| match letter {
        'M' => layers(1, mamba()),
        '*' => layers(1, attention.clone()),
        _ => layers(1, experts()),
    };
    ModelShape {
        name: "hybrid-mamba-moe".to_owned(),
        tokens: 8192,
        groups: vec![group("dense", 64, 1), group("expert", 2, 64)],
        layers: pattern.chars().rev().map(of).collect(),
    }
}

/// 58 layers of experts and 3 dense ones, latent attention, multi-token prediction before them.
fn dsv3(mtp: u32, heads: bool) -> ModelShape {
    let tokens = 4096 * 64 * 8 / 256;
    let attention =
        || vec![weight("o", 7168, 16384), weight("kv_up", 32768, 512), weight("q_up", 24576, 1536)];
    let routed = || vec![expert("fc2", 7168, 2048, 4, tokens), expert("fc1", 4096, 7168, 4, tokens)];
    let shared = || vec![weight("fc2", 7168, 2048), weight("fc1", 4096, 7168)];
    let mut all = Vec::new();
    if heads {
        let output = WeightShape { uses: 1 + mtp, fp32: true, ..weight("output", 129_280, 7168) };
        let modules = vec![module("output", vec![output])];
        all.push(LayerShape { name: Some("head".to_owned()), count: 1, modules });
    }
    if mtp > 0 {
        // All depths are one layer: one runner at layer scope.
        let depth = |depth: u32| {
            [
                module(&format!("depth{depth}.experts"), routed()),
                module(&format!("depth{depth}.shared"), shared()),
                module(&format!("depth{depth}.attention"), attention()),
                module(&format!("depth{depth}.eh_proj"), vec![weight("eh_proj", 7168, 14336)]),
            ]
        };
        let modules = (1..=mtp).rev().flat_map(depth).collect();
        all.push(LayerShape { name: Some("mtp".to_owned()), count: 1, modules });
    }
    all.push(layers(
        58,
        vec![module("experts", routed()), module("shared", shared()), module("attention", attention())],
    ));
    let mlp = vec![weight("fc2", 7168, 18432), weight("fc1", 36864, 7168)];
    all.push(layers(3, vec![module("mlp", mlp), module("attention", attention())]));
    ModelShape {
        name: match (mtp, heads) {
            (0, false) => "dsv3".to_owned(),
            (_, false) => format!("dsv3+mtp{mtp}"),
            (0, true) => "dsv3+heads".to_owned(),
            (_, true) => format!("dsv3+mtp{mtp}+heads"),
        },
        tokens: 4096,
        groups: vec![group("dense", 16, 1), group("expert", 4, 64)],
        layers: all,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_is_sound_and_needs_as_many_ranks_as_its_groups_span() {
        let ranks = BUILT_IN.map(|name| {
            let model = built_in(name, 2, true).expect("known");
            model.check().expect("sound");
            model.least_ranks()
        });
        assert_eq!(ranks, [64, 64, 128, 256]);
        assert_eq!(built_in("gpt", 0, false), None);
    }

    #[test]
    fn layers_are_counted_down_and_named_ones_are_not_counted() {
        let model = built_in("dsv3", 1, true).expect("known");
        let names: Vec<_> = model.named_layers().into_iter().map(|(name, _)| name).collect();
        assert_eq!((&names[..3], names.len()), (&["head", "mtp", "layer60"].map(str::to_owned)[..], 63));
        assert_eq!(names[62], "layer0");
    }
}

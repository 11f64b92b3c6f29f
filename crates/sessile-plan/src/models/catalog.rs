//! The published models, by their shapes per rank after tensor parallelism.

use super::{Block, Model, ModelError, Module, Weight};
use crate::request::DType;

/// Names of the catalog.
pub const CATALOG: [&str; 4] = ["nemotron4-340b", "nemotron4-quarter", "hybrid-mamba-moe", "dsv3"];

/// A model of the catalog. `mtp` is its number of multi-token prediction depths, `heads` whether its output layer is
/// captured too, once for each; both are for `dsv3` alone.
///
/// # Errors
/// [`ModelError::UnknownModel`], [`ModelError::OutOfRange`].
pub fn model(name: &str, mtp: u64, heads: bool) -> Result<Model, ModelError> {
    if mtp > 2 || (mtp > 0 || heads) && name != "dsv3" {
        let max = if name == "dsv3" { 2 } else { 0 };
        return Err(ModelError::OutOfRange { field: "mtp or heads".into(), value: mtp, max });
    }
    match name {
        "nemotron4-340b" => Ok(nemotron4(name, 18432)),
        "nemotron4-quarter" => Ok(nemotron4(name, 9216)),
        "hybrid-mamba-moe" => Ok(hybrid()),
        "dsv3" => Ok(dsv3(mtp, heads)),
        _ => {
            Err(ModelError::UnknownModel { name: name.chars().take(80).collect(), known: CATALOG.join(", ") })
        }
    }
}

fn weight(name: &str, rows: u64, cols: u64) -> Weight {
    let (name, group) = (name.to_owned(), "dense".to_owned());
    Weight { name, rows, cols, group, experts: None, uses: 1, wgrad_dtype: None }
}

fn experts(name: &str, rows: u64, cols: u64, count: u32) -> Weight {
    Weight { group: "expert".to_owned(), experts: Some(count), ..weight(name, rows, cols) }
}

fn module(name: impl Into<String>, weights: Vec<Weight>) -> Module {
    Module { name: name.into(), weights }
}

fn block(name: impl Into<String>, repeat: u64, modules: Vec<Module>) -> Block {
    Block { name: name.into(), repeat, modules }
}

/// Tensor parallelism 4, ffn four times hidden, head size 192, 8 key-value heads, 96 layers.
fn nemotron4(name: &str, hidden: u64) -> Model {
    let mlp = vec![weight("fc2", hidden, hidden), weight("fc1", hidden, hidden)];
    let qkv = (hidden + 2 * 8 * 192) / 4;
    let attention = vec![weight("proj", hidden, hidden / 4), weight("qkv", qkv, hidden)];
    let modules = vec![module("mlp", mlp), module("attention", attention)];
    Model {
        name: name.to_owned(),
        groups: [("dense".to_owned(), 16)].into(),
        blocks: vec![block("layer", 96, modules)],
    }
}

/// An assumed configuration: 90 layers, ten times `MEMEMEM*E`, run backward.
fn hybrid() -> Model {
    let mamba = || vec![module("mamba", vec![weight("out", 8192, 16384), weight("in", 35072, 8192)])];
    let attention =
        || vec![module("attention", vec![weight("proj", 8192, 8192), weight("qkv", 10240, 8192)])];
    let moe = || {
        let routed = vec![experts("fc2", 2048, 5120, 8), experts("fc1", 5120, 2048, 8)];
        let shared = vec![weight("fc2", 8192, 10240), weight("fc1", 10240, 8192)];
        vec![module("experts", routed), module("shared", shared)]
    };
    let letters = "MEMEMEM*E".repeat(10);
    let blocks = letters.char_indices().rev().map(|(at, letter)| match letter {
        'M' => block(format!("layer{at}"), 1, mamba()),
        '*' => block(format!("layer{at}"), 1, attention()),
        _ => block(format!("layer{at}"), 1, moe()),
    });
    Model {
        name: "hybrid-mamba-moe".to_owned(),
        groups: [("dense".to_owned(), 64), ("expert".to_owned(), 2)].into(),
        blocks: blocks.collect(),
    }
}

/// 61 layers, the first three dense; multi-token prediction before them, as one block.
fn dsv3(mtp: u64, heads: bool) -> Model {
    let attention = || {
        module(
            "attention",
            vec![weight("o", 7168, 16384), weight("kv_up", 32768, 512), weight("q_up", 24576, 1536)],
        )
    };
    let routed = || module("experts", vec![experts("fc2", 7168, 2048, 4), experts("fc1", 4096, 7168, 4)]);
    let shared = || module("shared", vec![weight("fc2", 7168, 2048), weight("fc1", 4096, 7168)]);
    let mut blocks = Vec::new();
    if heads {
        let output =
            Weight { uses: 1 + mtp, wgrad_dtype: Some(DType::F32), ..weight("output", 129_280, 7168) };
        blocks.push(block("heads", 1, vec![module("output", vec![output])]));
    }
    let depths = (0..mtp).rev().flat_map(|depth| {
        let named = |part: Module| module(format!("depth{depth}.{}", part.name), part.weights);
        let eh_proj = module("eh_proj", vec![weight("eh_proj", 7168, 14336)]);
        [routed(), shared(), attention(), eh_proj].map(named)
    });
    let depths: Vec<Module> = depths.collect();
    if !depths.is_empty() {
        blocks.push(block("mtp", 1, depths));
    }
    blocks.push(block("moe", 58, vec![routed(), shared(), attention()]));
    let mlp = module("mlp", vec![weight("fc2", 7168, 18432), weight("fc1", 36864, 7168)]);
    blocks.push(block("dense", 3, vec![mlp, attention()]));
    let name = match (mtp, heads) {
        (0, false) => "dsv3".to_owned(),
        (_, false) => format!("dsv3+mtp{mtp}"),
        (_, true) => format!("dsv3+mtp{mtp}+heads"),
    };
    Model { name, groups: [("dense".to_owned(), 16), ("expert".to_owned(), 4)].into(), blocks }
}

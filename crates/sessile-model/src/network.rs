//! The network: which weights it has, and which module uses which.

use sessile_gtp::{ChainKind, GroupId, Gtp, Pass, Repeat, WeightId, WeightSpec};
use sessile_hal::Device;
use sessile_runtime::RuntimeError;

use crate::{
    config::{ModuleKind, TrainConfig, VOCAB},
    module::{Module, kind_name},
};

/// Modules in forward order, and the two weights around them.
pub(crate) struct Network {
    pub(crate) embedding: WeightId,
    pub(crate) output: WeightId,
    pub(crate) modules: Vec<Module>,
    /// Number of norms; the last one is the final norm.
    pub(crate) norms: usize,
    /// Residual that each prediction reads.
    pub(crate) predicts_from: Vec<usize>,
}

/// The policy of a weight that a backward uses so often in all its runners.
fn policy(config: &TrainConfig, uses: u32) -> Repeat {
    if uses > 1 { config.repeat } else { Repeat::default() }
}

/// Adds the weights of a network.
struct Builder<'a, D: Device> {
    config: &'a TrainConfig,
    gtp: &'a mut Gtp<D>,
    dense: GroupId,
    expert: Option<GroupId>,
    graphed: bool,
}

/// Adds all weights and sets their order. `graphed` says whether runners will be captured.
///
/// # Errors
/// Those of the device.
pub(crate) fn build<D: Device>(
    config: &TrainConfig,
    gtp: &mut Gtp<D>,
    (dense, expert): (GroupId, Option<GroupId>),
    graphed: bool,
) -> Result<Network, RuntimeError> {
    let mut builder = Builder { config, gtp, dense, expert, graphed };
    let embedding = builder.weight("embedding", (VOCAB, config.hidden), builder.heads(), (1, 1))?;
    let mut modules = Vec::new();
    for layer in 0..config.layers {
        let second = if config.is_moe(layer) { ModuleKind::Moe } else { ModuleKind::Mlp };
        for kind in [ModuleKind::Attention, second] {
            let module = builder.module(kind, &format!("layer{layer}"), modules.len(), 1)?;
            modules.push(module);
        }
    }
    let mut predicts_from = vec![modules.len()];
    let mut norms = modules.len();
    if config.mtp > 0 {
        // One layer, used once a depth.
        let shared = [ModuleKind::Attention, ModuleKind::Mlp]
            .into_iter()
            .zip(norms..)
            .map(|(kind, norm)| builder.module(kind, "mtp", norm, config.mtp))
            .collect::<Result<Vec<_>, _>>()?;
        norms += shared.len();
        for depth in 1..=config.mtp {
            if let Some(last) = modules.last_mut() {
                last.predicts = Some(predicts_from.len() - 1);
            }
            for module in &shared {
                let layer = format!("mtp{depth}");
                modules.push(Module { layer, index: modules.len(), ..module.clone() });
            }
            predicts_from.push(modules.len());
        }
    }
    let uses = 1 + config.mtp;
    // All predictions are in one runner.
    let output = builder.weight("output", (VOCAB, config.hidden), builder.heads(), (uses, uses))?;

    let heads = std::iter::repeat_n(output, uses as usize);
    let forward = modules.iter().flat_map(Module::weights);
    let forward: Vec<_> = [embedding].into_iter().chain(forward).chain(heads.clone()).collect();
    let backward = modules.iter().rev().flat_map(|module| module.weights().rev());
    let backward: Vec<_> = heads.chain(backward).collect();
    gtp.set_order(Pass::Forward, &forward);
    gtp.set_order(Pass::Backward, &backward);
    Ok(Network { embedding, output, modules, norms: norms + 1, predicts_from })
}

impl<D: Device> Builder<'_, D> {
    fn heads(&self) -> ChainKind {
        if self.graphed && self.config.graph_heads { ChainKind::Graphed } else { ChainKind::Eager }
    }

    fn weight(
        &mut self,
        name: &str,
        (rows, cols): (u64, u64),
        chain: ChainKind,
        (uses, in_all): (u32, u32),
    ) -> Result<WeightId, RuntimeError> {
        self.gtp.add_weight(&WeightSpec {
            name,
            rows,
            cols,
            group: self.dense,
            chain,
            wgrad_dtype: self.config.wgrad_dtype,
            experts: None,
            uses,
            repeat: policy(self.config, in_all),
        })
    }

    /// A module whose norm has the number `index`.
    fn module(
        &mut self,
        kind: ModuleKind,
        layer: &str,
        index: usize,
        in_all: u32,
    ) -> Result<Module, RuntimeError> {
        let TrainConfig { hidden, ffn, experts, .. } = *self.config;
        let chain = match self.graphed && self.config.graph_modules.contains(&kind) {
            true => ChainKind::Graphed,
            false => ChainKind::Eager,
        };
        // Each depth is a runner of its own.
        let uses = (if chain == ChainKind::Graphed { 1 } else { in_all }, in_all);
        let name = format!("{layer}.{}", kind_name(kind));
        let (up, down) = match kind {
            ModuleKind::Attention => ((3 * hidden, hidden), (hidden, hidden)),
            ModuleKind::Mlp | ModuleKind::Moe => ((ffn, hidden), (hidden, ffn)),
        };
        let (router, up, down) = match (kind, self.expert) {
            (ModuleKind::Moe, Some(group)) => {
                let router = self.weight(&format!("{name}.router"), (experts.into(), hidden), chain, uses)?;
                let mut experts = |what: &str, (rows, cols)| {
                    self.gtp.add_weight(&WeightSpec {
                        name: &format!("{name}.{what}"),
                        rows,
                        cols,
                        group,
                        chain,
                        wgrad_dtype: self.config.wgrad_dtype,
                        experts: Some(experts),
                        uses: uses.0,
                        repeat: policy(self.config, in_all),
                    })
                };
                (Some(router), experts("up", up)?, experts("down", down)?)
            }
            _ => {
                let up = self.weight(&format!("{name}.up"), up, chain, uses)?;
                (None, up, self.weight(&format!("{name}.down"), down, chain, uses)?)
            }
        };
        Ok(Module { kind, layer: layer.to_owned(), index, norm: index, router, up, down, predicts: None })
    }
}

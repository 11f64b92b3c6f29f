//! What one runner covers.

use crate::{
    config::{GraphScope, TrainConfig},
    module::Module,
};

/// What one runner covers: consecutive modules.
pub(crate) struct Unit {
    /// Indices of its modules, in forward order.
    pub(crate) modules: Vec<usize>,
    /// Whether it is captured.
    pub(crate) graphed: bool,
    /// Its name in runners.
    pub(crate) name: String,
}

/// Cuts the modules into units: each alone, or with layer scope neighbours of one layer that are captured together.
pub(crate) fn units(config: &TrainConfig, modules: &[Module], graphed: bool) -> Vec<Unit> {
    let mut units: Vec<Unit> = Vec::new();
    let mut last_layer: Option<&str> = None;
    for module in modules {
        let is_graphed = graphed && config.graph_modules.contains(&module.kind);
        let joins = config.graph_scope == GraphScope::Layer
            && last_layer == Some(&module.layer)
            && units.last().is_some_and(|unit| unit.graphed && is_graphed);
        match units.last_mut() {
            Some(unit) if joins => {
                unit.modules.push(module.index);
                unit.name.clone_from(&module.layer);
            }
            _ => units.push(Unit { modules: vec![module.index], graphed: is_graphed, name: module.name() }),
        }
        last_layer = Some(&module.layer);
    }
    units
}

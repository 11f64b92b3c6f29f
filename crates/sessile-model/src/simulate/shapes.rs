//! What a model is to the simulator: the weights of its backward, in order, and the groups they are sharded over.

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;

/// A process group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupShape {
    /// Its name.
    pub name: String,
    /// Ranks that share a weight.
    pub size: u32,
    /// Ranks from one member to the next: those between hold other slices of the tensor, or other experts.
    #[serde(default = "one")]
    pub stride: u32,
}

/// One weight gradient `[rows, cols]`, per rank after tensor parallelism and before sharding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightShape {
    /// Name inside its module.
    pub name: String,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// The group it is sharded over: the model's first, if not given.
    #[serde(default)]
    pub group: Option<String>,
    /// So many experts on this rank, which are gathered and reduced as one batch.
    #[serde(default)]
    pub experts: Option<u32>,
    /// Tokens that it sees: those of the model, if not given. Of an expert, its own.
    #[serde(default)]
    pub tokens: Option<u64>,
    /// How often the module uses it in a row.
    #[serde(default = "one")]
    pub uses: u32,
    /// Whether its gradient is FP32 on the wire whatever was asked for.
    #[serde(default)]
    pub fp32: bool,
}

/// Weights that one runner covers at module scope, in backward order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModuleShape {
    /// Name inside its layer.
    pub name: String,
    /// Its weights.
    pub weights: Vec<WeightShape>,
}

/// Modules that one runner covers at layer scope, in backward order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// Its name: `layerN`, counted down to 0 over all layers without a name, if not given.
    #[serde(default)]
    pub name: Option<String>,
    /// So many alike in a row.
    #[serde(default = "one")]
    pub count: u32,
    /// Its modules.
    pub modules: Vec<ModuleShape>,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// Its name.
    pub name: String,
    /// Tokens of a step, per rank.
    pub tokens: u64,
    /// Its groups.
    pub groups: Vec<GroupShape>,
    /// Its layers, in backward order.
    pub layers: Vec<LayerShape>,
}

fn one() -> u32 {
    1
}

/// Extents up to this are taken.
const EXTENT_MAX: u64 = 1 << 22;
/// Weights of a model, experts of a weight one each.
const WEIGHTS_MAX: u64 = 100_000;

impl ModelShape {
    /// Every layer with its name, in backward order.
    pub fn named_layers(&self) -> Vec<(String, &LayerShape)> {
        let unnamed = self.layers.iter().filter(|layer| layer.name.is_none());
        let mut number: u64 = unnamed.map(|layer| u64::from(layer.count)).sum();
        let mut named = Vec::new();
        for layer in &self.layers {
            for at in 0..layer.count {
                let name = match &layer.name {
                    Some(name) if layer.count == 1 => name.clone(),
                    Some(name) => format!("{name}{at}"),
                    None => {
                        number -= 1;
                        format!("layer{number}")
                    }
                };
                named.push((name, layer));
            }
        }
        named
    }

    /// The group of a weight.
    pub(crate) fn group_of(&self, weight: &WeightShape) -> Option<usize> {
        match &weight.group {
            None => (!self.groups.is_empty()).then_some(0),
            Some(name) => self.groups.iter().position(|group| group.name == *name),
        }
    }

    /// The fewest ranks that hold every group whole.
    pub fn least_ranks(&self) -> u64 {
        let spans = self.groups.iter().map(|group| u64::from(group.size) * u64::from(group.stride));
        spans.fold(1, least_common_multiple)
    }

    /// Checks everything that running it rests on.
    ///
    /// # Errors
    /// The first field that cannot work.
    pub fn check(&self) -> Result<(), ConfigError> {
        let error = |value: String, remedy: String| ConfigError { option: "--model", value, remedy };
        let range = |what: String, value: u64, most: u64| {
            if (1..=most).contains(&value) {
                Ok(())
            } else {
                Err(error(format!("{what} = {value}"), format!("use 1 to {most}")))
            }
        };
        range("tokens".into(), self.tokens, EXTENT_MAX)?;
        if self.groups.is_empty() || self.layers.is_empty() {
            return Err(error(
                self.name.clone(),
                "a model has one group or more, and one layer or more".into(),
            ));
        }
        for (at, group) in self.groups.iter().enumerate() {
            let name = &group.name;
            if name.is_empty() || name == "world" || name.contains('.') {
                return Err(error(format!("group `{name}`"), "name it without dots, and not `world`".into()));
            }
            if self.groups[..at].iter().any(|other| other.name == *name) {
                return Err(error(format!("group `{name}`"), "each group needs a name of its own".into()));
            }
            range(format!("size of group `{name}`"), group.size.into(), 65_536)?;
            range(format!("stride of group `{name}`"), group.stride.into(), 65_536)?;
        }
        if self.least_ranks() > 65_536 {
            let remedy = "sizes and strides whose least common multiple is at most 65536".into();
            return Err(error(format!("groups that need {} ranks", self.least_ranks()), remedy));
        }
        let mut count = 0u64;
        for layer in &self.layers {
            range("count of a layer".into(), layer.count.into(), WEIGHTS_MAX)?;
            if layer.modules.is_empty() || layer.modules.iter().any(|module| module.weights.is_empty()) {
                return Err(error("a layer".into(), "each layer has modules, each module weights".into()));
            }
            for weight in layer.modules.iter().flat_map(|module| &module.weights) {
                let name = &weight.name;
                range(format!("rows of `{name}`"), weight.rows, EXTENT_MAX)?;
                range(format!("cols of `{name}`"), weight.cols, EXTENT_MAX)?;
                range(format!("experts of `{name}`"), weight.experts.unwrap_or(1).into(), 1024)?;
                range(format!("tokens of `{name}`"), weight.tokens.unwrap_or(1), EXTENT_MAX)?;
                range(format!("uses of `{name}`"), weight.uses.into(), 64)?;
                if self.group_of(weight).is_none() {
                    let names: Vec<_> = self.groups.iter().map(|group| group.name.as_str()).collect();
                    let group = weight.group.as_deref().unwrap_or_default();
                    return Err(error(
                        format!("group `{group}` of `{name}`"),
                        format!("use {}", names.join(" or ")),
                    ));
                }
                let matrices = u64::from(weight.experts.unwrap_or(1)) * u64::from(weight.uses);
                count = count.saturating_add(matrices * u64::from(layer.count));
            }
        }
        range("weights of the model".into(), count, WEIGHTS_MAX)?;
        let mut names = std::collections::BTreeSet::new();
        for (layer, shape) in self.named_layers() {
            for module in &shape.modules {
                for weight in &module.weights {
                    let name = format!("{layer}.{}.{}", module.name, weight.name);
                    if !names.insert(name.clone()) {
                        return Err(error(
                            format!("weight `{name}`"),
                            "appears twice: names inside a module, and of modules and layers, must differ"
                                .into(),
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    // Each is at most 2^32, and what is above 65,536 is refused.
    a.checked_div(x).map_or(0, |part| part.saturating_mul(b))
}

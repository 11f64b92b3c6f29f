//! Models whose backward passes are planned without running them: shapes, groups, and how they become traces.
//!
//! A model is blocks of modules of weights, all in backward order. The catalog has the published ones; a TOML file
//! describes any other in the same words.
//!
//! ```text
//!  name = "two"                              a block is a layer; `repeat` launches it again for the next layer
//!  groups = { dense = 16 }                   ranks of each group
//!  [[blocks]]
//!  name = "layer"
//!  repeat = 2
//!  [[blocks.modules]]
//!  name = "mlp"
//!  weights = [{ name = "fc2", rows = 64, cols = 256 }, { name = "fc1", rows = 256, cols = 64 }]
//! ```

mod catalog;
mod trace;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use catalog::{CATALOG, model};
pub use trace::{KindSet, Kinds, Scope, TraceOptions, model_trace};

use crate::{
    limits::{NAME_BYTES_MAX, REQUESTS_MAX},
    request::DType,
};

/// A model, in backward order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// For people.
    pub name: String,
    /// Ranks of each group.
    pub groups: BTreeMap<String, u64>,
    /// Its layers.
    pub blocks: Vec<Block>,
}

/// A layer, or several alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Unique in the model.
    pub name: String,
    /// How often it follows itself.
    #[serde(default = "one")]
    pub repeat: u64,
    /// Its modules.
    pub modules: Vec<Module>,
}

/// What one graph holds at scope module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// Unique in the block.
    pub name: String,
    /// Its weights.
    pub weights: Vec<Weight>,
}

/// A weight, after tensor parallelism and before sharding, or as many experts' weights of one shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weight {
    /// Unique in the module.
    pub name: String,
    /// Rows, which are cut into shards.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// The group that it is sharded over.
    #[serde(default = "dense")]
    pub group: String,
    /// Local experts whose weights travel as one batch; none for a weight that is not an expert's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<u32>,
    /// How often one backward uses it.
    #[serde(default = "one")]
    pub uses: u64,
    /// Its gradient's dtype, where that is not the one of all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wgrad_dtype: Option<DType>,
}

fn one() -> u64 {
    1
}

fn dense() -> String {
    "dense".to_owned()
}

/// What is wrong with a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text is not TOML, or not a model.
    #[error("{problem}: describe a model by name, groups and blocks of modules of weights")]
    Toml {
        /// What and where.
        problem: String,
    },
    /// A name of the catalog was not understood.
    #[error("no model `{name}`: use one of {known}, or a file")]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A number that is zero or far too large.
    #[error("{field} is {value}: use a number from 1 to {max}")]
    OutOfRange {
        /// Which.
        field: String,
        /// What it is.
        value: u64,
        /// The largest that makes sense.
        max: u64,
    },
    /// A weight of a group that the model does not have.
    #[error("{field} is `{group}`: add it to `groups` with its number of ranks")]
    UnknownGroup {
        /// Which.
        field: String,
        /// The group.
        group: String,
    },
    /// Two of one name where names must differ, or a name of the wrong length.
    #[error("{field} is `{name}`: names are unique and have 1 to 100 bytes")]
    Name {
        /// Which.
        field: String,
        /// The name.
        name: String,
    },
    /// More requests than a trace may hold.
    #[error("the model makes {requests} requests: the limit is {REQUESTS_MAX}; repeat blocks less often")]
    TooLarge {
        /// How many.
        requests: u64,
    },
}

/// Reads a model from TOML and checks it.
///
/// # Errors
/// Every [`ModelError`] but [`ModelError::UnknownModel`].
pub fn read_model(text: &str) -> Result<Model, ModelError> {
    let problem =
        |error: toml::de::Error| ModelError::Toml { problem: error.to_string().trim().replace('\n', " ") };
    let model: Model = toml::from_str(text).map_err(problem)?;
    model.check()?;
    Ok(model)
}

impl Model {
    /// Checks names, groups and numbers.
    ///
    /// # Errors
    /// The first fault found.
    pub fn check(&self) -> Result<(), ModelError> {
        let range = |field: String, value: u64, max: u64| {
            if (1..=max).contains(&value) {
                Ok(())
            } else {
                Err(ModelError::OutOfRange { field, value, max })
            }
        };
        let long = NAME_BYTES_MAX;
        if !(1..=long).contains(&self.name.len()) {
            return Err(ModelError::Name {
                field: "name".into(),
                name: self.name.chars().take(80).collect(),
            });
        }
        for (group, &ranks) in &self.groups {
            unique(&mut Vec::new(), group, || "a group".into())?;
            range(format!("groups.{group}"), ranks, 1 << 20)?;
        }
        range("the number of blocks".into(), self.blocks.len() as u64, 1 << 16)?;
        let mut requests = 0u64;
        let mut blocks = Vec::new();
        for (b, block) in self.blocks.iter().enumerate() {
            let field = |part: &str| format!("blocks[{b}].{part}");
            unique(&mut blocks, &block.name, || field("name"))?;
            range(field("repeat"), block.repeat, 1 << 16)?;
            range(field("modules"), block.modules.len() as u64, 1 << 10)?;
            let mut modules = Vec::new();
            for (m, module) in block.modules.iter().enumerate() {
                let field = |part: &str| format!("blocks[{b}].modules[{m}].{part}");
                unique(&mut modules, &module.name, || field("name"))?;
                range(field("weights"), module.weights.len() as u64, 1 << 10)?;
                let mut weights = Vec::new();
                for (w, weight) in module.weights.iter().enumerate() {
                    let field = |part: &str| format!("blocks[{b}].modules[{m}].weights[{w}].{part}");
                    unique(&mut weights, &weight.name, || field("name"))?;
                    range(field("rows"), weight.rows, 1 << 24)?;
                    range(field("cols"), weight.cols, 1 << 24)?;
                    range(field("experts"), weight.experts.unwrap_or(1).into(), 1 << 12)?;
                    range(field("uses"), weight.uses, 1 << 10)?;
                    if !self.groups.contains_key(&weight.group) {
                        let (field, group) = (field("group"), weight.group.clone());
                        return Err(ModelError::UnknownGroup { field, group });
                    }
                    let of_one = u64::from(weight.experts.unwrap_or(1)) * weight.uses * 4;
                    requests = requests.saturating_add(block.repeat.saturating_mul(of_one));
                }
            }
        }
        if requests > REQUESTS_MAX as u64 {
            return Err(ModelError::TooLarge { requests });
        }
        Ok(())
    }
}

fn unique<'a>(
    seen: &mut Vec<&'a str>,
    name: &'a str,
    field: impl FnOnce() -> String,
) -> Result<(), ModelError> {
    if !(1..=100).contains(&name.len()) || seen.contains(&name) {
        return Err(ModelError::Name { field: field(), name: name.chars().take(80).collect() });
    }
    seen.push(name);
    Ok(())
}

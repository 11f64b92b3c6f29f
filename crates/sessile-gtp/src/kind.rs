//! Kinds of reduce-scatter, and which one a group gets.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sessile_plan::{DType, Domain};

use crate::ChainKind;

/// How gradients of a group are reduced. Every kind scales once, in FP32, after the sum, while it adds into `main_grad`.
///
/// ```text
///              reads           sums                          storage besides the input
///  ring        own input       wire dtype, in ring order     rs_output (wire)
///  symmetric   peers' inputs   FP32, rounded to the wire     rs_output (wire), both in the group's window
///  fp32_a2a    own input       FP32, in rank order           a2a_scratch (wire), fp32_output
///  one_shot    peers' inputs   FP32, in rank order           none; the input lies in the group's window
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReduceScatter {
    /// The communicator's own: rounds to the wire dtype at every hop.
    Ring,
    /// Input and output in registered memory: sums in FP32, rounds once to the wire dtype.
    Symmetric,
    /// All-to-all in the wire dtype, then a local sum in FP32 into an FP32 output: nothing is rounded to the wire dtype.
    Fp32A2a,
    /// One kernel reads every peer's block and adds the scaled FP32 sum into `main_grad`.
    OneShot,
}

impl ReduceScatter {
    /// All kinds.
    pub const ALL: [ReduceScatter; 4] =
        [ReduceScatter::Ring, ReduceScatter::Symmetric, ReduceScatter::Fp32A2a, ReduceScatter::OneShot];

    /// Its name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            ReduceScatter::Ring => "ring",
            ReduceScatter::Symmetric => "symmetric",
            ReduceScatter::Fp32A2a => "fp32_a2a",
            ReduceScatter::OneShot => "one_shot",
        }
    }

    /// Whether the input must lie in memory registered with exactly the group.
    pub fn registers_input(self) -> bool {
        match self {
            ReduceScatter::Symmetric | ReduceScatter::OneShot => true,
            ReduceScatter::Ring | ReduceScatter::Fp32A2a => false,
        }
    }

    /// Whether the output must, too.
    pub fn registers_output(self) -> bool {
        match self {
            ReduceScatter::Symmetric => true,
            ReduceScatter::Ring | ReduceScatter::Fp32A2a | ReduceScatter::OneShot => false,
        }
    }

    /// Where inputs of this kind come from.
    pub(crate) fn input_domain(self, group: &str) -> Domain {
        if self.registers_input() { Domain::Symmetric(group.to_owned()) } else { Domain::Default }
    }

    /// Where outputs do.
    pub(crate) fn output_domain(self, group: &str) -> Domain {
        if self.registers_output() { Domain::Symmetric(group.to_owned()) } else { Domain::Default }
    }
}

impl fmt::Display for ReduceScatter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// What [`choose`] finds best.
    #[default]
    Auto,
    /// This kind, or an error.
    Exactly(ReduceScatter),
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Wanted::Auto => "auto",
            Wanted::Exactly(kind) => kind.name(),
        })
    }
}

/// A word that names no kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no such kind: use auto, ring, symmetric, fp32_a2a or one_shot")]
pub struct UnknownKind;

impl FromStr for Wanted {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        if text == "auto" {
            return Ok(Wanted::Auto);
        }
        let found = ReduceScatter::ALL.into_iter().find(|kind| kind.name() == text);
        found.map(Wanted::Exactly).ok_or(UnknownKind)
    }
}

impl Serialize for Wanted {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Wanted {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// All that the choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// Ranks of the exact group.
    pub group_size: u32,
    /// Dtype of gradients on the wire.
    pub wire: DType,
    /// Whether the device can register memory that all ranks of the group read.
    pub registers: bool,
    /// Whether sums in FP32 are wanted although they cost more storage.
    pub fp32_accumulation: bool,
    /// Who uses the weights.
    pub chain: ChainKind,
}

/// A kind, and the reason for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kind.
    pub kind: ReduceScatter,
    /// Why, for people.
    pub why: &'static str,
}

/// A kind that was asked for and can't run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {remedy}")]
pub struct KindError {
    /// The kind.
    pub kind: Wanted,
    /// What would do.
    pub remedy: &'static str,
}

/// Which kind a group gets. Total: every situation has exactly one answer, and a kind that was asked for by name is that
/// kind or an error, never another one.
///
/// The first line of `auto` that fits:
///
/// | group | registers | wire | FP32 wanted | kind |
/// |---|---|---|---|---|
/// | 1 | any | any | any | `ring`: nothing is summed |
/// | more | yes | any | any | `one_shot` |
/// | more | no | f32 | any | `ring`: sums in FP32 already |
/// | 2 | no | bf16 | any | `ring`: one addition, rounded once |
/// | more | no | bf16 | yes | `fp32_a2a` |
/// | more | no | bf16 | no | `ring` |
///
/// The chain never decides: eager execution and graphs must round alike. It is part of the situation so that the table
/// says so.
///
/// # Errors
/// [`KindError`] for a kind that needs registered memory where there is none, and for gradients of integers.
pub fn choose(wanted: Wanted, situation: Situation) -> Result<Choice, KindError> {
    let Situation { group_size, wire, registers, fp32_accumulation, chain: _ } = situation;
    let error = |remedy| KindError { kind: wanted, remedy };
    if wire == DType::U32 {
        return Err(error("gradients on the wire are bf16 or f32"));
    }
    let kind = match wanted {
        Wanted::Exactly(kind) if kind.registers_input() && !registers => {
            return Err(error("this device cannot register memory with the group: use ring or fp32_a2a"));
        }
        Wanted::Exactly(kind) => return Ok(Choice { kind, why: "asked for" }),
        Wanted::Auto => match (group_size, registers, wire, fp32_accumulation) {
            (0 | 1, ..) => (ReduceScatter::Ring, "a group of one rank sums nothing"),
            (_, true, ..) => (
                ReduceScatter::OneShot,
                "peers' memory can be read: FP32 sum in rank order, no output, no scratch",
            ),
            (_, false, DType::F32 | DType::U32, _) => {
                (ReduceScatter::Ring, "f32 on the wire is summed in FP32")
            }
            (2, false, DType::Bf16, _) => (ReduceScatter::Ring, "two ranks: one addition, rounded once"),
            (_, false, DType::Bf16, true) => {
                (ReduceScatter::Fp32A2a, "FP32 accumulation is wanted and peers' memory cannot be read")
            }
            (_, false, DType::Bf16, false) => (ReduceScatter::Ring, "FP32 accumulation is not wanted"),
        },
    };
    Ok(Choice { kind: kind.0, why: kind.1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn situations() -> impl Iterator<Item = Situation> {
        let bools = || [false, true].into_iter();
        let dtypes = [DType::Bf16, DType::F32];
        bools().flat_map(move |registers| {
            bools().flat_map(move |fp32_accumulation| {
                dtypes.into_iter().flat_map(move |wire| {
                    [1, 2, 4, 8].into_iter().flat_map(move |group_size| {
                        [ChainKind::Eager, ChainKind::Graphed].into_iter().map(move |chain| Situation {
                            group_size,
                            wire,
                            registers,
                            fp32_accumulation,
                            chain,
                        })
                    })
                })
            })
        })
    }

    #[test]
    fn every_situation_has_exactly_one_answer() {
        let mut table = String::new();
        for situation in situations() {
            let Situation { group_size, wire, registers, fp32_accumulation, chain } = situation;
            let Choice { kind, why } = choose(Wanted::Auto, situation).expect("auto always finds one");
            let flag = |on, word| if on { word } else { "-" };
            let chain = format!("{chain:?}");
            let (registers, fp32) = (flag(registers, "registered"), flag(fp32_accumulation, "fp32"));
            table.push_str(&format!(
                "{registers:10} {fp32:4} {wire:4} {group_size} {chain:7} {kind:9} {why}\n"
            ));
        }
        insta::assert_snapshot!(table);
    }

    #[test]
    fn a_kind_asked_for_is_that_kind_at_any_size_or_an_error() {
        for situation in situations() {
            for kind in ReduceScatter::ALL {
                match choose(Wanted::Exactly(kind), situation) {
                    Ok(choice) => {
                        assert_eq!(choice.kind, kind);
                        assert!(situation.registers || !kind.registers_input(), "{kind} without memory");
                    }
                    Err(_) => {
                        assert!(kind.registers_input() && !situation.registers, "{kind}: {situation:?}")
                    }
                }
            }
        }
    }

    #[test]
    fn the_chain_never_decides() {
        for situation in situations() {
            let other = Situation { chain: ChainKind::Eager, ..situation };
            assert_eq!(choose(Wanted::Auto, situation), choose(Wanted::Auto, other));
        }
    }

    #[test]
    fn names_are_read_back() {
        for kind in ReduceScatter::ALL {
            assert_eq!(kind.name().parse(), Ok(Wanted::Exactly(kind)));
        }
        assert_eq!("auto".parse(), Ok(Wanted::Auto));
        assert_eq!("One_shot".parse::<Wanted>(), Err(UnknownKind));
    }
}

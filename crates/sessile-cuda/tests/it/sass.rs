//! Machine code as the vendor's disassembler lists it, and what may happen on its paths.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// One instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    /// What the listing says of where it is.
    pub(crate) at: String,
    /// Such as `LDG.E.STRONG.SYS`.
    pub(crate) opcode: String,
    operands: String,
    guarded: bool,
}

impl Instruction {
    /// Whether a part of the opcode between dots is this.
    pub(crate) fn has(&self, part: &str) -> bool {
        self.opcode.split('.').any(|own| own == part)
    }

    /// Whether the opcode begins with this part.
    pub(crate) fn is(&self, first: &str) -> bool {
        self.opcode.split('.').next() == Some(first)
    }

    /// A load of global memory.
    pub(crate) fn loads(&self) -> bool {
        self.is("LDG") || self.is("LD")
    }

    /// A store to global memory.
    pub(crate) fn stores(&self) -> bool {
        self.is("STG") || self.is("ST")
    }

    /// An access that other GPUs see in order with their own.
    pub(crate) fn is_system_wide(&self) -> bool {
        self.has("STRONG") && self.has("SYS")
    }

    /// The constant part of the address, as written: `+0x80`.
    pub(crate) fn displacement(&self) -> &str {
        let inner = self.operands.split('[').next_back().unwrap_or_default();
        let inner = inner.split(']').next().unwrap_or_default();
        inner.find('+').map_or("", |plus| &inner[plus..])
    }

    fn target(&self) -> Option<&str> {
        let after = self.operands.split("`(").nth(1)?;
        after.split(')').next()
    }
}

/// A function: a kernel, or what one calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Function {
    pub(crate) code: Vec<Instruction>,
    labels: BTreeMap<String, usize>,
}

/// A kernel and the functions that were compiled into its section.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) body: Function,
    pub(crate) called: Vec<Function>,
}

/// Kernels by name, from a listing of `nvdisasm -c`.
pub(crate) fn parse(listing: &str) -> BTreeMap<String, Kernel> {
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut name = None;
    for line in listing.lines() {
        if let Some(label) = line.strip_suffix(':').filter(|label| !label.contains(char::is_whitespace)) {
            if let Some(section) = label.strip_prefix(".text.") {
                name = Some(section.to_owned());
                kernels.entry(section.to_owned()).or_default();
                continue;
            }
            let Some(kernel) = name.as_ref().and_then(|name| kernels.get_mut(name)) else { continue };
            if label.starts_with('$') {
                kernel.called.push(Function::default());
            }
            let function = kernel.called.last_mut().unwrap_or(&mut kernel.body);
            function.labels.insert(label.to_owned(), function.code.len());
            continue;
        }
        let Some(kernel) = name.as_ref().and_then(|name| kernels.get_mut(name)) else { continue };
        if let Some(instruction) = instruction(line) {
            kernel.called.last_mut().unwrap_or(&mut kernel.body).code.push(instruction);
        }
    }
    kernels
}

/// `/*0430*/ @!P2 LDG.E.128 R4, desc[UR6][R44.64] ;`
fn instruction(line: &str) -> Option<Instruction> {
    let (at, rest) = line.trim_start().strip_prefix("/*")?.split_once("*/")?;
    let text = rest.split(';').next()?.trim();
    let guarded = text.starts_with('@');
    let text = if guarded { text.split_once(char::is_whitespace)?.1.trim_start() } else { text };
    let (opcode, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    (!opcode.is_empty()).then(|| Instruction {
        at: at.to_owned(),
        opcode: opcode.to_owned(),
        operands: operands.trim().to_owned(),
        guarded,
    })
}

impl Function {
    /// What may run after an instruction. A call comes back.
    fn next(&self, at: usize) -> Vec<usize> {
        let instruction = &self.code[at];
        let mut next = Vec::new();
        let branches = instruction.is("BRA") || instruction.is("BRX") || instruction.is("JMP");
        if branches {
            let target = instruction.target().and_then(|label| self.labels.get(label));
            next.extend(target.copied());
            assert!(
                !next.is_empty(),
                "/*{}*/ a branch to a place that is not in the listing",
                instruction.at
            );
        }
        // `BRA P1, label` and `BRA.DIV UR4, label` have a condition of their own, as `BRA.U.ANY` does.
        let always = !instruction.guarded
            && (instruction.is("EXIT")
                || instruction.is("RET")
                || (branches && instruction.opcode == "BRA" && !instruction.operands.contains(',')));
        if !always && at + 1 < self.code.len() {
            next.push(at + 1);
        }
        next
    }

    /// Where an instruction goes on, if it is a branch that is always taken.
    pub(crate) fn jumps(&self, at: usize) -> Option<usize> {
        match self.next(at)[..] {
            [to] if to != at + 1 => Some(to),
            _ => None,
        }
    }

    /// Whether an instruction may run again.
    pub(crate) fn repeats(&self, at: usize) -> bool {
        let mut seen = BTreeSet::new();
        let mut open = self.next(at);
        while let Some(place) = open.pop() {
            if place == at {
                return true;
            }
            if seen.insert(place) {
                open.extend(self.next(place));
            }
        }
        false
    }

    /// The states in which each instruction may be met, over all paths, if `step` tells what an instruction does to a
    /// state. Conditions are not looked into, so there are more paths than can be taken.
    pub(crate) fn states<S: Copy + Ord>(
        &self,
        first: S,
        step: impl Fn(S, &Instruction) -> S,
    ) -> Vec<BTreeSet<S>> {
        let mut states = vec![BTreeSet::new(); self.code.len()];
        let mut open = vec![(0, first)];
        while let Some((at, state)) = open.pop() {
            if at < states.len() && states[at].insert(state) {
                let after = step(state, &self.code[at]);
                open.extend(self.next(at).into_iter().map(|next| (next, after)));
            }
        }
        states
    }
}

/// The disassembler: beside the folders in `SESSILE_CUDA_LIBS`, as its wheel has it, or on the path.
fn disassembler() -> Option<PathBuf> {
    let folders = |name: &str| -> Vec<PathBuf> {
        std::env::var_os(name).map(|list| std::env::split_paths(&list).collect()).unwrap_or_default()
    };
    let beside = folders("SESSILE_CUDA_LIBS").into_iter().map(|folder| folder.join("../bin"));
    beside.chain(folders("PATH")).map(|folder| folder.join("nvdisasm")).find(|path| path.is_file())
}

/// Whether the disassembler is there; says so if it is not. `SESSILE_NVDISASM=required` makes that a failure.
pub(crate) fn disassembler_is_there(test: &str) -> bool {
    if disassembler().is_some() {
        return true;
    }
    let why = "no nvdisasm: pip install nvidia-cuda-nvdisasm beside nvidia-cuda-nvrtc";
    assert_ne!(std::env::var("SESSILE_NVDISASM").as_deref(), Ok("required"), "{why}");
    eprintln!("skipped: {test}: {why}");
    false
}

/// The kernels in machine code.
pub(crate) fn disassemble(image: &[u8], name: &str) -> BTreeMap<String, Kernel> {
    let program = disassembler().expect("looked for before");
    let file = std::env::temp_dir().join(format!("sessile-{name}-{}.cubin", std::process::id()));
    std::fs::write(&file, image).expect("the folder for temporary files can be written");
    let listed = run(&program, &file);
    std::fs::remove_file(&file).expect("written above");
    parse(&listed)
}

fn run(program: &Path, file: &Path) -> String {
    let output = Command::new(program).arg("-c").arg(file).output().expect("nvdisasm runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

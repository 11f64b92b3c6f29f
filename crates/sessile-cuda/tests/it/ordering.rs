//! Which accesses the one-shot kernels are made of in machine code, and in which order: the compiler's last word on what
//! the protocol rests on. Checks that hold for a kernel follow from its name.

use std::collections::{BTreeMap, BTreeSet};

use sessile_cuda::kernel::compile::{Target, Unit, compile_text};

use crate::kernels::{compiler_is_there, one_shot};
use crate::sass::{Function, Instruction, Kernel, disassemble, disassembler_is_there, parse};

/// The ways of a reduce-scatter, by the first word of a kernel's name.
const KINDS: [&str; 7] = ["push", "pull", "shift", "bulk", "sum", "enter", "leave"];

fn kind(name: &str) -> Option<&'static str> {
    let word = name.strip_prefix("one_shot_")?.split('_').next()?;
    KINDS.into_iter().find(|kind| *kind == word)
}

/// What is wrong with a kernel.
fn faults(name: &str, kernel: &Kernel) -> Vec<String> {
    let Some(kind) = kind(name) else {
        return vec![format!("{name}: of no kind that there are checks for: {KINDS:?}")];
    };
    let body = &kernel.body;
    let mut faults = Vec::new();
    for function in std::iter::once(body).chain(&kernel.called) {
        faults.extend(function.code.iter().filter_map(forbidden));
    }
    faults.extend(kernel.called.iter().filter_map(failure_is_told_last));
    if kind != "sum" {
        // At the entry and at the exit; of packets, when words are brought up to date.
        let many = if matches!(kind, "enter" | "leave") { 1 } else { 2 };
        faults.extend(publishes(body, many));
    }
    if !matches!(kind, "sum" | "push") {
        let many = if matches!(kind, "enter" | "leave") { 1 } else { 2 };
        faults.extend(waits(body, many, kind == "enter"));
    }
    match kind {
        "push" => faults.extend(packets(body)),
        "pull" | "shift" => {
            faults.extend(reads_after_the_entry(body));
            faults.extend(reads_are_known(body));
        }
        "bulk" => {
            faults.extend(copies(body));
            faults.extend(reads_are_known(body));
        }
        "sum" if !body.code.iter().any(reads_data) => {
            faults.push("no 128-bit load that leaves L1 alone".into());
        }
        _ => {}
    }
    faults.into_iter().map(|fault| format!("{name}: {fault}")).collect()
}

/// What no kernel may contain.
fn forbidden(instruction: &Instruction) -> Option<String> {
    let opcode = &instruction.opcode;
    let multicast = ["LDGMC", "STGMC", "REDGMC"].iter().any(|first| instruction.is(first))
        || instruction.has("MC")
        || ["MULTICAST", "MULTIMEM", "UMULTI"].iter().any(|part| opcode.contains(part));
    let atomic = ["RED", "ATOM", "UBLKRED"].iter().any(|first| opcode.starts_with(first));
    let float = opcode.split('.').any(|part| part.starts_with('F') || part.starts_with("BF"));
    let why = if multicast {
        "multicast"
    } else if atomic && float {
        "an atomic on floats"
    } else if instruction.is("FFMA") || instruction.is("DFMA") {
        "a contracted sum"
    } else if instruction.loads() && instruction.has("CONSTANT") {
        "a load as if memory never changed"
    } else {
        return None;
    };
    Some(format!("/*{}*/ {opcode}: {why}", instruction.at))
}

/// A word for others: not a packet.
fn publishes_a_word(instruction: &Instruction) -> bool {
    instruction.stores() && instruction.is_system_wide() && !instruction.has("128")
}

fn reads_data(instruction: &Instruction) -> bool {
    instruction.loads() && instruction.has("NA") && instruction.has("128") && !instruction.has("STRONG")
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    /// Nothing since the kernel began.
    First,
    /// A fence for the whole system.
    Fenced,
    /// Work since the last fence, of this thread or, before a barrier, of others.
    Worked,
}

/// Every word is told after a fence for the whole system with no work between.
fn publishes(body: &Function, many: usize) -> Vec<String> {
    let states = body.states(Order::First, |state, instruction| {
        if instruction.is("MEMBAR") && instruction.has("SYS") {
            if instruction.has("ALL") { Order::Fenced } else { Order::First }
        } else if instruction.is("BAR")
            || instruction.is("ATOMG")
            || instruction.is("UBLKCP")
            || (instruction.stores() && !publishes_a_word(instruction))
            || (instruction.loads() && !instruction.has("STRONG"))
        {
            Order::Worked
        } else {
            state
        }
    });
    let words: Vec<usize> = (0..body.code.len()).filter(|at| publishes_a_word(&body.code[*at])).collect();
    let mut faults = Vec::new();
    if words.len() < many {
        faults.push(format!("{} of {many} words are told by stores that the whole system sees", words.len()));
    }
    let bad = |at: &usize| states[*at].contains(&Order::Worked) || !states[*at].contains(&Order::Fenced);
    let say = |at: usize| {
        format!("/*{}*/ a word is told with no MEMBAR.ALL.SYS after the work before it", body.code[at].at)
    };
    faults.extend(words.into_iter().filter(bad).map(say));
    faults
}

/// Who has waited for a word acquires before anything that rests on it: a barrier, data, copies, and for the kernel that
/// only waits, its end. A wait given up is exempt. `many`: words that are waited for, at the entry and at the exit.
fn waits(body: &Function, many: usize, to_the_end: bool) -> Vec<String> {
    let looks = |instruction: &Instruction| {
        instruction.loads() && instruction.is_system_wide() && !instruction.has("128")
    };
    let code = &body.code;
    // A look that is repeated, and the first of the same word before its loop.
    let words: BTreeSet<&str> = (0..code.len())
        .filter(|at| looks(&code[*at]) && body.repeats(*at))
        .map(|at| code[at].displacement())
        .collect();
    let mut faults = Vec::new();
    if words.len() < many {
        faults.push(format!("{} of {many} waits look by loads that see the whole system", words.len()));
    }
    let polls = |instruction: &Instruction| looks(instruction) && words.contains(instruction.displacement());
    let states = body.states(false, |open, instruction| {
        polls(instruction)
            || (open && !(instruction.is("CALL") || (instruction.is("CCTL") && instruction.has("IVALL"))))
    });
    let rests = |instruction: &Instruction| {
        instruction.is("BAR")
            || instruction.is("UBLKCP")
            || (instruction.loads() && instruction.has("NA"))
            || (to_the_end && instruction.is("EXIT"))
    };
    let say = |at: usize| {
        format!("/*{}*/ {} with no CCTL.IVALL after the wait before it", code[at].at, code[at].opcode)
    };
    faults.extend((0..code.len()).filter(|at| rests(&code[*at]) && states[*at].contains(&true)).map(say));
    faults
}

/// Packets are written and read as one: sent, taken, and their places left empty.
fn packets(body: &Function) -> Vec<String> {
    let whole = |access: &&Instruction| access.has("128") && access.is_system_wide();
    let (loads, stores): (Vec<_>, Vec<_>) = body.code.iter().filter(whole).partition(|access| access.loads());
    let mut faults = Vec::new();
    for (found, many, what) in [(loads.len(), 1, "load"), (stores.len(), 2, "store")] {
        if found < many {
            faults.push(format!("{found} of {many} 128-bit {what}s that the whole system sees as one"));
        }
    }
    let halves = |instruction: &&Instruction| instruction.has("STRONG") && instruction.has("64");
    faults.extend(
        body.code.iter().filter(halves).map(|half| format!("/*{}*/ {}: half a packet", half.at, half.opcode)),
    );
    faults
}

/// Data of peers is read after the barrier behind which the entry is over. The code of a block lies in the order in which
/// a first pass runs it, so places are compared.
fn reads_after_the_entry(body: &Function) -> Vec<String> {
    if !body.code.iter().any(reads_data) {
        return vec!["no 128-bit load that leaves L1 alone".into()];
    }
    let before = body.code.iter().take_while(|instruction| !instruction.is("BAR"));
    let early = before.filter(|instruction| instruction.loads() && instruction.has("NA"));
    early.map(|load| format!("/*{}*/ {} before the entry's barrier", load.at, load.opcode)).collect()
}

/// Behind a barrier, peers hear that they have been read. A barrier does not wait for loads under way, so a store to shared
/// memory does, of what was made of them. The entry's barrier lies before the first load, and is passed once.
fn reads_are_known(body: &Function) -> Vec<String> {
    let states = body.states(false, |open, instruction| {
        (instruction.loads() && instruction.has("NA")) || (open && !instruction.is("STS"))
    });
    let first = body.code.iter().position(|load| load.loads() && load.has("NA")).unwrap_or(0);
    // A warp that has diverged passes a barrier elsewhere and comes back to where the others passed it.
    let main = |at: usize| {
        let branch = (at..body.code.len()).find(|at| body.code[*at].is("BRA"));
        let back = branch.and_then(|at| body.jumps(at)).and_then(|to| to.checked_sub(1));
        back.filter(|to| body.code[*to].is("BAR")).unwrap_or(at)
    };
    let bad = |at: &usize| body.code[*at].is("BAR") && main(*at) >= first && states[*at].contains(&true);
    let barriers = (first..body.code.len()).filter(bad);
    let say = |at: usize| format!("/*{}*/ a barrier with loads under way", body.code[at].at);
    barriers.map(say).collect()
}

/// Between the wait and copies by the bulk engine is a fence of its proxy.
fn copies(body: &Function) -> Vec<String> {
    let states = body.states(false, |fenced, instruction| {
        let looks = instruction.loads() && instruction.is_system_wide();
        (fenced && !looks) || instruction.opcode.starts_with("FENCE.VIEW.ASYNC")
    });
    let copies: Vec<usize> = (0..body.code.len()).filter(|at| body.code[*at].is("UBLKCP")).collect();
    if copies.is_empty() {
        return vec!["no bulk copy".into()];
    }
    let say = |at: usize| {
        format!("/*{}*/ a bulk copy with no FENCE.VIEW.ASYNC after the wait before it", body.code[at].at)
    };
    copies.into_iter().filter(|at| states[*at].contains(&false)).map(say).collect()
}

/// What failed is written after for whom and when.
fn failure_is_told_last(called: &Function) -> Option<String> {
    let words: Vec<usize> = (0..called.code.len()).filter(|at| publishes_a_word(&called.code[*at])).collect();
    let [.., before, last] = words[..] else { return Some("no failure is written down".into()) };
    let fenced = called.code[before..last].iter().any(|fence| fence.is("MEMBAR") && fence.has("SYS"));
    (!fenced).then(|| format!("/*{}*/ a failure is told with no fence before it", called.code[last].at))
}

fn all_faults(kernels: &BTreeMap<String, Kernel>) -> Vec<String> {
    kernels.iter().flat_map(|(name, kernel)| faults(name, kernel)).collect()
}

fn tools_are_there(test: &str) -> bool {
    compiler_is_there(test) && disassembler_is_there(test)
}

#[test]
fn one_shot_kernels_order_their_accesses_in_machine_code() {
    if !tools_are_there("one_shot_kernels_order_their_accesses_in_machine_code") {
        return;
    }
    let kernels = disassemble(&one_shot().image, "one-shot");
    let kinds: BTreeSet<_> = kernels.keys().filter_map(|name| kind(name)).collect();
    assert_eq!(kinds.len(), KINDS.len(), "{kinds:?}");
    let faults = all_faults(&kernels);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    println!("{} kernels", kernels.len());
}

/// The kernels for two ranks and BF16, and those that stand alone, with what a test changes.
fn changed(name: &str, from: &str, to: &str) -> Vec<String> {
    let source = Unit::OneShot.source();
    assert!(source.contains(from), "{from}");
    let others = |line: &&str| !line.starts_with("WAYS(") || line.starts_with("WAYS(bf16, u16, 2,");
    let text: String =
        source.replace(from, to).lines().filter(others).flat_map(|line| [line, "\n"]).collect();
    let compiled = compile_text(&text, Unit::OneShot, Target { capability: (9, 0) });
    let kernels = disassemble(&compiled.unwrap_or_else(|why| panic!("{why}")).image, name);
    assert!(kernels.len() >= KINDS.len(), "{:?}", kernels.keys());
    all_faults(&kernels)
}

#[test]
fn a_changed_kernel_does_not_pass() {
    if !tools_are_there("a_changed_kernel_does_not_pass") {
        return;
    }
    assert_eq!(changed("same", "st.release.sys", "st.release.sys"), Vec::<String>::new());
    // What is changed, and what is said of which kernels.
    let cases: [(&str, &str, &str, &[&str]); 16] = [
        (
            "st.release.sys",
            "st.relaxed.sys",
            "no MEMBAR.ALL.SYS",
            &["push", "pull", "shift", "bulk", "leave"],
        ),
        (
            "st.release.sys.global",
            "st.global",
            "words are told by",
            &["push", "pull", "shift", "bulk", "leave"],
        ),
        (
            "st.relaxed.sys.global.u32",
            "st.global.u32",
            "words are told by",
            &["pull", "shift", "bulk", "enter"],
        ),
        ("ld.acquire.sys", "ld.relaxed.sys", "no CCTL.IVALL", &["pull", "shift", "bulk", "enter"]),
        ("fence.acq_rel.sys;", "", "no MEMBAR.ALL.SYS", &["pull", "shift", "bulk", "enter"]),
        ("ld.relaxed.sys.global.u32", "ld.global.u32", "1 of 2 waits look", &["pull", "shift", "bulk"]),
        ("ld.relaxed.sys.global.u32", "ld.global.u32", "0 of 1 waits look", &["leave"]),
        ("ld.acquire.sys.global.u32", "ld.global.u32", "waits look", &["pull", "shift", "bulk", "enter"]),
        ("ld.global.L1::no_allocate.v4", "ld.global.nc.v4", "never changed", &["pull", "shift", "sum"]),
        ("ld.global.L1::no_allocate.v4", "ld.global.v4", "leaves L1 alone", &["pull", "shift", "sum"]),
        ("st.relaxed.sys.global.b128", "st.global.b128", "of 2 128-bit stores", &["push"]),
        ("ld.relaxed.sys.global.b128", "ld.global.b128", "of 1 128-bit loads", &["push"]),
        ("known<THREADS>(all);", "", "loads under way", &["pull", "shift"]),
        ("known<P + 32>(__float_as_uint(end_sum));", "", "loads under way", &["bulk"]),
        ("fence.proxy.async;", "", "no FENCE.VIEW.ASYNC", &["bulk"]),
        (
            "return store ? x : m + x;",
            "return store ? x : fmaf(scale, s, m);",
            "contracted",
            &["push", "pull", "shift", "bulk", "sum"],
        ),
    ];
    for (number, (from, to, said, of)) in cases.into_iter().enumerate() {
        let faults = changed(&format!("changed-{number}"), from, to);
        for kind in of {
            let about = format!("one_shot_{kind}");
            assert!(
                faults.iter().any(|fault| fault.starts_with(&about) && fault.contains(said)),
                "{from} -> {to}: {kind}: {faults:#?}"
            );
        }
    }
}

/// Instructions that are in no kernel made from the source, by one change or by any.
#[test]
fn what_no_kernel_may_contain_is_found_in_a_listing() {
    let listing = |body: &str| format!(".text.one_shot_pull_bf16_2:\n{body}\n        /*ff*/ EXIT ;\n");
    let cases = [
        ("/*10*/ LDGMC.E.ADD.F32.RN.STRONG.SYS R5, [R2.64+URZ] ;", "multicast"),
        ("/*10*/ UBLKCP.S.G.MULTICAST [UR6], [UR4], UR8 ;", "multicast"),
        ("/*10*/ REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], RZ ;", "an atomic on floats"),
        ("/*10*/ REDG.E.ADD.BF16x2.RN.STRONG.GPU desc[UR4][R2.64], R5 ;", "an atomic on floats"),
        ("/*10*/ UBLKRED.G.S.ADD.F32.RN [UR4], [UR6], UR7 ;", "an atomic on floats"),
        ("/*10*/ @!P0 FFMA R4, R5, R6, R7 ;", "a contracted sum"),
        ("/*10*/ @P1 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;", "never changed"),
        (
            "/*10*/ @P1 LDG.E.NA.128 R4, desc[UR4][R2.64] ;\n/*20*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;",
            "before the entry's barrier",
        ),
        (
            "/*10*/ MEMBAR.ALL.SYS ;\n/*20*/ BAR.SYNC 0x0 ;\n/*30*/ STG.E.STRONG.SYS desc[UR6][R6.64+0x100], R0 ;",
            "/*30*/ a word is told",
        ),
        (
            ".L_x_1:\n/*10*/ LDG.E.STRONG.SYS R7, desc[UR6][R10.64+0x80] ;\n/*20*/ @!P0 BRA `(.L_x_1) ;\n\
             /*30*/ @P1 BRA `(.L_x_2) ;\n/*40*/ CCTL.IVALL ;\n.L_x_2:\n/*50*/ BAR.SYNC.DEFER_BLOCKING 0x0 ;",
            "/*50*/ BAR.SYNC.DEFER_BLOCKING with no CCTL.IVALL",
        ),
    ];
    for (body, said) in cases {
        let faults = all_faults(&parse(&listing(body)));
        assert!(faults.iter().any(|fault| fault.contains(said)), "{body}: {faults:#?}");
    }
    let integers = parse(&listing("/*10*/ ATOMG.E.ADD.STRONG.GPU PT, R6, desc[UR6][R2.64+0xc], R7 ;"));
    assert!(!all_faults(&integers).iter().any(|fault| fault.contains("atomic")));
}

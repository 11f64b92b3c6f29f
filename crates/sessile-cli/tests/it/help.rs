//! Help is part of the interface: snapshots.

use crate::sandbox::Sandbox;

#[test]
fn help_of_the_program_and_each_command() {
    let sandbox = Sandbox::new();
    for command in [
        "",
        "train",
        "plan",
        "compare",
        "check",
        "simulate",
        "report",
        "doctor",
        "bench graphs",
        "bench reduce-scatter",
    ] {
        let text = sandbox.run(&format!("{command} --help")).good();
        let name = if command.is_empty() { "program" } else { command };
        insta::assert_snapshot!(format!("help_{}", name.replace([' ', '-'], "_")), text);
    }
}

#[test]
fn no_output_has_colour_where_none_is_wanted() {
    let sandbox = Sandbox::new();
    for line in ["--help", "train --help", "plan trace.json", "compare trace.json", "train --steps x"] {
        let ran = sandbox.run(line);
        assert!(!ran.stdout.contains('\x1b') && !ran.stderr.contains('\x1b'), "{line}");
    }
}

#[test]
fn no_command_is_bad_input() {
    assert_eq!(Sandbox::new().run("").code, 2);
    assert_eq!(Sandbox::new().run("tarin").code, 2);
}

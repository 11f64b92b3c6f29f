//! A folder of its own for each test, and the program run in it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use assert_cmd::Command;
use tempfile::TempDir;

/// A trace of two layers' backwards: 4 runners, 12 requests.
pub(crate) const TRACE: &str = include_str!("../data/two-layers.trace.json");

/// A folder that goes away with the test.
pub(crate) struct Sandbox {
    folder: TempDir,
}

/// What a run of the program gave.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Sandbox {
    /// A folder with the trace in `trace.json`.
    pub(crate) fn new() -> Sandbox {
        let sandbox = Sandbox { folder: tempfile::tempdir().unwrap() };
        sandbox.write("trace.json", TRACE);
        sandbox
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// Names of all files, hidden ones too.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Runs the program in the folder; `line` is split at spaces.
    pub(crate) fn run(&self, line: &str) -> Ran {
        self.run_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    /// Runs the program in the folder.
    pub(crate) fn run_words(&self, words: &[&str]) -> Ran {
        let mut command = Command::new(program());
        command.args(words).current_dir(self.folder.path()).env("COLUMNS", "110");
        // The same everywhere: no GPU.
        command.env("CUDA_VISIBLE_DEVICES", "-1");
        let output = command.output().unwrap();
        Ran {
            code: output.status.code().expect("the program ends by itself"),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// The program under test.
pub(crate) fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_sessile"))
}

impl Ran {
    /// Stdout of a run that ended well.
    pub(crate) fn good(self) -> String {
        assert_eq!(self.code, 0, "{}\n{}", self.stdout, self.stderr);
        self.stdout
    }
}

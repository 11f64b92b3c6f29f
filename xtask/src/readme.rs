//! The README's commands are true: blocks marked `<!-- test -->` are run.

use std::process::Command;

use anyhow::{Context, Result};

use crate::{say::say, tally::Tally, tree::Tree};

const FILE: &str = "README.md";
const MARK: &str = "<!-- test -->";

/// Runs each marked block with bash in the root folder.
pub(crate) fn run(tree: &Tree, tally: &mut Tally) -> Result<()> {
    let text = tree.read(FILE)?.unwrap_or_default();
    let blocks = match blocks(&text) {
        Ok(blocks) => blocks,
        Err(finding) => {
            tally.findings("readme", &[finding]);
            return Ok(());
        }
    };
    for block in blocks {
        let name = format!("readme line {}", block.line);
        say(&format!("$ {}", block.commands.trim_end().replace('\n', "\n$ ")));
        let mut command = Command::new("bash");
        command.args(["-euo", "pipefail", "-c", &block.commands]).current_dir(tree.root());
        let status = command.status().context("cannot start bash")?;
        tally.one(&name, status.success());
    }
    Ok(())
}

/// A block of commands.
#[derive(Debug, PartialEq, Eq)]
struct Block {
    /// Where it begins, from 1.
    line: usize,
    commands: String,
}

/// All marked blocks. That there is none, or that a mark has no block, is a finding.
fn blocks(text: &str) -> Result<Vec<Block>, String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.trim() != MARK {
            continue;
        }
        match lines.find(|(_, line)| !line.trim().is_empty()) {
            Some((_, "```sh")) => {}
            _ => return Err(format!("{FILE}:{}: no ```sh block after the mark", number + 1)),
        }
        let mut commands = String::new();
        loop {
            match lines.next() {
                Some((_, "```")) => break,
                Some((_, line)) => commands.extend([line, "\n"]),
                None => return Err(format!("{FILE}:{}: the block does not end", number + 1)),
            }
        }
        blocks.push(Block { line: number + 2, commands });
    }
    if blocks.is_empty() { Err(format!("{FILE}: no block is marked {MARK}")) } else { Ok(blocks) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_blocks_are_found_and_others_are_not() {
        let text = "a\n```sh\nfalse\n```\n<!-- test -->\n```sh\ntrue\necho 1\n```\n";
        assert_eq!(blocks(text).unwrap(), [Block { line: 6, commands: "true\necho 1\n".into() }]);
    }

    #[test]
    fn a_mark_without_a_block_and_a_page_without_marks_fail() {
        for text in [
            "",
            "```sh\ntrue\n```\n",
            "<!-- test -->\n",
            "<!-- test -->\n\ntext\n",
            "<!-- test -->\n```sh\ntrue\n",
        ] {
            assert!(blocks(text).is_err(), "{text}");
        }
    }
}

//! The working tree: where it is and which source files it has.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// A text file of the tree.
#[derive(Debug)]
pub(crate) struct Source {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    /// Its text.
    pub(crate) text: String,
}

#[cfg(test)]
impl Source {
    /// A file for a test.
    pub(crate) fn new(path: &str, text: &str) -> Source {
        Source { path: path.to_owned(), text: text.to_owned() }
    }
}

/// The working tree.
#[derive(Debug)]
pub(crate) struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The tree that this program was built from.
    pub(crate) fn here() -> Result<Tree> {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies in the root's folder")?;
        Ok(Tree { root: root.to_owned() })
    }

    /// The root folder.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A file's text, if the file exists.
    pub(crate) fn read(&self, path: &str) -> Result<Option<String>> {
        let full = self.root.join(path);
        if !full.exists() {
            return Ok(None);
        }
        fs::read_to_string(&full).map(Some).with_context(|| format!("cannot read {}", full.display()))
    }

    /// All files with one of these extensions, sorted; build outputs and hidden folders left out.
    pub(crate) fn sources(&self, extensions: &[&str]) -> Result<Vec<Source>> {
        let mut sources = Vec::new();
        self.walk(&self.root, extensions, &mut sources)?;
        sources.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(sources)
    }

    fn walk(&self, folder: &Path, extensions: &[&str], sources: &mut Vec<Source>) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_symlink() || name.starts_with('.') || name == "target" || name == "out" {
                continue;
            }
            if path.is_dir() {
                self.walk(&path, extensions, sources)?;
            } else if path.extension().is_some_and(|e| extensions.iter().any(|x| e == *x)) {
                let text =
                    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                let relative = path.strip_prefix(&self.root)?.to_string_lossy().replace('\\', "/");
                sources.push(Source { path: relative, text });
            }
        }
        Ok(())
    }
}

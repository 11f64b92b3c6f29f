//! Files that the user wants written: checked before a run begins, whole or absent after it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::{failure::Failure, special};

/// A place for one file, known to be writable.
#[derive(Debug)]
pub(crate) struct Output {
    option: &'static str,
    /// As the user wrote it.
    shown: PathBuf,
    place: Place,
}

/// How the bytes get there.
#[derive(Debug)]
enum Place {
    /// A file beside the target, renamed over it at the end.
    Rename(PathBuf),
    /// A device or one of this program's own files, which must not be renamed over.
    Direct(PathBuf),
    /// Stdout, however it was opened. By name a file would be written from its start, under what stdout has.
    Stdout,
    /// Stderr, likewise.
    Stderr,
}

/// Checks that all paths given can be written, are different, and are none of the inputs.
///
/// # Errors
/// The first that cannot, with option, path and remedy. Nothing is left behind and nothing is changed.
pub(crate) fn prepare<const N: usize>(
    wanted: [(&'static str, Option<&Path>); N],
    inputs: &[&Path],
) -> Result<[Option<Output>; N], Failure> {
    let mut taken: Vec<(PathBuf, &'static str)> = Vec::new();
    let mut outputs = [const { None }; N];
    for (slot, (option, path)) in outputs.iter_mut().zip(wanted) {
        let Some(path) = path else { continue };
        let output = Output::probe(option, path)?;
        if let Place::Rename(target) = &output.place {
            if let Some((_, other)) = taken.iter().find(|(other, _)| other == target) {
                return Err(fail(option, path, &format!("is also the file of {other}: name another file")));
            }
            if inputs.iter().any(|input| input.canonicalize().is_ok_and(|input| input == *target)) {
                return Err(fail(option, path, "is the file that is read: name another file"));
            }
            taken.push((target.clone(), option));
        }
        *slot = Some(output);
    }
    Ok(outputs)
}

/// Writes all files beside their targets, then renames them: a failure leaves none of them half-written.
///
/// # Errors
/// The first that could not be written.
pub(crate) fn write_all(files: Vec<(Output, Vec<u8>)>) -> Result<(), Failure> {
    let mut written = Vec::new();
    for (output, bytes) in &files {
        written.push(output.write(bytes).map_err(|error| output.failed(&error))?);
    }
    for ((output, _), written) in files.iter().zip(written) {
        let (Some(file), Place::Rename(target)) = (written, &output.place) else { continue };
        file.persist(target).map_err(|error| output.failed(&error.error))?;
    }
    Ok(())
}

fn fail(option: &str, path: &Path, why: &str) -> Failure {
    Failure::Input(format!("{option} {} {why}", path.display()))
}

impl Place {
    /// Decides without touching anything; or why nothing may be written there.
    fn of(path: &Path) -> Result<Place, String> {
        // Follows links, those of /proc too, whose targets no path names.
        let found = match fs::metadata(path) {
            Ok(found) => found,
            Err(error) if path.symlink_metadata().is_ok() => {
                return Err(format!("is a link that leads nowhere ({error}): name a file"));
            }
            Err(_) => return Ok(Place::Rename(absolute(path)?)),
        };
        let kind = found.file_type();
        match special::descriptor(path) {
            _ if kind.is_dir() => Err("is a folder: name a file".to_owned()),
            Some(1) => Ok(Place::Stdout),
            Some(2) => Ok(Place::Stderr),
            Some(_) => Ok(Place::Direct(path.to_owned())),
            None if special::is_character_device(kind) => Ok(Place::Direct(path.to_owned())),
            None if kind.is_file() => {
                // A link's target is what is replaced, not the link.
                let target = path.canonicalize().map_err(|error| {
                    format!("cannot be written (its place is not known: {error}): name another file")
                })?;
                Ok(Place::Rename(target))
            }
            None => Err(format!(
                "is {}: name a regular file, or /dev/stdout to write into a pipe",
                special::kind_name(kind)
            )),
        }
    }
}

impl Output {
    /// Tries the path out and leaves it as it was.
    fn probe(option: &'static str, path: &Path) -> Result<Output, Failure> {
        let fail = |why: &str| fail(option, path, why);
        if path.as_os_str().is_empty() {
            return Err(fail("is empty: name a file"));
        }
        let place = Place::of(path).map_err(|why| fail(&why))?;
        let output = Output { option, shown: path.to_owned(), place };
        let opened = match &output.place {
            // A pipe whose reader has gone would block here.
            Place::Direct(path) if special::descriptor(path).is_none() => Some(path),
            Place::Rename(target) if target.exists() => Some(target),
            _ => None,
        };
        if let Some(path) = opened {
            let opened = OpenOptions::new().append(true).open(path);
            opened.map_err(|error| fail(&format!("cannot be written ({error}): name another file")))?;
        }
        if let Place::Rename(target) = &output.place {
            let probe = beside(target).and_then(|file| file.close());
            probe.map_err(|error| {
                fail(&format!("cannot be written ({error}): name a file in a folder that can be written to"))
            })?;
        }
        Ok(output)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<Option<NamedTempFile>> {
        match &self.place {
            Place::Rename(target) => {
                let mut file = beside(target)?;
                file.write_all(bytes)?;
                file.flush()?;
                Ok(Some(file))
            }
            Place::Stdout => into(io::stdout().lock(), bytes),
            Place::Stderr => into(io::stderr().lock(), bytes),
            Place::Direct(path) => into(BufWriter::new(File::options().append(true).open(path)?), bytes),
        }
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::Run(format!(
            "{} {} could not be written: {error}; free some space or name another file",
            self.option,
            self.shown.display()
        ))
    }
}

fn into(mut file: impl Write, bytes: &[u8]) -> io::Result<Option<NamedTempFile>> {
    file.write_all(bytes)?;
    file.flush()?;
    Ok(None)
}

/// The path with its folder resolved, so that two spellings of one file are the same.
fn absolute(target: &Path) -> Result<PathBuf, String> {
    let name = target.file_name().ok_or("has no file name: name a file")?;
    let folder = match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let folder = folder.canonicalize().map_err(|error| {
        format!("cannot be written (folder {}: {error}): make the folder first", folder.display())
    })?;
    Ok(folder.join(name))
}

/// A temporary file in the target's folder, with the mode that a new file gets.
fn beside(target: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".sessile-").suffix(".tmp");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(target.parent().unwrap_or(Path::new(".")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_prepared_file_does_not_exist_until_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let [output] = prepare([("--json", Some(&path))], &[]).unwrap();
        assert_eq!(names(folder.path()), [""; 0]);
        write_all(vec![(output.unwrap(), b"x".to_vec())]).unwrap();
        assert_eq!(names(folder.path()), ["a.json"]);
        assert_eq!(fs::read(path).unwrap(), b"x");
    }

    #[test]
    fn an_existing_file_is_kept_until_it_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        fs::write(&path, "old").unwrap();
        let [output] = prepare([("--json", Some(&path))], &[]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        write_all(vec![(output.unwrap(), b"new".to_vec())]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn one_file_for_two_options_is_refused_in_any_spelling() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join(".").join("a"));
        let error = prepare([("--json", Some(&a)), ("--log-out", Some(&b))], &[]).unwrap_err();
        assert!(error.to_string().contains("is also the file of --json"), "{error}");
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[test]
    fn an_input_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        fs::write(&path, "{}").unwrap();
        let error = prepare([("--out", Some(&path))], &[&path]).unwrap_err();
        assert!(error.to_string().contains("is the file that is read"), "{error}");
    }

    #[test]
    fn a_folder_that_is_missing_or_the_target_itself_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("b").join("a.json");
        for path in [folder.path(), &missing, Path::new("")] {
            assert!(prepare([("--json", Some(path))], &[]).is_err(), "{}", path.display());
        }
        assert_eq!(names(folder.path()), [""; 0]);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_no_regular_file_is_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        std::os::unix::fs::symlink(at("fifo"), at("link")).unwrap();
        std::os::unix::fs::symlink(at("nothing"), at("dangling")).unwrap();
        let before = names(folder.path());
        let cases =
            [("fifo", "a FIFO"), ("link", "a FIFO"), ("socket", "a socket"), ("dangling", "leads nowhere")];
        for (name, why) in cases {
            let error = prepare([("--json", Some(&at(name)))], &[]).unwrap_err();
            assert!(matches!(error, Failure::Input(_)) && error.to_string().contains(why), "{name}: {error}");
        }
        assert_eq!(names(folder.path()), before);
        assert!(matches!(Place::of(Path::new("/dev/null")), Ok(Place::Direct(_))));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_programs_own_files_are_written_directly_whatever_they_are() {
        assert!(matches!(Place::of(Path::new("/dev/stdout")), Ok(Place::Stdout)));
        assert!(matches!(Place::of(Path::new("/proc/self/fd/2")), Ok(Place::Stderr)));
        assert!(matches!(Place::of(Path::new("/dev/fd/0")), Ok(Place::Direct(_))));
    }
}

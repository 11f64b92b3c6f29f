//! What is at a path that is no regular file.

use std::{fs::FileType, path::Path};

/// The number that a path such as `/dev/stdout` or `/proc/self/fd/3` gives to one of this program's own files.
pub(crate) fn descriptor(path: &Path) -> Option<u32> {
    match path.to_str()? {
        "/dev/stdin" => Some(0),
        "/dev/stdout" => Some(1),
        "/dev/stderr" => Some(2),
        path => {
            let number = path.strip_prefix("/dev/fd/").or_else(|| path.strip_prefix("/proc/self/fd/"))?;
            number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())?
        }
    }
}

/// Whether this is a device of characters, such as a terminal or `/dev/null`.
pub(crate) fn is_character_device(kind: FileType) -> bool {
    #[cfg(unix)]
    {
        std::os::unix::fs::FileTypeExt::is_char_device(&kind)
    }
    #[cfg(not(unix))]
    {
        let _ = kind;
        false
    }
}

/// The kind, for messages.
pub(crate) fn kind_name(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a FIFO";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    let _ = kind;
    "no regular file"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_paths_of_descriptors_have_a_number() {
        let number = |path: &str| descriptor(Path::new(path));
        assert_eq!(number("/dev/stdout"), Some(1));
        assert_eq!(number("/dev/fd/63"), Some(63));
        assert_eq!(number("/proc/self/fd/2"), Some(2));
        for path in ["/dev/fd/", "/dev/fd/+1", "/dev/fd/1/x", "stdout", "/dev/null"] {
            assert_eq!(number(path), None, "{path}");
        }
    }
}

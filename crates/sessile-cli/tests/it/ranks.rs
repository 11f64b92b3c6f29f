//! Processes that are ranks of a job, on a machine without a GPU: how they end.

use std::{
    net::TcpListener,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::sandbox::{Sandbox, program};

/// A rank of a job of two that meets at the port.
fn rank(sandbox: &Sandbox, rank: u32, port: u16, line: &str) -> Command {
    let mut command = Command::new(program());
    command
        .args(line.split_whitespace())
        .current_dir(sandbox.path(""))
        .env("CUDA_VISIBLE_DEVICES", "-1")
        .envs([("RANK", rank.to_string()), ("LOCAL_RANK", rank.to_string())])
        .envs([("WORLD_SIZE", "2".to_owned()), ("MASTER_ADDR", "127.0.0.1".to_owned())])
        .envs([("MASTER_PORT", port.to_string())])
        .env("SESSILE_JOB_SECRET", "a secret of these tests")
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

const LINES: [&str; 2] =
    ["train --device cuda --data no-such-file --timeout 60", "bench graphs --device cuda --timeout 60"];

/// Exit status 2 and one message.
#[track_caller]
fn refused(output: &Output) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.matches("error:").count(), 1, "{stderr}");
}

/// Bug: the others waited for it until their deadline. Cause: it ended before it had met them.
#[test]
fn a_rank_that_can_t_begin_goes_to_the_others_before_it_ends() {
    let sandbox = Sandbox::new();
    for line in LINES {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut child = rank(&sandbox, 1, port, line).spawn().unwrap();
        let came = loop {
            if let Ok((stream, _)) = listener.accept() {
                break Some(stream);
            }
            if child.try_wait().unwrap().is_some() {
                break None;
            }
            thread::sleep(Duration::from_millis(5));
        };
        assert!(came.is_some(), "`{line}` ended without a word to rank 0");
        drop(came);
        refused(&child.wait_with_output().unwrap());
    }
}

#[test]
fn ranks_none_of_which_can_begin_end_at_once() {
    let sandbox = Sandbox::new();
    for line in LINES {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let begin = Instant::now();
        let children: Vec<_> =
            [1, 0].into_iter().map(|at| rank(&sandbox, at, port, line).spawn().unwrap()).collect();
        children.into_iter().for_each(|child| refused(&child.wait_with_output().unwrap()));
        // One that looks for the other in vain takes longer.
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}

#[test]
fn a_part_of_a_measurement_does_not_outlive_what_started_it() {
    let mut command = Command::new(program());
    // Nobody's process.
    command.args(["bench", "reduce-scatter", "--part"]).env("SESSILE_LAUNCHER", u32::MAX.to_string());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("launcher") && stderr.contains("has gone"), "{stderr}");
}

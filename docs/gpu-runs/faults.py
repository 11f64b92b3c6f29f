"""Runs in which something goes wrong on purpose: processes are started, one is harmed, and what the others do is noted.

Each run gets a `Stage`, and gives back what it found: figures, with `expected`, what should happen, and `as_expected`.
"""

import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SECRET = "of a run that is recorded"
# In the environment of what a run starts: whose family it is.
FAMILY = "SESSILE_RECORDED_AS"
# Seconds of replay before something happens.
REPLAYING = 3
# Who started a process, and where libraries are.
STARTED_BY = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SESSILE_JOB_SECRET"]
LIBRARIES = ["SESSILE_CUDA_LIBS", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"]


class Late(Exception):
    """A run took longer than it may."""


class Stage:
    """Processes of a run, and their output. All end with it, and what they started."""

    def __init__(self, program, limit):
        self.program = pathlib.Path(program).resolve()
        self.until = time.monotonic() + limit
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="sessile-fault-"))
        self.processes = {}
        self.order = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name, process in self.processes.items():
            for pid in self.family(name):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
        shutil.rmtree(self.folder)

    def start(self, name, words, without=(), **variables):
        """Starts a process; what it writes is kept under its name."""
        environment = {key: value for key, value in os.environ.items() if key not in (*STARTED_BY, *without)}
        environment[FAMILY] = f"{self.folder}/{name}"
        self.order.append(name)
        with open(self.folder / name, "wb") as output:
            self.processes[name] = subprocess.Popen(
                [str(word) for word in words], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment | {key: str(value) for key, value in variables.items()})
        return self.processes[name]

    def train(self, name, options, without=(), **variables):
        return self.start(name, [self.program, "train", "--device", "cuda", *shlex.split(options)], without, **variables)

    def hog(self, what, gpu, *more):
        """Takes a GPU's memory or time, and waits until it has them."""
        name = f"hog-{gpu}"
        self.start(name, [sys.executable, HERE / "hog.py", what, gpu, *more])
        self.wait_for(name, "holding")

    def output(self, name):
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")

    def wait_for(self, name, text):
        """Waits until a process has written a text."""
        while text not in self.output(name):
            if self.processes[name].poll() is not None and text not in self.output(name):
                raise Late(f"{name} ended before it wrote {text!r}")
            self.pause(f"{name} did not write {text!r}")

    def pause(self, what):
        if time.monotonic() > self.until:
            raise Late(what)
        time.sleep(0.01)

    def family(self, name):
        """A process and what it started, as far as they still run: launchers give their ranks other sessions."""
        mark, running = f"{FAMILY}={self.folder}/{name}".encode(), []
        for environ in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                # Empty once a process has ended.
                if mark in environ.read_bytes().split(b"\0"):
                    running.append(int(environ.parent.name))
            except OSError:
                continue
        return running

    def rank(self, name, rank):
        """The process of a rank that `--launch` started."""
        for pid in self.family(name):
            if pid != self.processes[name].pid:
                variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return pid
        raise Late(f"{name} has no rank {rank}")

    def ended(self, *names):
        """Waits until they and what they started have gone; their exit statuses."""
        while True:
            exits = {name: self.processes[name].poll() for name in names}
            if None not in exits.values() and not any(map(self.family, names)):
                return exits
            self.pause(f"{', '.join(names)}: still running")

    def log(self):
        return "".join(f"=== {name}\n{self.output(name)}" for name in self.order)

    def errors(self, *names):
        """What processes say of what went wrong."""
        return [line for name in names for line in self.output(name).split("\n") if line.startswith("error")]


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def by_hand(rank, port, secret=SECRET):
    """What a launcher would set for one of two ranks."""
    return {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "SESSILE_JOB_SECRET": secret}


def found(expected, as_expected, exits, seconds, **more):
    return {"expected": expected, "as_expected": as_expected, "exits": exits, "seconds": round(seconds, 2), **more}


SHORT = "--layers 4 --mtp 2 --graph-heads --gtp 2 --steps 20 --reduce-scatter one_shot"


def kill(stage, ranks, who, more=""):
    stage.train("job", f"--launch {ranks} {more} --gtp {ranks} --steps 100000 --mode graphs --reduce-scatter one_shot")
    stage.wait_for("job", "runners captured")
    time.sleep(REPLAYING)
    victim = stage.processes["job"].pid if who is None else stage.rank("job", who)
    begin = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    exits = stage.ended("job")
    seconds = time.monotonic() - begin
    errors = stage.errors("job")
    if who is None:
        return found("all ranks end with their launcher", seconds < 10, exits, seconds, errors=errors)
    named = any(f"rank {who} ended by itself" in line for line in errors)
    told = ranks == 1 or any(f"peer rank {who} has gone" in line for line in errors)
    expected = "the others say which rank has gone, and all end with exit status 1 in less than 30 s"
    return found(expected, exits["job"] == 1 and named and told and seconds < 30, exits, seconds, errors=errors)


def full(stage, ranks, gpus, more):
    # The eager steps have their memory by then; what comes after them, communicators and arenas, has not.
    stage.train("job", f"--launch {ranks} {more} --gtp {ranks} --layers 4 --hidden 1024 --heads 8 --steps 12 --timeout 60")
    stage.wait_for("job", "eager step")
    begin = time.monotonic()
    stage.hog("eat", gpus - 1, 64)
    exits = stage.ended("job")
    seconds = time.monotonic() - begin
    errors = stage.errors("job")
    words = "no memory for|could not make the communicator|out of memory|does not fit"
    # Of ranks that share a GPU any may be the first that gets none.
    last = range(ranks) if more else [ranks - 1]
    said = any(f"rank {rank}: " in line and re.search(words, line) for line in errors for rank in last)
    told = all(any(line.startswith(f"error: rank {rank}: ") for line in errors) for rank in range(ranks))
    expected = "who had no memory says for what, the others what it said, exit status 1 before anybody's time is over"
    return found(expected, exits["job"] == 1 and said and told and seconds < 30, exits, seconds, errors=errors)


def busy(stage):
    seconds = {}
    for when in ["alone", "busy"]:
        if when == "busy":
            stage.hog("busy", 0)
            stage.hog("busy", 1)
        begin = time.monotonic()
        stage.train(when, f"--launch 2 {SHORT}")
        exits = stage.ended(when)
        seconds[when] = round(time.monotonic() - begin, 2)
    good = exits["busy"] == 0 and "equal to the bit" in stage.output("busy")
    return found("the run ends well, with equal bits, later", good, exits, seconds["busy"], alone=seconds["alone"],
                 errors=stage.errors("alone", "busy"))


def no_library(stage):
    begin = time.monotonic()
    stage.train("job", f"--launch 2 {SHORT}", LIBRARIES, SESSILE_CUDA_LIBS=stage.folder)
    exits = stage.ended("job")
    errors = stage.errors("job")
    refused = exits["job"] == 2 and any("To get it:" in line for line in errors)
    expected = "exit status 2 and how to get the library; or a good run, where the loader finds the libraries by itself"
    return found(expected, refused or exits["job"] == 0, exits, time.monotonic() - begin, errors=errors)


def another_nccl(stage):
    """A library that is no NCCL under its name."""
    folder = stage.folder / "libraries"
    folder.mkdir()
    library = next(path for folder in ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64"]
                   for path in pathlib.Path(folder).glob("libm.so.6"))
    shutil.copy(library, folder / "libnccl.so.2")
    others = os.environ.get("SESSILE_CUDA_LIBS", "")
    begin = time.monotonic()
    stage.train("job", f"--launch 2 {SHORT}", SESSILE_CUDA_LIBS=f"{folder}:{others}")
    exits = stage.ended("job")
    errors = stage.errors("job")
    named = any("no NCCL" in line and "2.27" in line for line in errors)
    expected = "exit status 2, and that it has not the functions of NCCL 2.27"
    return found(expected, exits["job"] == 2 and named, exits, time.monotonic() - begin, errors=errors)


def strangers(stage):
    """Others come to the job's port: random bytes, HTTP, some that say nothing and stay, one with another secret."""
    at = port()
    begin = time.monotonic()
    stage.train("rank-0", f"{SHORT} --timeout 120", **by_hand(0, at))
    while True:
        try:
            socket.create_connection(("127.0.0.1", at), 1).close()
            break
        except OSError:
            if stage.processes["rank-0"].poll() is not None:
                raise Late("rank-0 ended before it listened") from None
            stage.pause("rank-0 does not listen")
    silent = [socket.create_connection(("127.0.0.1", at), 5) for _ in range(100)]
    for count in range(20):
        with socket.create_connection(("127.0.0.1", at), 5) as s:
            s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" if count == 0 else os.urandom(4096))
    stage.train("intruder", f"{SHORT} --timeout 60", **by_hand(1, at, "another secret that is long enough"))
    intruder = stage.ended("intruder")
    stage.train("rank-1", f"{SHORT} --timeout 120", **by_hand(1, at))
    exits = stage.ended("rank-0", "rank-1") | intruder
    for s in silent:
        s.close()
    asked = any("is the secret the same" in line for line in stage.errors("intruder"))
    good = exits["rank-0"] == exits["rank-1"] == 0 and exits["intruder"] == 1 and asked
    expected = "all are turned away, the one with another secret is asked for it, and the job runs"
    return found(expected, good, exits, time.monotonic() - begin, errors=stage.errors(*stage.order))


def alone_with_another_secret(stage):
    at = port()
    begin = time.monotonic()
    stage.train("rank-0", f"{SHORT} --timeout 15", **by_hand(0, at))
    stage.train("rank-1", f"{SHORT} --timeout 15", **by_hand(1, at, "another secret that is long enough"))
    exits = stage.ended("rank-0", "rank-1")
    seconds = time.monotonic() - begin
    asked = any("is the secret the same" in line for line in stage.errors("rank-1"))
    waited = any("waited" in line and "rank 1" in line for line in stage.errors("rank-0"))
    good = list(exits.values()) == [1, 1] and asked and waited and seconds < 60
    expected = "rank 1 is asked for its secret, rank 0 says whom it waited for; exit status 1 of both"
    return found(expected, good, exits, seconds, errors=stage.errors(*stage.order))


def taken_port(stage):
    begin = time.monotonic()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        at = s.getsockname()[1]
        for rank in [0, 1]:
            stage.train(f"rank-{rank}", f"{SHORT} --timeout 15", **by_hand(rank, at))
        exits = stage.ended("rank-0", "rank-1")
    errors = stage.errors(*stage.order)
    good = list(exits.values()) == [1, 1] and sum("could not meet the others" in line for line in errors) == 2
    return found("both say that they could not meet, and where; exit status 1", good, exits, time.monotonic() - begin,
                 errors=errors)


def launched(stage, launcher):
    """Ranks that a launcher started, or two that have the variables that it sets."""
    begin, at, program = time.monotonic(), port(), [stage.program, "train", "--device", "cuda", *shlex.split(SHORT)]
    path = shutil.which(launcher)
    module = [sys.executable, "-m", "torch.distributed.run"]
    if launcher == "torchrun" and not path and subprocess.run([*module, "--help"], capture_output=True).returncode == 0:
        path = " ".join(module)
    variables = {"SESSILE_JOB_SECRET": SECRET}
    if path and launcher == "torchrun":
        # Written so, older ones take them too.
        options = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", at, "--no_python"]
        stage.start("job", [*shlex.split(path), *options, *program], **variables)
    elif path and launcher == "mpirun":
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        stage.start("job", [path, *root, "-np", "2", *program], **variables, MASTER_PORT=at)
    elif path:
        stage.start("job", [path, "-n", "2", *program], **variables)
    else:
        for rank in [0, 1]:
            theirs = {
                "mpirun": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                           "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "MASTER_PORT": at},
                "srun": {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_STEP_ID": 0,
                         "SLURM_JOB_ID": 4711, "SLURM_STEP_NODELIST": "localhost"},
                "torchrun": by_hand(rank, at) | {"TORCHELASTIC_RUN_ID": "none"},
            }[launcher]
            stage.start(f"rank-{rank}", program, **variables | theirs)
    exits = stage.ended(*stage.order)
    good = all(status == 0 for status in exits.values())
    how = path or f"by hand, with the variables of {launcher}"
    good = good and any("equal to the bit" in stage.output(name) for name in stage.order)
    return found("a good run with equal bits", good, exits, time.monotonic() - begin, started_by=how,
                 errors=stage.errors(*stage.order))


def faults():
    """Name, what happens, seconds it may take, GPUs, what runs it."""
    for ranks in [2, 8]:
        suffix = "" if ranks == 2 else f"-{ranks}"
        for name, who in [("kill", 1), ("kill-first", 0), ("kill-launcher", None)]:
            what = "the launcher" if who is None else f"rank {who}"
            yield (name + suffix, f"kill -9 of {what} of {ranks} ranks in replay", 120, ranks,
                   lambda stage, ranks=ranks, who=who: kill(stage, ranks, who))
    yield ("kill-8-shared", "kill -9 of rank 1 of 8 ranks in replay, on one GPU", 120, 1,
           lambda stage: kill(stage, 8, 1, "--share-gpus"))
    for ranks, name, more in [(1, "alone", ""), (2, "shared", "--share-gpus"), (2, "", "")]:
        gpus = 1 if more else ranks
        yield ("-".join(filter(None, ["out-of-memory", name])),
               f"another program takes the memory of GPU {gpus - 1} during a run of {ranks} ranks", 120, gpus,
               lambda stage, ranks=ranks, gpus=gpus, more=more: full(stage, ranks, gpus, more))
    yield "gpu-busy", "another program keeps both GPUs busy", 240, 2, busy
    yield "library-missing", "no folder of libraries is named", 60, 2, no_library
    yield "nccl-too-old", "an NCCL without the functions of 2.27", 60, 2, another_nccl
    yield "strangers", "121 foreign connections and a rank with another secret", 150, 2, strangers
    yield "wrong-secret", "one of two ranks has another secret", 90, 2, alone_with_another_secret
    yield "port-taken", "another program listens at the job's port", 90, 2, taken_port
    for launcher in ["torchrun", "mpirun", "srun"]:
        yield (launcher, f"two ranks started by {launcher}, or with its variables", 120, 2,
               lambda stage, launcher=launcher: launched(stage, launcher))

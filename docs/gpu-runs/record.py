#!/usr/bin/env python3
"""Runs what only GPUs can show, and writes one record a run: commit, machine, command, exit, figures, and the output beside it.

    record.py --program target/release/sessile --tests target/release/deps/gpu-HASH \
        --units target/release/deps/sessile_cuda-HASH --commit HASH --out DIR [--only NAME ...]

Needs nothing but Python and the files named; the machine needs no compiler. `--list` prints the runs.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

from faults import Late, Stage, faults

MODEL = "--layers 4 --experts 4 --mtp 2 --graph-heads --microbatches 4"
KINDS = ["ring", "symmetric", "fp32_a2a", "one_shot"]


def runs():
    """Name, command line of the program, seconds it may take, ranks."""
    yield "doctor", "doctor --json {json}", 60, 1
    for kind in KINDS:
        for egtp in [1, 2]:
            command = f"train --device cuda --launch 2 {MODEL} --gtp 2 --egtp {egtp} --steps 200 --reduce-scatter {kind}"
            yield f"train-{kind}-egtp{egtp}", command + " --json {json}", 90, 2
    yield "train-one-gpu", f"train --device cuda --launch 1 {MODEL} --steps 200 --json {{json}}", 90, 1
    for kind in KINDS:
        command = f"train --device cuda --launch 2 {MODEL} --gtp 2 --steps 12 --reduce-scatter {kind} --timeline {{out}}/timeline-{kind}.json"
        yield f"overlap-{kind}", command + " --json {json}", 60, 2
    graphs = f"bench graphs --device cuda --launch 2 --rounds 7 --reduce-scatter {','.join(KINDS)}"
    for hidden, tokens, steps in [(512, 512, 10), (1024, 1024, 10), (2048, 2048, 10), (2048, 8192, 10), (4096, 4096, 10),
                                  (4096, 16384, 4)]:
        sizes = f"--hidden {hidden} --tokens {tokens} --steps {steps}"
        yield f"graphs-{hidden}x{tokens}", f"{graphs} {sizes} --json {{json}}", 180, 2
    yield "reduce-scatter", "bench reduce-scatter --json {json} --svg {out}/reduce-scatter.svg", 300, 2
    yield "reduce-scatter-4", "bench reduce-scatter --ranks 4 --json {json}", 400, 4
    yield "reduce-scatter-8", "bench reduce-scatter --ranks 8 --json {json}", 500, 8
    yield "reduce-scatter-8-gtp4", "bench reduce-scatter --ranks 8 --gtp 4 --json {json}", 500, 8
    for ranks, sizes in [(4, [2]), (8, [2, 4])]:
        for egtp in sizes:
            wide = graphs.replace("--launch 2", f"--launch {ranks}") + f" --gtp {ranks} --egtp {egtp}"
            yield f"graphs-{ranks}-egtp{egtp}", f"{wide} --hidden 4096 --tokens 4096 --steps 10 --json {{json}}", 120, ranks
        for kind in KINDS:
            wide = f"train --device cuda --launch {ranks} --gtp {ranks} --egtp {sizes[-1]} --experts 8 --mtp 2 --layers 4"
            yield f"train-{ranks}-{kind}", f"{wide} --steps 100 --reduce-scatter {kind} --json {{json}}", 120, ranks
    # Eight ranks that take turns on one GPU: what they compute, not how fast.
    for kind in ["ring", "fp32_a2a", "one_shot"]:
        shared = "train --device cuda --launch 8 --share-gpus --gtp 8 --egtp 4 --experts 8 --mtp 2 --layers 4"
        yield f"train-8-shared-{kind}", f"{shared} --steps 20 --reduce-scatter {kind} --json {{json}}", 200, 1


def keep(document):
    """What of a program's own document goes into the record: not traces, plans and steps."""
    if not isinstance(document, dict):
        return document
    left_out = ["trace", "plan", "config", "roles"]
    kept = {key: value for key, value in document.items() if key not in left_out}
    steps = kept.get("steps")
    if isinstance(steps, list):
        del kept["steps"]
        if steps:
            kept["first_step"], kept["last_step"] = steps[0], steps[-1]
    return kept


def machine():
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"nvidia-smi: {error}")
    names = ["NCCL_NVLS_ENABLE", "NCCL_SYM_CTAS", "CUDA_VISIBLE_DEVICES"]
    environment = {name: os.environ[name] for name in names if name in os.environ}
    return {"gpus": [gpu for gpu in gpus if gpu], "environment": environment, "cores": os.cpu_count()}


# Ranks of one process wait for each other on one GPU: with the usual 8 queues a launch that waits can stand before the one
# that it waits for.
TESTS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def run(command, limit, log, **variables):
    """Exit status, or 124 if it took longer; all its processes are gone then."""
    with open(log, "w", encoding="utf-8") as output:
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                   env=os.environ | variables)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = 124
        return status, round(time.monotonic() - begin, 1)


TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "initcheck": [], "synccheck": []}
# What a tool that found something exits with.
FOUND = 86
# Of the unit tests those in which all ranks are one launch, since the tools may let no two run at once; and those among
# them that have a fault, by the tool that must find it.
TOGETHER, CONTROL = "oneshot::together::", "oneshot::together::control_of_"


def sanitizer():
    """NVIDIA's compute-sanitizer, wherever its installer put it."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return on_path
    for folder in ["/usr/local", "/opt", "/usr/lib"]:
        found = subprocess.run(["find", folder, "-name", "compute-sanitizer", "-type", "f", "-perm", "-1"],
                               capture_output=True, text=True).stdout.split("\n")
        if found[0]:
            return found[0]
    return None


def listed(tests):
    lines = subprocess.run([str(tests), "--list"], capture_output=True, text=True, check=True).stdout.split("\n")
    return [line.removesuffix(": test") for line in lines if line.endswith(": test")]


class Recorder:
    """Runs, and writes a record of each."""

    def __init__(self, args):
        self.args, self.machine, self.bad = args, machine(), False
        self.day = datetime.date.today().isoformat()

    def gpus(self, name, needed):
        if needed > len(self.machine["gpus"]):
            print(f"{name}: skipped, needs {needed} GPUs")
            return False
        return True

    def log(self, name):
        return self.args.out / f"{self.day}-{name}.log"

    def record(self, name, command, status, seconds, figures, good):
        self.bad |= not good
        document = {
            "commit": self.args.commit,
            "dirty": self.args.dirty,
            "machine": self.machine,
            "command": command,
            "exit": status,
            "seconds": seconds,
            "figures": figures,
            "output": self.log(name).name,
        }
        path = self.args.out / f"{self.day}-{name}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: exit {status} in {seconds} s, {'good' if good else 'bad'}", flush=True)

    def program(self, name, command, limit):
        result = self.args.out / "result.json"
        result.unlink(missing_ok=True)
        words = [word.format(json=result, out=self.args.out) for word in shlex.split(command)]
        status, seconds = run([str(self.args.program), *words], limit, self.log(name))
        figures = keep(json.loads(result.read_text(encoding="utf-8"))) if result.exists() else None
        result.unlink(missing_ok=True)
        self.record(name, f"sessile {command}", status, seconds, figures, status == 0)

    def fault(self, name, what, limit, play):
        begin = time.monotonic()
        with Stage(self.args.program, limit) as stage:
            try:
                figures, status = play(stage), 0
            except Late as late:
                figures, status = {"as_expected": False, "late": str(late), "errors": stage.errors(*stage.order)}, 124
            self.log(name).write_text(stage.log(), encoding="utf-8")
        seconds = round(time.monotonic() - begin, 1)
        self.record(name, f"{what}: `{name}` of docs/gpu-runs/faults.py", status, seconds, figures, figures["as_expected"])

    def tests(self, name, command, program, tests, limit, before=()):
        """Each in a process of its own; what a tool sums up is counted. In controls it must find something."""
        exits, summaries, begin = {}, {}, time.monotonic()
        with open(self.log(name), "w", encoding="utf-8") as whole:
            for test in tests:
                one = self.args.out / "one.log"
                words = [*before, str(program), "--exact", test, "--include-ignored", "--nocapture"]
                exits[test], _ = run(words, limit, one, **TESTS)
                text = one.read_text(encoding="utf-8", errors="replace")
                whole.write(f"=== {test}: exit {exits[test]}\n{text}")
                kind = "control: " if test.startswith(CONTROL) else ""
                for line in (line for line in text.split("\n") if " SUMMARY: " in line):
                    summary = kind + line.strip("= ")
                    summaries[summary] = summaries.get(summary, 0) + 1
                one.unlink()
        failed = {test: status for test, status in exits.items() if status != FOUND * test.startswith(CONTROL)}
        figures = {"tests": len(exits), "failed": failed} | ({"summaries": summaries} if before else {})
        seconds = round(time.monotonic() - begin, 1)
        self.record(name, command, int(bool(failed)), seconds, figures, not failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, help="the program sessile")
    parser.add_argument("--tests", type=pathlib.Path, help="the GPU tests of sessile-cuda; each runs in a process of its own")
    parser.add_argument("--units", type=pathlib.Path, help="the unit tests of sessile-cuda, some of which need a GPU")
    parser.add_argument("--commit", help="what they were built from")
    parser.add_argument("--dirty", action="store_true", help="with changes that are not in the commit")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the records")
    parser.add_argument("--only", nargs="+", default=[], help="runs whose names begin so")
    parser.add_argument("--test", default="", help="of the GPU tests those whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    args = parser.parse_args()

    def wanted(name):
        return not args.only or any(name.startswith(only) for only in args.only)

    tools = {f"sanitizer-{tool}{rest}": (tool, rest) for tool in TOOLS for rest in ["", "-oneshot"]}
    names = [run[0] for run in (*runs(), *faults())] + ["tests", "together", *tools]
    for only in args.only:
        if not any(name.startswith(only) for name in names):
            parser.error(f"--only {only}: no run's name begins so; --list prints them")
    if args.list:
        for name, command, limit, ranks in runs():
            if wanted(name):
                print(f"{name} ({ranks} GPUs, {limit} s at most): sessile {command}")
        for name, what, limit, ranks, _ in faults():
            if wanted(name):
                print(f"{name} ({ranks} GPUs, {limit} s at most): {what}")
        for name in filter(wanted, ["tests", "together", *tools]):
            units = name == "together" or name.endswith("-oneshot")
            print(f"{name} (with {'--units' if units else '--tests'}): GPU tests{' under compute-sanitizer' if name in tools else ''}")
        return 0
    if not (args.program and args.commit and args.out):
        parser.error("--program, --commit and --out are needed")
    for option, path in [("--program", args.program), ("--tests", args.tests), ("--units", args.units)]:
        if path and not (path.is_file() and os.access(path, os.X_OK)):
            parser.error(f"{option} {path}: not a program; build it first, with --release")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: not a folder")
    tests = [test for test in listed(args.tests) if args.test in test] if args.tests else []
    if args.tests and not tests:
        parser.error(f"--test {args.test}: no test of {args.tests} has this in its name")
    # NVLink multicast stays off unless somebody wants it: not every machine survives it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    args.out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(args)
    for name, command, limit, ranks in runs():
        if wanted(name) and recorder.gpus(name, ranks):
            recorder.program(name, command, limit)
    for name, what, limit, ranks, play in faults():
        if wanted(name) and recorder.gpus(name, ranks):
            recorder.fault(name, what, limit, play)
    command = "each test of `cargo test --release {}` in a process of its own, 90 s each, CUDA_DEVICE_MAX_CONNECTIONS=32"
    if args.tests and wanted("tests"):
        some = f", those with {args.test} in their names" if args.test else ""
        name = "-".join(["tests", *filter(None, args.test.split("::"))])
        recorder.tests(name, command.format(f"--test {args.tests.name.rsplit('-', 1)[0]}") + some, args.tests, tests, 90)
    together = [test for test in listed(args.units) if test.startswith(TOGETHER)] if args.units else []
    good = [test for test in together if not test.startswith(CONTROL)]
    if args.units and wanted("together"):
        recorder.tests("together", command.format(f"-p sessile-cuda --lib {TOGETHER}"), args.units, good, 90)
    tool_names = [name for name in tools if wanted(name)]
    path = sanitizer() if tool_names else None
    for name in tool_names:
        tool, rest = tools[name]
        program = args.units if rest else args.tests
        if path is None or program is None:
            print(f"{name}: skipped, no {'compute-sanitizer' if program else 'tests: ' + ('--units' if rest else '--tests')}")
            continue
        controls = [test for test in together if test.startswith(CONTROL + tool)]
        chosen = good + controls if rest else [test for test in tests if test.startswith("kernels::")]
        # Controls have many findings of one kind.
        before = [path, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5", *TOOLS[tool]]
        words = shlex.join(["compute-sanitizer", *before[1:], "units" if rest else "gpu", "--exact", "TEST"])
        recorder.tests(name, f"{words}, for {len(chosen)} tests, 120 s each", program, chosen, 120, before)
    return int(recorder.bad)


if __name__ == "__main__":
    sys.exit(main())

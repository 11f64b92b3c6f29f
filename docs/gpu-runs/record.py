#!/usr/bin/env python3
"""Runs what only GPUs can show, and writes one record a run: commit, machine, command, exit, figures, and the output beside it.

    record.py --program target/release/sessile --tests target/release/deps/gpu-HASH --commit HASH --out DIR [--only NAME ...]

Needs nothing but Python and the files named; the machine needs no compiler. `--list` prints the runs.
"""

import argparse
import datetime
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

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
    graphs = "bench graphs --device cuda --launch 2 --rounds 9 --steps 10 --reduce-scatter ring,symmetric,one_shot"
    for hidden in [512, 1024, 2048, 4096, 8192]:
        yield f"graphs-{hidden}", f"{graphs} --hidden {hidden} --tokens {min(hidden, 4096)} --json {{json}}", 90, 2
    yield "graphs-compute-bound", f"{graphs} --hidden 4096 --tokens 16384 --json {{json}}", 90, 2
    yield "reduce-scatter", "bench reduce-scatter --json {json}", 300, 2
    for egtp in [2, 4]:
        wide = graphs.replace("--launch 2", "--launch 8")
        yield f"graphs-8-egtp{egtp}", f"{wide} --gtp 8 --egtp {egtp} --hidden 4096 --tokens 4096 --json {{json}}", 120, 8
    wide = "train --device cuda --launch 8 --gtp 8 --egtp 4 --experts 8 --mtp 2 --layers 4"
    for kind in KINDS:
        yield f"train-8-{kind}", f"{wide} --steps 100 --reduce-scatter {kind} --json {{json}}", 120, 8


def keep(document):
    """What of a program's own document goes into the record: not traces, plans and steps."""
    if not isinstance(document, dict):
        return document
    kept = {key: value for key, value in document.items() if key not in ("trace", "plan", "config", "steps", "roles")}
    if document.get("steps"):
        kept["first_step"], kept["last_step"] = document["steps"][0], document["steps"][-1]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, help="the program sessile")
    parser.add_argument("--tests", type=pathlib.Path, help="the GPU tests of sessile-cuda; each runs in a process of its own")
    parser.add_argument("--commit", help="what they were built from")
    parser.add_argument("--dirty", action="store_true", help="with changes that are not in the commit")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the records")
    parser.add_argument("--only", nargs="+", default=[], help="runs whose names begin so")
    parser.add_argument("--list", action="store_true", help="print the runs and end")
    args = parser.parse_args()

    wanted = [run for run in runs() if not args.only or any(run[0].startswith(name) for name in args.only)]
    if args.list:
        for name, command, limit, ranks in wanted:
            print(f"{name} ({ranks} GPUs, {limit} s at most): sessile {command}")
        return 0
    if not (args.program and args.commit and args.out):
        parser.error("--program, --commit and --out are needed")
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine()
    day = datetime.date.today().isoformat()
    worst = 0

    def record(name, command, status, seconds, figures, log):
        nonlocal worst
        worst = max(worst, status != 0)
        document = {
            "commit": args.commit,
            "dirty": args.dirty,
            "machine": about,
            "command": command,
            "exit": status,
            "seconds": seconds,
            "figures": figures,
            "output": log.name,
        }
        path = args.out / f"{day}-{name}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{name}: exit {status} in {seconds} s", flush=True)

    for name, command, limit, ranks in wanted:
        if ranks > len(about["gpus"]):
            print(f"{name}: skipped, needs {ranks} GPUs")
            continue
        result = args.out / "result.json"
        result.unlink(missing_ok=True)
        words = [word.format(json=result, out=args.out) for word in shlex.split(command)]
        log = args.out / f"{day}-{name}.log"
        status, seconds = run([str(args.program), *words], limit, log)
        figures = keep(json.loads(result.read_text(encoding="utf-8"))) if result.exists() else None
        result.unlink(missing_ok=True)
        record(name, f"sessile {command}", status, seconds, figures, log)

    if args.tests and (not args.only or "tests" in args.only):
        listed = subprocess.run([str(args.tests), "--list"], capture_output=True, text=True, check=True).stdout
        tests = [line.removesuffix(": test") for line in listed.split("\n") if line.endswith(": test")]
        exits, log = {}, args.out / f"{day}-tests.log"
        begin = time.monotonic()
        with open(log, "w", encoding="utf-8") as whole:
            for test in tests:
                one = args.out / "one.log"
                options = ["--exact", test, "--include-ignored", "--nocapture"]
                exits[test], _ = run([str(args.tests), *options], 90, one, **TESTS)
                whole.write(one.read_text(encoding="utf-8", errors="replace"))
                one.unlink()
        failed = sorted(test for test, status in exits.items() if status != 0)
        figures = {"tests": len(exits), "failed": failed}
        command = "each test of `cargo test --release -p sessile-cuda --test gpu` in a process of its own, 90 s each, CUDA_DEVICE_MAX_CONNECTIONS=32"
        record("tests", command, int(bool(failed)), round(time.monotonic() - begin, 1), figures, log)
    return worst


if __name__ == "__main__":
    sys.exit(main())

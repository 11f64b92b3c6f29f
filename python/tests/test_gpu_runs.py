"""docs/gpu-runs/record.py on a machine without GPUs: the program, nvidia-smi and the GPU tests are stand-ins."""

import json
import os
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/gpu-runs"))
import faults  # noqa: E402
import record  # noqa: E402

# A launcher and two ranks that tell each other who has gone, unless they are deaf.
PROGRAM = """#!{python}
import json, os, pathlib, subprocess, sys, time
here = pathlib.Path(os.environ["STAND_IN"])
if "--launch" in sys.argv:
    for old in here.glob("gone-*"):
        old.unlink()
    children = [subprocess.Popen([sys.executable, __file__, "rank"], env=os.environ | {{"RANK": str(r)}}) for r in range(2)]
    print("16 runners captured", flush=True)
    while any(c.poll() is None for c in children):
        for rank, child in enumerate(children):
            if child.poll() == -9 and not (here / f"gone-{{rank}}").exists():
                print(f"error: rank {{rank}} ended by itself; the others were told", flush=True)
                (here / f"gone-{{rank}}").touch()
        time.sleep(0.01)
    sys.exit(1)
if sys.argv[1] == "rank":
    mine = int(os.environ["RANK"])
    while "DEAF" in os.environ or not (here / f"gone-{{1 - mine}}").exists():
        time.sleep(0.01)
    sys.exit(f"error: rank {{mine}}: peer rank {{1 - mine}} has gone")
if sys.argv[1] == "doctor":
    pathlib.Path(sys.argv[3]).write_text(json.dumps({{"driver": 13000, "trace": [1, 2], "steps": ["a", "b", "c"]}}))
    print("all is there")
"""
TESTS = """#!{python}
import sys
if sys.argv[1] == "--list":
    print("kernels::good: test\\nkernels::bad: test\\n2 tests")
else:
    sys.exit(sys.argv[2] == "kernels::bad")
"""
UNITS = """#!{python}
import sys
if sys.argv[1] == "--list":
    names = [f"control_of_{{tool}}_x" for tool in ["memcheck", "racecheck", "initcheck", "synccheck"]]
    print("\\n".join(f"oneshot::together::{{name}}: test" for name in ["sums", *names]) + "\\nother::one: test")
"""
# Finds what is wrong in the control of its tool, but for one tool that finds nothing.
SANITIZER = """#!{python}
import subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words = words[2:]
found = f"control_of_{{sys.argv[2]}}" in words[2] and sys.argv[2] != "synccheck"
print(f"========= ERROR SUMMARY: {{int(found)}} errors")
sys.exit(86 if found else subprocess.run(words).returncode)
"""


@pytest.fixture
def out(tmp_path, monkeypatch):
    stand_ins = {"sessile": PROGRAM, "gpu": TESTS, "units": UNITS, "compute-sanitizer": SANITIZER,
                 "nvidia-smi": "#!/bin/sh\necho a GPU\necho a GPU\n"}
    for name, text in stand_ins.items():
        path = tmp_path / name
        path.write_text(text.format(python=sys.executable) if "{python}" in text else text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    return tmp_path / "out"


def main(monkeypatch, out, *more):
    here = out.parent
    line = ["record.py", "--program", here / "sessile", "--tests", here / "gpu", "--commit", "abc", "--out", out, *more]
    monkeypatch.setattr(sys, "argv", [str(word) for word in line])
    status = record.main()
    return status, {path.name[11:-5]: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_of_steps_the_first_and_the_last_are_kept_and_their_number():
    assert record.keep({"steps": [1, 2, 3], "plan": {}}) == {"first_step": 1, "last_step": 3}
    assert record.keep({"steps": [], "rounds": 3}) == {"rounds": 3}
    assert record.keep({"steps": 10, "rounds": 3}) == {"steps": 10, "rounds": 3}


def test_a_run_is_recorded_with_its_figures_and_output(out, monkeypatch, capsys):
    status, records = main(monkeypatch, out, "--only", "doctor", "train-8-ring")
    assert status == 0 and list(records) == ["doctor"]
    assert "train-8-ring: skipped, needs 8 GPUs" in capsys.readouterr().out
    document = records["doctor"]
    assert document["figures"] == {"driver": 13000, "first_step": "a", "last_step": "c"}
    assert (document["commit"], document["exit"], document["machine"]["gpus"]) == ("abc", 0, ["a GPU", "a GPU"])
    assert (out / document["output"]).read_text() == "all is there\n"


def test_a_killed_rank_is_found_and_what_the_others_say_is_kept(out, monkeypatch):
    status, records = main(monkeypatch, out, "--only", "kill")
    figures = records["kill"]["figures"]
    assert figures["as_expected"] and figures["exits"] == {"job": 1} and records["kill-first"]["figures"]["as_expected"]
    assert any("peer rank 1 has gone" in line for line in figures["errors"])
    assert "=== job\n16 runners captured" in (out / records["kill"]["output"]).read_text()
    # These ranks go on without their launcher.
    assert status == 1
    assert records["kill-launcher"]["exit"] == 124 and not records["kill-launcher"]["figures"]["as_expected"]


def test_a_run_that_outlasts_its_limit_leaves_nothing_behind(out, monkeypatch):
    monkeypatch.setenv("DEAF", "1")
    status, records = main(monkeypatch, out, "--only", "kill-first")
    assert status == 1 and records["kill-first"]["exit"] == 124
    marker = f"STAND_IN={out.parent}".encode()
    left = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            left += [process.name] if marker in (process / "environ").read_bytes().split(b"\0") else []
        except OSError:
            pass
    assert left == []


def test_gpu_tests_run_one_by_one_alone_and_under_each_tool(out, monkeypatch):
    status, records = main(monkeypatch, out, "--only", "tests", "sanitizer")
    assert status == 1 and records["tests"]["figures"] == {"tests": 2, "failed": {"kernels::bad": 1}}
    tool = records["sanitizer-memcheck"]["figures"]
    assert tool == {"tests": 2, "failed": {"kernels::bad": 1}, "summaries": {"ERROR SUMMARY: 0 errors": 2}}
    # Those of the one-shot kernels are unit tests, which were not given.
    assert len(records) == 5


def test_unit_tests_run_alone_and_each_tool_must_find_the_fault_of_its_control(out, monkeypatch):
    status, records = main(monkeypatch, out, "--units", out.parent / "units", "--only", "together", "sanitizer")
    assert status == 1 and records["together"]["figures"] == {"tests": 1, "failed": {}}
    good = {"ERROR SUMMARY: 0 errors": 1, "control: ERROR SUMMARY: 1 errors": 1}
    for tool in ["memcheck", "racecheck", "initcheck"]:
        assert records[f"sanitizer-{tool}-oneshot"]["figures"] == {"tests": 2, "failed": {}, "summaries": good}
    missed = records["sanitizer-synccheck-oneshot"]
    assert missed["exit"] == 1 and missed["figures"]["failed"] == {"oneshot::together::control_of_synccheck_x": 0}


@pytest.mark.parametrize(("more", "said"), [
    (["--only", "doctor", "trian"], "--only trian: no run's name begins so"),
    (["--program", "/missing/sessile"], "--program /missing/sessile: not a program"),
    (["--tests", "/missing/gpu"], "--tests /missing/gpu: not a program"),
    (["--test", "of_nothing"], "--test of_nothing: no test of "),
    (["--out", __file__], "not a folder"),
])
def test_arguments_that_name_nothing_are_refused_and_leave_nothing(out, monkeypatch, capsys, more, said):
    with pytest.raises(SystemExit) as end:
        main(monkeypatch, out, *more)
    assert end.value.code == 2 and said in capsys.readouterr().err
    assert not out.exists()


def test_the_tests_for_the_sanitizer_exist():
    source = (ROOT / "crates/sessile-cuda/src/oneshot/together.rs").read_text()
    assert record.CONTROL.startswith(record.TOGETHER) and record.TOGETHER == "oneshot::together::"
    for tool in record.TOOLS:
        assert re.search(rf"\bfn {record.CONTROL.removeprefix(record.TOGETHER)}{tool}_\w+\(\)", source), tool


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    def short():
        for name, what, _, gpus, play in faults.faults():
            yield name, what, 3, gpus, play

    monkeypatch.setattr(faults, "REPLAYING", 0.1)
    monkeypatch.setattr(record, "faults", short)

"""The examples run, with small sizes, on the CPU."""

import json
import os
import subprocess
import sys

import pytest
import torch

import sessile

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "..", "examples", "torch")


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_trace_of_a_step_is_written_and_planned_at_its_bound(tmp_path):
    path = tmp_path / "trace.json"
    output = run(os.path.join(EXAMPLES, "trace_only.py"), "--layers", "2", "--width", "32", "--out", str(path))
    plan = sessile.plan(path.read_text())
    assert f"{plan.bytes} bytes" in output and plan.bytes == plan.lower_bound_bytes
    assert plan.bytes < sessile.plan(path.read_text(), strategy="generations:2").bytes


def test_ratios_are_against_the_faster_fsdp2_and_leave_out_what_cannot_run():
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import fsdp2_comparison as it\n"
        "one = lambda ms, mib: dict(step_ms=ms, persistent_mib=mib, peak_mib=2 * mib)\n"
        "results = {'fsdp2, reshard': one(4.0, 10.0), 'fsdp2, keep': one(2.0, 20.0), 'sessile, graphs': one(1.0, 30.0)}\n"
        "results['fsdp2, torch graphs'] = {'cannot_run': 'hooks'}\n"
        "print(json.dumps(it.ratios(results)))"
    )
    ratios = json.loads(run("-c", code, EXAMPLES))
    assert sorted(ratios) == ["fsdp2, keep", "fsdp2, reshard", "sessile, graphs"]
    assert ratios["sessile, graphs"] == {"step_ms": 0.5, "persistent_mib": 1.5, "peak_mib": 1.5}


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_dot_product_attention"), reason="the example needs torch 2"
)
def test_training_eagerly_and_with_graphs_gives_the_same_bits():
    sizes = "--layers 2 --width 32 --heads 2 --vocab 32 --sequence 8 --batch 2 --experts 2 --mtp".split()
    train = os.path.join(EXAMPLES, "train_gpt.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run(*launch, train, "--device", "cpu", "--steps", "3", "--compare", *sizes)
    assert "losses equal in 3 of 3 steps, bits of all gradients in 3 of 3" in output
    assert "on all ranks: equal" in output

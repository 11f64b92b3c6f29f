"""The examples run, with small sizes, on the CPU."""

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

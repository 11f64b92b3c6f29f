"""Tests of the installed package. Those that need torch are skipped, with the reason, where it can't be imported."""

import importlib.util
import os
import sys

import pytest

HAVE_TORCH = importlib.util.find_spec("torch") is not None
sys.path.insert(0, os.path.dirname(__file__))

collect_ignore_glob = [] if HAVE_TORCH else ["torch_*.py", "test_torch_*.py"]


def pytest_configure(config):
    if HAVE_TORCH:
        import torch

        # As the ranks have, whose bits are compared with what is computed here.
        torch.set_num_threads(1)


def pytest_report_header(config):
    if HAVE_TORCH:
        import torch

        return f"torch {torch.__version__}, CUDA device: {torch.cuda.is_available()}"
    return "no torch here: pip install 'sessile[test]' to run python/tests/test_torch_*.py"


def pytest_terminal_summary(terminalreporter):
    if not HAVE_TORCH:
        terminalreporter.write_line("skipped python/tests/test_torch_*.py: no module named torch")


@pytest.fixture
def storage():
    from sessile.torch import GraphStorage

    return GraphStorage(device="cpu")

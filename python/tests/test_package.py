"""What the package is without torch."""

import ast
import inspect
import os
import subprocess
import sys

import pytest

import sessile
import sessile._sessile as native

TRACE = """{"schema": "sessile.trace", "version": 1, "name": "t", "runners": [
  {"name": "a", "requests": [{"id": 0, "weight": "w", "role": "wgrad_input", "dtype": "bf16", "shape": [64, 8],
    "unsharded_shape": [64, 8], "domain": "default"}]},
  {"name": "b", "requests": [{"id": 1, "weight": "v", "role": "rs_output", "dtype": "f32", "shape": [100],
    "unsharded_shape": [100], "domain": "default"}]}], "steps": [[0, 1]]}"""


def test_importing_the_package_does_not_import_torch():
    code = "import sys, sessile; assert 'torch' not in sys.modules; print(sessile.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == sessile.__version__


def test_the_doctor_says_what_is_here_and_how_to_get_what_is_not():
    report = sessile.doctor()
    assert report["sessile"] == sessile.__version__
    assert isinstance(report["cuda"], bool)
    names = {finding["name"] for finding in report["findings"]}
    assert {"CUDA driver", "NVRTC", "NCCL"} <= names
    for finding in report["findings"]:
        assert finding["found"] and finding["enables"]
        if finding["state"] == "missing" and finding["name"] != "job":
            assert finding["remedy"], finding


def test_a_trace_is_planned_and_the_plan_repeats():
    plan = sessile.plan(TRACE)
    assert plan.digest == sessile.plan(TRACE).digest
    assert plan.bytes >= plan.lower_bound_bytes >= 1024
    assert sessile.plan(TRACE, strategy="per-request").bytes == 1024 + 512
    assert '"sessile.plan"' in plan.to_json()
    assert len(sessile.check_trace(TRACE)) == 64


@pytest.mark.parametrize(
    "error, call",
    [
        (sessile.FormatError, lambda: sessile.plan("{")),
        (sessile.FormatError, lambda: sessile.plan(TRACE.replace('"b"', '"a"'))),
        (sessile.PlanError, lambda: sessile.plan(TRACE, strategy="ring:0")),
        (sessile.ArgumentError, lambda: sessile.plan(TRACE, step_cut="never")),
    ],
)
def test_bad_input_is_an_exception_of_its_family(error, call):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, sessile.SessileError) and str(caught.value)


def test_a_bad_argument_is_named_in_fields():
    with pytest.raises(sessile.ArgumentError) as caught:
        sessile.plan(TRACE, step_cut="never")
    assert (caught.value.argument, caught.value.value) == ("step_cut", "never")


def _stub():
    path = os.path.join(os.path.dirname(sessile.__file__), "_sessile.pyi")
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


def _public(names):
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def test_the_stubs_name_exactly_what_the_module_has():
    functions = {node.name for node in _stub().body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in _stub().body if isinstance(node, ast.ClassDef)}
    assert functions | set(classes) | {"__version__"} == _public(dir(native))
    for name, node in classes.items():
        stubbed = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        assert _public(stubbed) == _public(vars(getattr(native, name))), name


def test_the_stubs_have_the_parameters_of_the_module():
    for node in _stub().body:
        items = node.body if isinstance(node, ast.ClassDef) else [node]
        home = getattr(native, node.name) if isinstance(node, ast.ClassDef) else native
        for item in items:
            if not isinstance(item, ast.FunctionDef) or item.name.startswith("__") or item.decorator_list:
                continue
            real = [name for name in inspect.signature(getattr(home, item.name)).parameters if name != "self"]
            arguments = item.args
            stub = [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs if a.arg != "self"]
            assert stub == real, item.name


def test_the_package_is_typed():
    assert os.path.exists(os.path.join(os.path.dirname(sessile.__file__), "py.typed"))

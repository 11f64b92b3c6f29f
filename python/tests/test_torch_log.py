"""The event log of a program: what the checker proves of it, and what it finds when something is missing."""

import json

import pytest
import torch
from torch import nn

import sessile
from sessile.torch import GraphStorage, make_graphed_callables, shard_


def passes(storage, scope, names=("b", "a"), late=False):
    """Runners that each use two buffers one after the other."""
    for name in names:
        with scope(name):
            first = storage.empty((64,), torch.float32, weight=name)
            if late:
                second = storage.empty((64,), torch.float32, weight=name)
                storage.release(first)
            else:
                storage.release(first)
                second = storage.empty((64,), torch.float32, weight=name)
            storage.release(second)


def logged(storage, late=False):
    passes(storage, storage.discover, late=late)
    storage.seal()
    passes(storage, storage.capture, late=late)
    for _ in range(3):
        passes(storage, storage.replay, late=late)


def test_a_program_on_the_cpu_is_in_order_and_its_log_is_the_one_of_sessile_check(tmp_path):
    storage = GraphStorage(device="cpu", log=True)
    logged(storage)
    assert storage.plan.bytes < 4 * 256
    storage.save_log(tmp_path / "log.json")
    text = (tmp_path / "log.json").read_text()
    log = json.loads(text)
    assert (log["schema"], log["version"]) == ("sessile.log", 1)
    [rank] = log["ranks"]
    assert [graph["runner"] for graph in rank["graphs"]] == ["b", "a"]
    assert sum("launch" in entry for entry in rank["entries"]) == 6
    assert sessile.check_log(text) == []
    storage.free()
    logged(storage)
    storage.save_log(tmp_path / "log.json")
    assert sessile.check_log((tmp_path / "log.json").read_text()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.json"]


def test_requests_that_are_alive_at_once_on_the_same_bytes_are_found(tmp_path):
    storage = GraphStorage(device="cpu", log=True)
    logged(storage, late=True)
    storage.save_log(tmp_path / "log.json")
    log = json.loads((tmp_path / "log.json").read_text())
    assert sessile.check_log(json.dumps(log)) == []
    # As if the plan had given both the same bytes.
    for graph in log["ranks"][0]["graphs"]:
        touched = [node["accesses"] for node in graph["nodes"] if node["accesses"]]
        view = touched[0][0]
        for accesses in touched:
            accesses[0].update(start=view["start"], end=view["end"])
    found = sessile.check_log(json.dumps(log))
    assert len(found) == 2 and all("runner `" in line for line in found)


def test_an_edge_that_the_capture_lost_is_found(tmp_path):
    storage = GraphStorage(device="cpu", log=True)
    logged(storage)
    storage.save_log(tmp_path / "log.json")
    log = json.loads((tmp_path / "log.json").read_text())
    [graph] = [graph for graph in log["ranks"][0]["graphs"] if graph["runner"] == "a"]
    acquires = [node for node in graph["nodes"] if node["label"].startswith("acquire")]
    acquires[1]["dependencies"] = []
    assert sessile.check_log(json.dumps(log))


def test_graphed_modules_are_in_order(tmp_path):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)) for _ in range(3)]
    storage = GraphStorage(device="cpu", log=True)
    sharded = shard_(nn.ModuleList(blocks), None, storage=storage)
    calls = make_graphed_callables(blocks, [(torch.zeros(4, 8).requires_grad_(),)], storage, chain=True)
    for _ in range(2):
        y = torch.ones(4, 8).requires_grad_()
        for call in calls:
            y = call(y)
        y.sum().backward()
        sharded.join()
    storage.save_log(tmp_path / "log.json")
    text = (tmp_path / "log.json").read_text()
    assert sessile.check_log(text) == []
    memories = [memory["label"] for memory in json.loads(text)["ranks"][0]["memories"]]
    assert "gradient of 0.0.weight" in memories


def test_logs_that_are_not_kept_or_not_logs():
    with pytest.raises(sessile.PhaseError, match="log=True"):
        GraphStorage(device="cpu").save_log("nowhere.json")
    with pytest.raises(sessile.FormatError):
        sessile.check_log("{}")

"""The optimizer refuses gradients that a reduction which gave up has left: with a stand-in for the failing group, since none
reduces in one shot on the CPU. `test_torch_cuda.py` has a real one."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import sessile
from sessile.torch import GraphStorage, shard_


class Failing:
    """A storage's Rust half whose group `gtp` has given up."""

    def __init__(self, core):
        self.core = core
        self.asked = 0

    def __getattr__(self, name):
        return getattr(self.core, name)

    def check(self):
        self.asked += 1
        raise sessile.DeviceError(
            "rank 0 waited in vain", group="gtp", rank=0, missing=1, round=7, remedy="start again from a checkpoint"
        )


class SGD(torch.optim.SGD):
    """With torch 1, that has no hooks, one of torch 2's kind."""

    if not hasattr(torch.optim.SGD, "register_step_pre_hook"):

        def register_step_pre_hook(self, hook):
            self.before = getattr(self, "before", OrderedDict())
            handle = torch.utils.hooks.RemovableHandle(self.before)
            self.before[handle.id] = hook
            return handle

        def step(self, closure=None):
            for hook in list(getattr(self, "before", {}).values()):
                hook(self, (closure,), {})
            return super().step(closure)


def trained():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    storage = GraphStorage(device="cpu")
    sharded = shard_(net, storage=storage)
    masters = [weight.parameter.detach().clone() for weight in sharded.weights]
    for master, weight in zip(masters, sharded.weights):
        master.grad = weight.main_grad
    optimizer = SGD(masters, lr=0.1, momentum=0.9)
    return net, sharded, masters, optimizer


def backward(net):
    net(torch.ones(3, 8)).square().sum().backward()


def test_a_guarded_optimizer_steps_on_whole_gradients_only():
    net, sharded, masters, optimizer = trained()
    handle = sharded.guard(optimizer)
    backward(net)
    before = [master.clone() for master in masters]
    optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(masters, before))

    failing = sharded.storage._core = Failing(sharded.storage._core)
    before = [master.clone() for master in masters]
    momentum = [optimizer.state[master]["momentum_buffer"].clone() for master in masters]
    # At every step, not once.
    for times in (1, 2, 3):
        with pytest.raises(sessile.DeviceError) as caught:
            optimizer.step()
        assert failing.asked >= times
    error = caught.value
    assert (error.group, error.rank, error.missing, error.round) == ("gtp", 0, 1, 7) and error.remedy
    assert all(torch.equal(one, other) for one, other in zip(masters, before))
    assert all(torch.equal(optimizer.state[m]["momentum_buffer"], b) for m, b in zip(masters, momentum))

    handle.remove()
    optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(masters, before))


def test_without_a_guard_join_and_check_tell_of_it():
    net, sharded, masters, optimizer = trained()
    backward(net)
    sharded.join()
    sharded.check()
    sharded.storage._core = Failing(sharded.storage._core)
    for tell in (sharded.join, sharded.check, sharded.storage.check):
        for _ in range(2):
            with pytest.raises(sessile.DeviceError, match="in vain"):
                tell()


def test_a_guard_announces_what_join_was_not_called_for():
    _, sharded, _, optimizer = trained()
    ready = []
    sharded.on_grad_ready(ready.append)
    sharded.owe(sharded.weights[0])
    sharded.guard(optimizer)
    optimizer.step()
    assert ready == [sharded.weights[0].parameter]


def test_an_optimizer_without_hooks_is_told_what_to_do():
    _, sharded, _, _ = trained()
    with pytest.raises(sessile.ArgumentError, match="sharded.check") as caught:
        sharded.guard(object())
    assert caught.value.argument == "optimizer"


@pytest.mark.parametrize("patience", [0.0, -1.0, float("inf"), float("nan"), 1e300])
def test_patience_is_a_time(patience):
    with pytest.raises(sessile.ArgumentError) as caught:
        GraphStorage(device="cpu", patience=patience)
    assert caught.value.argument == "patience"

"""What autograd gets from a replay: gradients of whole parameters that are their owner's own, and nothing of sharded ones."""

import pytest
import torch
from torch import nn

from sessile.torch import make_graphed_callables, shard_


class Mixed(nn.Module):
    """A sharded weight between whole parameters of two dtypes, one of them transposed, and one that is not used."""

    def __init__(self, width=6):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.linear = nn.Linear(width, width, bias=True)
        self.turned = nn.Parameter(torch.rand(width, 5).t())
        self.short = nn.Parameter(torch.rand(3).to(torch.bfloat16))
        self.unused = nn.Parameter(torch.rand(2))

    def forward(self, x):
        y = torch.tanh(self.linear(x * self.scale))
        return y * self.turned.sum(0) + self.short.float().sum()

    def used(self):
        return [self.scale, self.linear.bias, self.turned, self.short]


def made(storage, count=2):
    torch.manual_seed(4)
    modules = [Mixed() for _ in range(count)]
    sharded = shard_(nn.ModuleList(modules), storage=storage)
    return modules, sharded


def given(step):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(step))


def run(calls, x):
    for call in calls:
        x = call(x)
    x.square().sum().backward()


def eager(modules, steps):
    """`.grad` of every used parameter after each step, accumulated."""
    found = []
    for step in steps:
        run(modules, given(step))
        found.append([p.grad.clone() for m in modules for p in m.used()])
    for module in modules:
        module.zero_grad(set_to_none=True)
    return found


@pytest.fixture
def graphed(storage):
    modules, sharded = made(storage)
    expected = eager(modules, range(3))
    sharded.zero_grad()
    calls = make_graphed_callables(modules, [(given(9).requires_grad_(),)], storage, chain=True)
    return modules, sharded, calls, expected


def test_gradients_accumulate_over_several_backwards(graphed):
    modules, _, calls, expected = graphed
    for step in range(3):
        run(calls, given(step))
        for parameter, want in zip([p for m in modules for p in m.used()], expected[step]):
            assert torch.equal(parameter.grad, want)
            assert (parameter.grad.shape, parameter.grad.dtype) == (want.shape, want.dtype)
            assert parameter.grad.stride() == want.stride()
    assert all(module.unused.grad is None for module in modules)


def test_a_gradient_that_is_kept_is_not_written_by_the_next_replay(graphed):
    modules, _, calls, expected = graphed
    parameters = [p for m in modules for p in m.used()]
    x = given(0).requires_grad_()
    run(calls, x)
    kept, of_input = [p.grad for p in parameters], x.grad
    before = of_input.clone()
    for parameter in parameters:
        parameter.grad = None
    run(calls, given(1).requires_grad_())
    assert all(torch.equal(grad, want) for grad, want in zip(kept, expected[0]))
    assert torch.equal(of_input, before)
    assert all(not torch.equal(p.grad, grad) for p, grad in zip(parameters, kept))
    # Nor does a change of one touch what the next replay gives, or another parameter's.
    parameters[0].grad.fill_(7.0)
    others = [p.grad.clone() for p in parameters[1:]]
    for parameter in parameters:
        parameter.grad = None
    run(calls, given(1))
    assert all(torch.equal(p.grad, other) for p, other in zip(parameters[1:], others))
    assert not bool((parameters[0].grad == 7.0).any())


class Static(torch.autograd.Function):
    """The identity, whose gradient always lies at one place, as a graph's does."""

    place = torch.zeros(3, 6)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Static.place.copy_(gradient)
        return Static.place


class InPlace(Mixed):
    """Its input's gradient is written at one place by every backward."""

    def forward(self, x):
        return Static.apply(x) + 0.0 * super().forward(x.detach())


@pytest.fixture
def in_place(storage):
    module = InPlace()
    shard_(module, storage=storage)
    [call] = make_graphed_callables([module], [(given(9).requires_grad_(),)], storage)
    return call


@pytest.mark.parametrize(
    "shape, view", [((3, 6), lambda leaf: leaf), ((18,), lambda leaf: leaf.view(3, 6)), ((6, 3), lambda leaf: leaf.t())]
)
def test_gradients_of_an_input_that_is_a_view_of_a_leaf_add_up(in_place, shape, view):
    leaf = torch.zeros(shape, requires_grad=True)
    for factor in (1.0, 10.0):
        (in_place(view(leaf)) * factor).sum().backward()
    assert torch.equal(leaf.grad, torch.full(shape, 11.0))
    (in_place(view(torch.zeros(shape))) * 5.0).sum().backward()
    assert torch.equal(leaf.grad, torch.full(shape, 11.0))


def test_a_gradient_of_an_input_that_was_asked_for_is_the_callers_own(in_place):
    x = given(0).requires_grad_()
    [first] = torch.autograd.grad(in_place(x).sum(), x)
    [second] = torch.autograd.grad((in_place(x) * 10.0).sum(), x)
    assert torch.equal(first, torch.ones(3, 6)) and torch.equal(second, torch.full((3, 6), 10.0))


def test_autograd_is_given_what_can_get_a_gradient_from_it(graphed):
    modules, sharded, calls, _ = graphed
    x = given(0).requires_grad_()
    y = calls[0](x)
    leaves = [node.variable for node, _ in y.grad_fn.next_functions if node is not None]
    assert leaves[0] is x and {id(p) for p in leaves[1:]} == {id(p) for p in modules[0].parameters()} - {
        id(sharded.weights[0].parameter)
    }


def test_a_backward_runs_for_sharded_weights_alone(storage):
    torch.manual_seed(4)
    modules = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh()) for _ in range(2)]
    sharded = shard_(nn.ModuleList(modules), storage=storage)
    run(modules, given(0))
    expected = [weight.main_grad.clone() for weight in sharded.weights]
    sharded.zero_grad()
    calls = make_graphed_callables(modules, [(given(9),)], storage, chain=True)
    for times in (1.0, 2.0):
        run(calls, given(0))
        sharded.join()
        assert all(torch.equal(w.main_grad, times * want) for w, want in zip(sharded.weights, expected))
    assert all(weight.parameter.grad is None for weight in sharded.weights)


def test_a_backward_runs_for_a_weight_that_was_not_frozen_since_the_capture(storage):
    torch.manual_seed(4)
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    first, second = (weight.parameter for weight in shard_(module, storage=storage).weights)
    [call] = make_graphed_callables([module], [(given(9),)], storage)
    first.requires_grad_(False)
    y = call(given(0))
    leaves = [node.variable for node, _ in y.grad_fn.next_functions if node is not None]
    assert y.requires_grad and len(leaves) == 1 and leaves[0] is second
    second.requires_grad_(False)
    assert not call(given(0)).requires_grad


class Adapted(nn.Module):
    """Sharded weights of which some are frozen, and whole parameters that are trained beside them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.near, self.far = nn.Parameter(torch.rand(6, 2)), nn.Parameter(torch.rand(2, 8))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) + x.matmul(self.near).matmul(self.far)))


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("frozen", [[0, 1, 2, 3], [0, 1], [2, 3], [1, 2]])
@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_frozen_weights_are_gathered_and_what_is_trained_gets_its_gradients(storage, limit, frozen, chain, evaluated):
    torch.manual_seed(4)
    modules = [Adapted(), Adapted()]
    sharded = shard_(nn.ModuleList(modules), storage=storage, gather_bucket_bytes=limit)
    for at in frozen:
        sharded.weights[at].parameter.requires_grad_(False)
    whole = [p for m in modules for p in (m.near, m.far)]
    expected = []
    for step in range(2):
        x = given(step).requires_grad_()
        run(modules, x)
        expected.append([x.grad, *(p.grad.clone() for p in whole), *(w.main_grad.clone() for w in sharded.weights)])
    for parameter in whole:
        parameter.grad = None
    sharded.zero_grad()
    wanted = [modules[0](given(5)), modules[1](given(5))]
    if evaluated:
        with torch.no_grad():
            for at in (0, 1, 0):
                modules[at](given(5))
    samples = [(given(8).requires_grad_(),), (given(9).requires_grad_(),)]
    calls = make_graphed_callables(modules, samples[:1] if chain else samples, storage, chain=chain)
    for step in range(2):
        x = given(step).requires_grad_()
        run(calls, x)
        sharded.join()
        found = [x.grad, *(p.grad for p in whole), *(w.main_grad for w in sharded.weights)]
        assert all(torch.equal(mine, want) for mine, want in zip(found, expected[step]))
    assert [bool(w.main_grad.any()) for w in sharded.weights] == [at not in frozen for at in range(4)]
    assert all(torch.equal(call(given(5)), want) for call, want in zip(calls, wanted))
    assert not sharded.gathers._ahead

"""Weights gathered in buckets: which are gathered together, and that it changes no bit."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks
import sessile
from sessile.torch import GraphStorage, ShardedParameter, kinds, lead_, make_graphed_callables, shard_
from sessile.torch.gathers import BUCKET_BYTES

#: Bytes of each weight of `Layer`: 8 x 8, FP32.
ONE = 256


class Layer(nn.Module):
    def __init__(self, inner=8):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, inner, bias=False)
        self.c = nn.Linear(inner, 8, bias=False)

    def forward(self, x):
        return x + self.c(torch.tanh(self.b(torch.sin(self.a(x)))))


class Expert(Layer):
    is_expert = True


def layers(*kinds_):
    torch.manual_seed(6)
    return nn.Sequential(*(kind() for kind in kinds_))


@pytest.fixture
def calls(monkeypatch):
    """Names of the weights that each call gathered."""
    seen = []
    real = kinds.gather

    def gather(full, shards, weight):
        by_address = {w.parameter.data_ptr(): w.name for w in weight.owner.weights}
        seen.append([by_address[shard.data_ptr()].replace(".weight", "") for shard in shards])
        real(full, shards, weight)

    monkeypatch.setattr(kinds, "gather", gather)
    return seen


def step(net, x):
    y = x
    for layer in net:
        y = layer(y)
    y.square().sum().backward()


def given(at=0, rank=0):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(100 * at + rank)).requires_grad_()


# ---------------------------------------------------------------------- which are gathered together


@pytest.mark.parametrize(
    "limit, forward",
    [
        (0, [["0.a"], ["0.b"], ["0.c"], ["1.a"], ["1.b"], ["1.c"]]),
        (ONE, [["0.a"], ["0.b"], ["0.c"], ["1.a"], ["1.b"], ["1.c"]]),
        (2 * ONE, [["0.a", "0.b"], ["0.c", "1.a"], ["1.b", "1.c"]]),
        (4 * ONE, [["0.a", "0.b", "0.c", "1.a"], ["1.b", "1.c"]]),
        (BUCKET_BYTES, [["0.a", "0.b", "0.c", "1.a", "1.b", "1.c"]]),
    ],
)
def test_weights_that_follow_each_other_are_gathered_by_one_call_up_to_the_limit(storage, calls, limit, forward):
    net = layers(Layer, Layer)
    shard_(net, storage=storage, gather_bucket_bytes=limit)
    step(net, given())
    # The first pass learns the order.
    assert calls == [[f"{at}.{name}"] for at in (0, 1) for name in "abc"] + [
        [f"{at}.{name}"] for at in (1, 0) for name in "cba"
    ]
    calls.clear()
    step(net, given())
    names = [name for bucket in calls for name in bucket]
    assert calls[: len(forward)] == forward
    assert sorted(names) == sorted(2 * [f"{at}.{name}" for at in (0, 1) for name in "abc"])
    backward = calls[len(forward) :]
    assert [name for bucket in backward for name in bucket] == [f"{at}.{name}" for at in (1, 0) for name in "cba"]
    assert all(len(bucket) * ONE <= max(limit, ONE) for bucket in calls)


def test_the_next_bucket_is_gathered_when_the_first_of_one_is_used(storage, calls):
    net = layers(Layer, Layer)
    sharded = shard_(net, storage=storage, gather_bucket_bytes=2 * ONE)
    step(net, given())
    calls.clear()
    by_name = {weight.name: weight for weight in sharded.weights}
    for name, so_far in [("0.a", 2), ("0.b", 2), ("0.c", 3), ("1.a", 3), ("1.b", 3), ("1.c", 3)]:
        full = sharded.gathers.take(by_name[f"{name}.weight"], "forward")
        assert len(calls) == so_far, name
        assert torch.equal(full, by_name[f"{name}.weight"].parameter)
    sharded.gathers.end_of_pass("forward")


def test_a_larger_weight_is_one_alone_and_another_group_begins_another_bucket(storage, calls):
    net = layers(Layer, lambda: Layer(inner=40), Expert, Layer)
    shard_(net, storage=storage, gather_bucket_bytes=3 * ONE)
    step(net, given())
    calls.clear()
    with torch.no_grad():
        net(given())
    assert calls == [
        ["0.a", "0.b", "0.c"],
        ["1.a"],
        ["1.b"],
        ["1.c"],
        ["2.a", "2.b", "2.c"],
        ["3.a", "3.b", "3.c"],
    ]


class Noting(Layer):
    """Says when it begins and ends."""

    def forward(self, x):
        self.seen.append("begin")
        y = super().forward(x)
        self.seen.append("end")
        return y


@pytest.mark.parametrize("limit", [0, 2 * ONE, BUCKET_BYTES])
def test_a_graph_gathers_the_first_bucket_of_the_next_one(storage, calls, limit):
    net = layers(Noting, Noting)
    for layer in net:
        layer.seen = calls
    shard_(net, storage=storage, gather_bucket_bytes=limit)
    graphed = make_graphed_callables(list(net), [(given(),)], storage, chain=True)
    calls.clear()
    for _ in range(2):
        step(graphed, given())
    forward = {
        0: ["begin", ["0.a"], ["0.b"], ["0.c"], "end", "begin", ["1.a"], ["1.b"], ["1.c"], "end"],
        2 * ONE: ["begin", ["0.a", "0.b"], ["0.c"], ["1.a", "1.b"], "end", "begin", ["1.c"], "end"],
        BUCKET_BYTES: ["begin", ["0.a", "0.b", "0.c"], ["1.a", "1.b", "1.c"], "end", "begin", "end"],
    }[limit]
    backward = {
        0: [["1.c"], ["1.b"], ["1.a"], ["0.c"], ["0.b"], ["0.a"]],
        2 * ONE: [["1.c", "1.b"], ["1.a"], ["0.c", "0.b"], ["0.a"]],
        BUCKET_BYTES: [["1.c", "1.b", "1.a"], ["0.c", "0.b", "0.a"]],
    }[limit]
    # Launches in turn gather nothing twice.
    assert calls == 2 * (forward + backward)


def apart(storage, limit=BUCKET_BYTES):
    """Layers, and their graphs without a chain, whose inputs are copied."""
    net = layers(Layer, Layer, Layer)
    sharded = shard_(net, storage=storage, gather_bucket_bytes=limit)
    graphed = make_graphed_callables(list(net), [(given(),)] * 3, storage)
    return net, sharded, graphed


@pytest.mark.parametrize("order", [[1], [0, 2], [0, 0, 1], [0, 1, 1, 2], [2, 1, 0], [0, 1, 2, 0, 1, 2]])
def test_a_graph_that_is_launched_in_another_order_gathers_what_it_would_have_been_given(storage, order):
    net, _, graphed = apart(storage)
    x = given()
    with torch.no_grad():
        for at in order:
            # What the arenas hold by now is of no use.
            assert torch.equal(graphed[at](x), net[at](x))


def test_a_weight_that_changes_between_two_graphs_is_gathered_again(storage, calls):
    net, sharded, graphed = apart(storage)
    x = given()
    with torch.no_grad():
        before = net[1](x)
        graphed[0](x)
        calls.clear()
        net[1].b.weight.mul_(2.0)
        after = graphed[1](x)
        assert calls[0] == ["1.a", "1.b", "1.c"]
        assert torch.equal(after, net[1](x)) and not torch.equal(after, before)


def test_eager_execution_between_two_graphs_uses_no_planned_bytes(storage):
    net, sharded, graphed = apart(storage)
    x = given()
    expected = [layer(x) for layer in net]
    with torch.no_grad():
        for at in range(3):
            assert torch.equal(graphed[at](x), expected[at])
            assert not sharded.gathers._ahead
            assert all(torch.equal(layer(x), want) for layer, want in zip(net, expected))


def test_eager_execution_in_another_order_changes_nothing_of_the_graphs(storage):
    net, sharded, graphed = apart(storage)
    x = given()
    with torch.no_grad():
        expected = [layer(x) for layer in layers(Layer, Layer, Layer)]
        for at in (1, 1, 0, 0, 2, 0):
            assert torch.equal(net[at](x), expected[at])
        for at in (0, 1, 2, 1):
            assert torch.equal(graphed[at](x), expected[at])


def test_a_graph_that_failed_is_launched_again_with_its_weights(storage):
    class Fickle(Layer):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if Fickle.fails:
                raise ZeroDivisionError
            return y

    net = layers(Layer, Fickle, Layer)
    shard_(net, storage=storage)
    graphed = make_graphed_callables(list(net), [(given(),)] * 3, storage)
    x = given()
    graphed[0](x)
    Fickle.fails = True
    with pytest.raises(ZeroDivisionError):
        graphed[1](x)
    Fickle.fails = False
    assert all(torch.equal(call(x), layer(x)) for call, layer in zip(graphed[1:], net[1:]))


def test_a_weight_used_again_is_gathered_again(storage, calls):
    class Twice(Layer):
        def forward(self, x):
            return super().forward(x) + self.c(torch.cos(self.a(x)))

    net = layers(Twice, Layer)
    whole = layers(Twice, Layer)
    sharded = shard_(net, storage=storage)
    for _ in range(3):
        x, y = given(), given()
        step(net, x)
        step(whole, y)
        assert torch.equal(x.grad, y.grad)
    assert not sharded.gathers._ahead
    for weight in sharded.weights:
        assert torch.allclose(weight.main_grad, whole.get_parameter(weight.name).grad, rtol=1e-5, atol=1e-6)


def test_a_bucket_of_weights_that_changed_is_gathered_again_as_one(storage, calls):
    net = layers(Layer, Layer)
    sharded = shard_(net, storage=storage, gather_bucket_bytes=3 * ONE)
    with torch.no_grad():
        for _ in range(3):
            net(given())
        net[0](given())
        # The second layer's bucket is there already.
        assert len(sharded.gathers._ahead) == 3
        for weight in sharded.weights:
            weight.parameter.mul_(2.0)
        calls.clear()
        after = net[1](given())
        doubled = layers(Layer, Layer)
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
        assert torch.equal(after, doubled[1](given()))
    assert calls[0] == ["1.a", "1.b", "1.c"]


@pytest.mark.parametrize("limit", [0, 2 * ONE, 4 * ONE, BUCKET_BYTES])
def test_an_evaluation_gathers_nothing_for_the_next_one(storage, calls, limit):
    net = layers(Layer, Layer)
    sharded = shard_(net, storage=storage, gather_bucket_bytes=limit)
    with torch.no_grad():
        for _ in range(3):
            calls.clear()
            before = net(given())
            assert not sharded.gathers._ahead
            assert [name for bucket in calls for name in bucket] == [f"{at}.{name}" for at in (0, 1) for name in "abc"]
        # A change that torch does not count.
        for weight in sharded.weights:
            weight.parameter.data.mul_(2.0)
        after = net(given())
        doubled = layers(Layer, Layer)
        for parameter in doubled.parameters():
            parameter.mul_(2.0)
        assert torch.equal(after, doubled(given())) and not torch.equal(after, before)


class Checkpointed(Layer):
    """Keeps its input only, and runs its forward again in the backward: as a whole, or each half by itself."""

    reentrant, halves = False, False

    def forward(self, x):
        again = {"use_reentrant": self.reentrant}
        if not self.halves:
            return checkpoint(super().forward, x, **again)
        y = checkpoint(lambda x: torch.sin(self.a(x)), x, **again)
        return x + checkpoint(lambda y: self.c(torch.tanh(self.b(y))), y, **again)


class Halved(Checkpointed):
    halves = True


class Reentrant(Halved):
    reentrant = True


#: Whether torch tells that a backward is under way.
TELLS = hasattr(torch._C, "_current_graph_task_id")


@pytest.mark.skipif(not TELLS, reason="a torch that does not tell whether a backward is under way")
@pytest.mark.parametrize("kind", [Checkpointed, Halved, Reentrant])
@pytest.mark.parametrize("limit", [0, 2 * ONE, BUCKET_BYTES])
def test_a_forward_that_runs_again_in_a_backward_gathers_nothing_that_it_does_not_use(storage, calls, limit, kind):
    net, whole = layers(kind, kind, kind), layers(Layer, Layer, Layer)
    sharded = shard_(net, storage=storage, gather_bucket_bytes=limit)
    held, at_end = [], sharded._end_of_backward

    def noted():
        held.append(len(sharded.gathers._ahead))
        at_end()

    sharded._end_of_backward = noted
    for _ in range(3):
        calls.clear()
        x, y = given(), given()
        step(net, x)
        step(whole, y)
        assert torch.equal(x.grad, y.grad)
        # Of each weight: for the forward, for the forward again, for the backward.
        assert sorted(name for bucket in calls for name in bucket) == sorted(
            3 * [f"{at}.{name}" for at in range(3) for name in "abc"]
        )
    assert held and not any(held)


@pytest.mark.skipif(not TELLS, reason="a torch that does not tell whether a backward is under way")
@pytest.mark.parametrize("kind", [Checkpointed, Halved])
@pytest.mark.parametrize("limit", [0, 2 * ONE, BUCKET_BYTES])
def test_checkpoints_inside_graphs_gather_each_weight_once_for_each_use(storage, calls, limit, kind):
    net, whole = layers(kind, kind, kind), layers(Layer, Layer, Layer)
    sharded = shard_(net, storage=storage, gather_bucket_bytes=limit)
    graphed = make_graphed_callables(list(net), [(given(),)], storage, chain=True)
    for _ in range(2):
        calls.clear()
        x, y = given(), given()
        step(graphed, x)
        step(whole, y)
        assert torch.equal(x.grad, y.grad)
        assert sorted(name for bucket in calls for name in bucket) == sorted(
            3 * [f"{at}.{name}" for at in range(3) for name in "abc"]
        )
    sharded.join()
    for weight in sharded.weights:
        assert torch.allclose(weight.main_grad, whole.get_parameter(weight.name).grad, rtol=1e-5, atol=1e-6)


def test_what_an_exception_left_gathered_is_not_used(storage):
    net = layers(Layer, Layer)
    sharded = shard_(net, storage=storage)
    step(net, given())
    sharded.gathers.take(sharded.weights[0], "forward")
    assert len(sharded.gathers._ahead) == 5
    sharded.forget()
    assert not sharded.gathers._ahead
    sharded.zero_grad()
    step(net, given())
    assert not sharded.gathers._ahead and all(bool(weight.main_grad.any()) for weight in sharded.weights)


def test_weights_that_are_lent_come_out_of_buckets(storage, calls):
    net = nn.ModuleList([nn.Linear(4, 3, bias=False) for _ in range(6)])
    full = [linear.weight.detach().clone() for linear in net]
    sharded = shard_(net, storage=storage)
    leaders = [net[at].weight for at in (0, 2, 4)]
    for at, leader in zip((0, 2, 4), leaders):
        lead_([net[at].weight, net[at + 1].weight])
    for _ in range(3):
        calls.clear()
        lent = [leader.materialize_group_for_forward() for leader in leaders]
        assert all(torch.equal(mine, full[2 * at + i]) for at, pair in enumerate(lent) for i, mine in enumerate(pair))
        sharded.gathers.end_of_pass("forward")
        assert not sharded.gathers._lent and not sharded.gathers._ahead
    assert calls == [[str(at) for at in range(6)]]


@pytest.mark.parametrize("wrong", [-1, 1.5, "32", None, True])
def test_a_limit_that_is_no_number_of_bytes_is_refused_and_nothing_is_changed(storage, wrong):
    net = layers(Layer)
    with pytest.raises(sessile.ArgumentError, match="gather_bucket_bytes") as caught:
        shard_(net, storage=storage, gather_bucket_bytes=wrong)
    assert caught.value.argument == "gather_bucket_bytes" and caught.value.value == str(wrong)
    assert not any(isinstance(parameter, ShardedParameter) for parameter in net.parameters())


# ---------------------------------------------------------------------- bits


def _bits(rank, limit):
    """Outputs and gradients, eagerly and in graphs, and the plan's bytes."""
    net = layers(Layer, lambda: Layer(inner=20), Layer)
    storage = GraphStorage(device="cpu")
    sharded = shard_(net, dist.group.WORLD, storage=storage, gather_bucket_bytes=limit)
    found = []

    def run(calls):
        for at in range(3):
            x = given(at, rank)
            step(calls, x)
            sharded.join()
            found.append([x.grad.tolist(), *(weight.main_grad.tolist() for weight in sharded.weights)])
        sharded.zero_grad()

    run(net)
    run(make_graphed_callables(list(net), [(given(9, rank),)], storage, chain=True))
    return found, storage.plan.bytes, storage.plan.lower_bound_bytes


def test_buckets_change_no_bit_and_the_plan_tells_what_they_take():
    answers = {limit: ranks.run(_bits, 2, limit) for limit in (0, 3 * ONE, BUCKET_BYTES)}
    for rank in range(2):
        alone, *others = [answer[rank] for answer in answers.values()]
        assert all(other[0] == alone[0] for other in others)
        assert alone[0][:3] == alone[0][3:]
        assert alone[1] <= others[-1][1]


def _planned(rank, apart, limit):
    net = layers(Layer, Layer, Layer)
    storage = GraphStorage(device="cpu")
    if apart:
        empty = storage.empty
        storage.empty = lambda *given, **named: empty(*given, **{**named, "symmetric": named.get("symmetric") is True})
    shard_(net, dist.group.WORLD, storage=storage, kind="one_shot", gather_bucket_bytes=limit)
    make_graphed_callables(list(net), [(given(),)], storage, chain=True)
    return storage.plan.bytes, len(storage.plan.arenas)


@pytest.mark.parametrize("limit", [0, BUCKET_BYTES])
def test_gathered_weights_share_bytes_with_gradients_that_other_ranks_read(limit):
    [(apart, two), _] = ranks.run(_planned, 2, True, limit)
    [(shared, one), _] = ranks.run(_planned, 2, False, limit)
    assert shared < apart and (one, two) == (1, 2)


def _together(rank, size):
    shards = [torch.full(shape, 10.0 * at + rank) for at, shape in enumerate([(2, 3), (1, 5), (4, 4)])]
    full = [torch.empty(size * shard.shape[0], shard.shape[1]) for shard in shards]
    kinds.gather_together(full, shards, None)
    kinds.gather_together(full, shards, dist.group.WORLD)
    return [one.tolist() for one in full]


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "allgather_into_tensor_coalesced"), reason="a torch whose gloo can't gather together"
)
def test_one_call_gathers_every_shard_in_rank_order():
    for found in ranks.run(_together, 2, 2):
        for at, (full, rows) in enumerate(zip(found, (2, 1, 4))):
            assert [row[0] for row in full] == [10.0 * at + rank for rank in range(2) for _ in range(rows)]

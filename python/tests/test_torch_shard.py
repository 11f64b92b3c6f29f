"""Sharded weights on CPU tensors: the same numbers as a reference that is not sharded, eagerly and over planned views."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
import sessile
from sessile.torch import (
    GraphStorage,
    ShardedParameter,
    full_state_dict,
    lead_,
    load_full_state_dict,
    make_graphed_callables,
    shard_,
)


class Block(nn.Module):
    """A small residual block; its norm stays whole."""

    def __init__(self, width=12, inner=20):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Expert(Block):
    is_expert = True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Expert(), Block()])
        self.head = nn.Linear(12, 7, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        # The output layer is used twice, as in multi-token prediction.
        return self.head(x).sum() + self.head(torch.sin(x)).sum()


def build():
    torch.manual_seed(3)
    return Net()


def data(rank, step=0):
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def reference(size):
    """Gradients of each rank, summed in rank order and scaled, as `main_grad` must have them."""
    total = {}
    for rank in range(size):
        net = build()
        net(data(rank)).backward()
        for name, parameter in net.named_parameters():
            if name.endswith(("up.weight", "down.weight", "head.weight")):
                total.setdefault(name, []).append(parameter.grad)
    return total


def gathered(weight):
    """The whole `main_grad` of a weight."""
    parts = [torch.empty_like(weight.main_grad) for _ in range(weight.size)]
    if weight.size > 1:
        dist.all_gather(parts, weight.main_grad, group=weight.group)
    else:
        parts = [weight.main_grad]
    return torch.cat(parts)[: weight.out]


def _eager(rank, size):
    expert_group = [dist.new_group([r]) for r in range(size)][rank]
    net = build()
    storage = GraphStorage(device="cpu")
    sharded = shard_(net, dist.group.WORLD, expert_group=expert_group, storage=storage)
    ready = []
    sharded.on_grad_ready(lambda parameter: ready.append(parameter.sharded.name))
    loss = net(data(rank))
    loss.backward()
    assert ready.count("head.weight") == 2 and len(ready) == 8
    assert all(p.grad is None for p in net.parameters() if isinstance(p, ShardedParameter))
    grads = {weight.name: gathered(weight) for weight in sharded.weights}
    state = full_state_dict(net)
    assert all(torch.equal(state[name], value) for name, value in build().state_dict().items())
    return float(loss), {name: grad.tolist() for name, grad in grads.items()}, [
        _graphs(rank, kind) for kind in ("one_shot", "fp32_a2a", "ring")
    ]


def _graphs(rank, kind):
    """A chain of blocks over planned views; three steps give the bits of eager execution."""
    torch.manual_seed(3)
    blocks = [Block() for _ in range(3)]
    storage = GraphStorage(device="cpu", depth=2)
    sharded = shard_(nn.ModuleList(blocks), dist.group.WORLD, storage=storage, kind=kind)
    assert sharded.kinds == {"gtp": kind}
    expected = []
    for step in range(3):
        x = data(rank, step).requires_grad_()
        y = x
        for block in blocks:
            y = block(y)
        y.square().sum().backward()
        expected.append((y.detach().clone(), x.grad.clone(), [w.main_grad.clone() for w in sharded.weights]))
    sharded.zero_grad()
    ready = []
    sharded.on_grad_ready(lambda parameter: ready.append(parameter.sharded.name))
    sample = (data(rank, 9).requires_grad_(),)
    graphed = make_graphed_callables(blocks, [sample], storage, chain=True)
    assert not any(bool(w.main_grad.any()) for w in sharded.weights) and not ready
    norms = [p for p in nn.ModuleList(blocks).parameters() if not isinstance(p, ShardedParameter)]
    for parameter in norms:
        parameter.grad = None
    for step in range(3):
        x = data(rank, step).requires_grad_()
        y = x
        for call in graphed:
            y = call(y)
        y.square().sum().backward()
        sharded.join()
        out, gx, grads = expected[step]
        assert torch.equal(y, out) and torch.equal(x.grad, gx)
        assert all(torch.equal(w.main_grad, grad) for w, grad in zip(sharded.weights, grads))
    assert len(ready) == 3 * 6 and storage.order_deviations == 0 and storage.replays == 18
    assert all(parameter.grad is not None for parameter in norms)
    roles = {role for role in ("a2a_scratch", "fp32_output", "rs_output") if f'"{role}"' in storage._core.trace()}
    return storage.plan.bytes, storage.plan.lower_bound_bytes, roles, [grad.tolist() for grad in grads]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_the_scaled_sums_in_rank_order(size):
    answers = ranks.run(_eager, size, size)
    total = reference(size)
    for rank, (loss, grads, graphed) in enumerate(answers):
        net = build()
        assert loss == float(net(data(rank)).detach())
        for name, parts in total.items():
            mine = torch.tensor(grads[name])
            if "blocks.1" in name:
                want = parts[rank]
            elif name == "head.weight":
                # Two uses, two additions: the sum of both only to rounding.
                assert torch.allclose(mine, sum(parts) / size, rtol=1e-5, atol=1e-6)
                continue
            else:
                want = parts[0]
                for part in parts[1:]:
                    want = want + part
                want = want * (1.0 / size)
            assert torch.equal(mine, want), name
        one_shot, a2a, ring = graphed
        assert all(planned >= bound > 0 for planned, bound, _, _ in graphed)
        assert [roles for _, _, roles, _ in graphed] == [set(), {"a2a_scratch", "fp32_output"}, {"rs_output"}]
        assert one_shot[3] == a2a[3]
        for mine, rounded in zip(a2a[3], ring[3]):
            assert torch.allclose(torch.tensor(mine), torch.tensor(rounded), rtol=1e-5, atol=1e-6)


def test_auto_chooses_by_size_and_place():
    from sessile.torch.kinds import choose

    assert [choose("auto", size, True) for size in (1, 2, 16, 17)] == ["one_shot", "one_shot", "one_shot", "fp32_a2a"]
    assert [choose("auto", size, False) for size in (2, 3)] == ["ring", "fp32_a2a"]
    assert choose("ring", 64, True) == "ring"


def _save(rank, size):
    net = build()
    shard_(net, dist.group.WORLD, storage=GraphStorage(device="cpu"))
    other = Net()
    shard_(other, dist.group.WORLD, storage=GraphStorage(device="cpu"))
    load_full_state_dict(other, full_state_dict(net))
    same = [torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters())]
    try:
        load_full_state_dict(other, {**full_state_dict(net), "head.weight": torch.zeros(3, 3)})
    except sessile.ShardingError as error:
        wrong = error.module
    return all(same), wrong, {name: value.tolist() for name, value in full_state_dict(other).items()}


def test_a_state_loads_into_another_group_size():
    states = [answer for size in (1, 2) for answer in ranks.run(_save, size, size)]
    assert all(state == states[0] for state in states)
    assert states[0][:2] == (True, "head.weight")


def test_a_weight_that_changed_after_it_was_gathered_ahead_is_gathered_again(storage):
    net = build()
    sharded = shard_(net, storage=storage)
    x = data(0)
    with torch.no_grad():
        for _ in range(2):
            before = net(x)
        # An evaluation that stops half-way, with what follows gathered ahead.
        net.blocks[0](x)
        assert sharded.gathers._ahead
        for weight in sharded.weights:
            weight.parameter.mul_(2.0)
        after = net(x)
    doubled = build()
    with torch.no_grad():
        for name, parameter in doubled.named_parameters():
            if name.endswith(("up.weight", "down.weight", "head.weight")):
                parameter.mul_(2.0)
    assert torch.equal(after, doubled(x)) and not torch.equal(before, after)


# ---------------------------------------------------------------------- Transformer Engine's protocol


def test_a_layer_that_knows_the_protocol_gets_the_weight_and_gives_its_gradient(storage):
    net = nn.Sequential(nn.Linear(4, 3, bias=False))
    full = net[0].weight.detach().clone()
    shard_(net, storage=storage)
    leader = net[0].weight
    assert leader.is_distributed_weight and isinstance(leader, torch.Tensor)
    [weight] = leader.materialize_group_for_forward()
    assert torch.equal(weight, full)
    [weight] = leader.materialize_group_for_backward()
    assert torch.equal(weight, full)
    owner = leader.sharded.owner
    owner.manual = True
    # A gradient of its own is copied; one in the buffer that was given out is not.
    assert leader.finalize_group_grads(torch.ones(3, 4)) == [None]
    buffer = leader.grad_buffer()
    assert buffer.shape == full.shape and buffer.dtype == full.dtype
    buffer.fill_(2.0)
    assert leader.finalize_group_grads([buffer]) == [None] and leader.grad_added_to_main_grad
    assert owner._pending[-1].send.data_ptr() == buffer.data_ptr()
    owner.drain()
    assert torch.equal(leader.main_grad[:3], torch.full((3, 4), 3.0))


def test_the_leader_of_a_grouped_layer_stands_for_all_its_weights(storage):
    net = nn.ModuleList([nn.Linear(4, 3, bias=False) for _ in range(3)])
    full = [linear.weight.detach().clone() for linear in net]
    shard_(net, storage=storage)
    parameters = [linear.weight for linear in net]
    leader = parameters[0]
    with pytest.raises(sessile.ShardingError, match="lead_"):
        leader.finalize_group_grads([torch.ones(3, 4)] * 3)
    lead_(parameters)
    for direction in (leader.materialize_group_for_forward, leader.materialize_group_for_backward):
        assert all(torch.equal(weight, want) for weight, want in zip(direction(), full))
    leader.sharded.owner.manual = True
    buffers = [parameter.grad_buffer() for parameter in parameters]
    for at, buffer in enumerate(buffers):
        buffer.fill_(at + 1.0)
    assert leader.finalize_group_grads(buffers) == [None] * 3
    leader.sharded.owner.drain()
    for at, parameter in enumerate(parameters):
        assert torch.equal(parameter.main_grad[:3], torch.full((3, 4), at + 1.0))


# ---------------------------------------------------------------------- bad input


def test_what_cannot_be_sharded_is_refused_and_left_alone(storage):
    net = build()
    before = [type(module) for module in net.modules()]
    shard_(net, storage=storage)
    with pytest.raises(sessile.ShardingError, match="sharded already"):
        shard_(net, storage=GraphStorage(device="cpu"))

    tied = build()
    tied.blocks[0].up.weight = tied.blocks[2].up.weight
    with pytest.raises(sessile.ShardingError, match="tied") as caught:
        shard_(tied, storage=GraphStorage(device="cpu"))
    assert caught.value.module == "blocks.2.up.weight" and [type(m) for m in tied.modules()] == before

    half = build().to(torch.float16)
    with pytest.raises(sessile.ShardingError, match="float16"):
        shard_(half, storage=GraphStorage(device="cpu"))
    with pytest.raises(sessile.ShardingError, match="no nn.Linear"):
        shard_(nn.Sequential(nn.LayerNorm(3)), storage=GraphStorage(device="cpu"))
    with pytest.raises(sessile.ShardingError, match="give its parent"):
        shard_(nn.Linear(2, 2), storage=GraphStorage(device="cpu"))
    with pytest.raises(sessile.ArgumentError, match="kind"):
        shard_(build(), storage=GraphStorage(device="cpu"), kind="fast")
    with pytest.raises(sessile.ShardingError, match="meta"):
        shard_(build().to("meta"), storage=GraphStorage(device="cpu"))


def test_compiled_modules_are_refused():
    compile_ = getattr(torch, "compile", None)
    if compile_ is None:
        pytest.skip("this torch has no torch.compile")
    net = build()
    net.head = compile_(net.head)
    with pytest.raises(sessile.ShardingError, match="compiled"):
        shard_(net, storage=GraphStorage(device="cpu"))
    with pytest.raises(sessile.ShardingError, match="compiled"):
        make_graphed_callables([compile_(Block())], [(data(0),)], GraphStorage(device="cpu"))


def test_a_second_backward_over_one_forward_is_refused(storage):
    net = nn.Sequential(nn.Linear(4, 3, bias=False))
    sharded = shard_(net, storage=storage)
    loss = net(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    before = sharded.weights[0].main_grad.clone()
    with pytest.raises(sessile.ShardingError, match="retain_graph"):
        loss.backward()
    assert torch.equal(before, sharded.weights[0].main_grad)


def test_graphed_modules_refuse_what_they_were_not_captured_for(storage):
    blocks = [Block(), Block()]
    sharded = shard_(nn.ModuleList(blocks), storage=storage)
    with pytest.raises(sessile.ShardingError, match="captured once"):
        make_graphed_callables([blocks[0], blocks[0]], [(data(0),), (data(0),)], storage)
    with pytest.raises(sessile.ShardingError, match="sample_args"):
        make_graphed_callables(blocks, [(data(0),)], storage)
    handle = blocks[0].register_forward_hook(lambda *_: None)
    with pytest.raises(sessile.ShardingError, match="hooks"):
        make_graphed_callables(blocks, [(data(0),)], storage, chain=True)
    handle.remove()
    first, second = make_graphed_callables(blocks, [(data(0),)], storage, chain=True)
    with pytest.raises(sessile.MismatchError, match="captured with"):
        first(torch.zeros(6, 12))
    with pytest.raises(sessile.MismatchError, match="on meta: call it as it was captured") as caught:
        first(torch.empty(5, 12, device="meta"))
    assert caught.value.expected == "torch.float32(5, 12) on cpu" and caught.value.found == "torch.float32(5, 12) on meta"
    with pytest.raises(sessile.MismatchError, match="captured with"):
        first(data(0).view(torch.int32))
    with pytest.raises(sessile.MismatchError, match="1 inputs"):
        first(data(0), data(0))
    loss = second(first(data(0))).sum()
    loss.backward(retain_graph=True)
    before = [weight.main_grad.clone() for weight in sharded.weights]
    with pytest.raises(sessile.ShardingError, match="has had its backward"):
        loss.backward()
    assert all(torch.equal(a, w.main_grad) for a, w in zip(before, sharded.weights))
    storage.free()
    with pytest.raises(sessile.PhaseError, match="nothing is sealed"):
        first(data(0))


def test_a_capture_that_fails_leaves_everything_as_it_was(storage):
    class Fickle(Block):
        """Fails at a given call."""

        calls, fails = 0, -1

        def forward(self, x):
            Fickle.calls += 1
            if Fickle.calls == Fickle.fails:
                raise ZeroDivisionError
            return super().forward(x)

    blocks = [Block(), Fickle()]
    sharded = shard_(nn.ModuleList(blocks), storage=storage)
    for weight in sharded.weights:
        weight.main_grad.fill_(0.5)
    # In the warm-up, in the discovery, in the capture.
    for fails in (1, 3, 4):
        Fickle.calls, Fickle.fails = 0, fails
        with pytest.raises(ZeroDivisionError):
            make_graphed_callables(blocks, [(data(0),)], storage, chain=True)
        assert storage.plan is None
    assert all(bool((weight.main_grad == 0.5).all()) for weight in sharded.weights)
    assert all(parameter.grad is None for block in blocks for parameter in block.parameters())
    Fickle.fails = -1
    first, second = make_graphed_callables(blocks, [(data(0),)], storage, chain=True)
    second(first(data(0))).sum().backward()
    assert all(bool((weight.main_grad != 0.5).any()) for weight in sharded.weights)
    with pytest.raises(sessile.PhaseError, match="sealed"):
        make_graphed_callables(blocks, [(data(0),)], storage, chain=True)

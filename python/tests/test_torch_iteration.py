"""A whole iteration as one runner: forward, backward, reduction and optimizer over planned views, on CPU tensors."""

import torch
import torch.distributed as dist
from torch import nn

import ranks
from sessile.torch import GraphStorage, ShardedParameter, shard_


class Trained:
    """Three layers with sharded weights, FP32 copies of them, and an optimizer with momentum."""

    def __init__(self):
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
        self.storage = GraphStorage(device="cpu")
        self.sharded = shard_(self.net, dist.group.WORLD, storage=self.storage)
        self.weights = [weight.parameter for weight in self.sharded.weights]
        self.whole = [p for p in self.net.parameters() if not isinstance(p, ShardedParameter)]
        self.masters = [p.detach().clone() for p in [*self.weights, *self.whole]]
        for master, weight in zip(self.masters, self.weights):
            master.grad = weight.main_grad
        self.optimizer = torch.optim.SGD(self.masters, lr=0.1, momentum=0.9)

    def iteration(self, x):
        """All of a step. Gradients are zero again at its end."""
        loss = self.net(x).square().mean()
        loss.backward()
        self.sharded.join()
        for master, parameter in zip(self.masters[len(self.weights) :], self.whole):
            dist.all_reduce(parameter.grad)
            master.grad = parameter.grad / dist.get_world_size()
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip([*self.weights, *self.whole], self.masters):
                parameter.copy_(master)
        self.sharded.zero_grad()
        for parameter in self.whole:
            parameter.grad = None
        return loss.detach()


def _iterations(rank):
    data = [torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + rank)) for step in range(7)]
    eager, planned = Trained(), Trained()
    expected = [eager.iteration(x) for x in data]
    # The first iteration is eager: it learns which weight is gathered after which.
    storage, losses = planned.storage, [planned.iteration(data[0])]
    with storage.discover("iteration"):
        losses.append(planned.iteration(data[1]))
    plan = storage.seal()
    with storage.capture("iteration"):
        losses.append(planned.iteration(data[2]))
    for x in data[3:]:
        with storage.replay("iteration"):
            losses.append(planned.iteration(x))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert all(torch.equal(a, b) for a, b in zip(planned.masters, eager.masters))
    assert storage.replays == 4 and storage.order_deviations == 0
    return plan.bytes, sum(size for _, size in storage.arenas), len(plan.fences), sum(view[3] for view in plan.views)


def test_forward_backward_reduction_and_optimizer_are_one_runner():
    answers = ranks.run(_iterations, 2)
    assert answers[0] == answers[1]
    planned, arena, fences, asked = answers[0]
    # Launches of one runner follow each other: its bytes are used again inside, and nothing waits for the launch before.
    assert planned == arena < asked and fences == 0

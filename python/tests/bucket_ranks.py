"""A program of two ranks, each with a GPU: weights gathered one by one and in buckets, eagerly and in graphs, give the same bits.
`test_torch_cuda.py` starts it."""

import gc
import os

import torch
import torch.distributed as dist
from torch import nn

from sessile.torch import GraphStorage, kinds, make_graphed_callables, shard_
from sessile.torch.gathers import BUCKET_BYTES

WIDTH, STEPS = 256, 4
ONE = WIDTH * WIDTH * 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mid = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.mid(torch.tanh(self.up(self.norm(x))))))


def train(rank, limit, graphs):
    """Gradients of the input and of the weights after each step, and how many weights each call gathered."""
    torch.manual_seed(8)
    net = nn.ModuleList([Layer() for _ in range(3)]).to("cuda", torch.bfloat16)
    storage = GraphStorage()
    sharded = shard_(net, dist.group.WORLD, storage=storage, gather_bucket_bytes=limit)
    together, real = [], kinds.gather

    def gather(full, shards, weight):
        together.append(len(full))
        real(full, shards, weight)

    kinds.gather = gather
    calls = list(net)
    if graphs:
        sample = torch.zeros(32, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
        calls = make_graphed_callables(calls, [(sample,)], storage, chain=True, random=False)
    found = []
    for step in range(STEPS):
        given = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        x = y = given.to("cuda", torch.bfloat16).requires_grad_()
        for call in calls:
            y = call(y)
        y.float().square().sum().backward()
        sharded.join()
        found += [x.grad.clone(), *(weight.main_grad.clone() for weight in sharded.weights)]
        with torch.no_grad():
            for weight in sharded.weights:
                weight.parameter.add_(weight.main_grad, alpha=-1e-3)
        sharded.zero_grad()
    with torch.no_grad():
        # Launched twice, and its follower's weights changed since: the follower gathers its first bucket again.
        x = torch.ones(32, WIDTH, device="cuda", dtype=torch.bfloat16)
        calls[0](x)
        y = calls[0](x)
        sharded.weights[3].parameter.mul_(1.5)
        for call in calls[1:]:
            y = call(y)
        found.append(y.clone())
    torch.cuda.synchronize()
    sharded.check()
    kinds.gather = real
    return found, together


def main():
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    expected, together = train(rank, 0, False)
    assert set(together) == {1}
    for limit in (0, 4 * ONE, BUCKET_BYTES):
        for graphs in (False, True):
            found, together = train(rank, limit, graphs)
            # A runner has three weights; without runners all nine fit together.
            most = {0: 1, 4 * ONE: 2, BUCKET_BYTES: 3 if graphs else 9}[limit]
            assert max(together) == most, (limit, graphs, together)
            assert all(torch.equal(one, other) for one, other in zip(found, expected)), (limit, graphs)
    print(f"rank {rank} as expected", flush=True)
    # NCCL waits for graphs that hold its communicators.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

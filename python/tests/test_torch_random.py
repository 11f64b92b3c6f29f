"""Random programs over planned views: what is written at an acquire is still there at the release, in every replay."""

import random

import pytest
import torch

from sessile.torch import GraphStorage

DTYPES = [torch.float32, torch.bfloat16, torch.int32]


def make(seed):
    """Runners as lists of ('acquire', number, shape, dtype) and ('release', number). Some buffers are released by a later
    runner, some by none."""
    rng = random.Random(seed)
    runners, live, number = [], [], 0
    for _ in range(rng.randint(1, 6)):
        steps, own = [], []
        for _ in range(rng.randint(1, 10)):
            if live and rng.random() < 0.45:
                steps.append(("release", live.pop(rng.randrange(len(live)))))
            else:
                shape = (rng.randint(1, 40), rng.randint(1, 40))
                steps.append(("acquire", number, shape, rng.choice(DTYPES)))
                live.append(number)
                own.append(number)
                number += 1
        # What stays goes to the next runner or is never released.
        live = [n for n in live if rng.random() < 0.5]
        runners.append(steps)
    return runners


def run(storage, runners, enter, salt):
    """Runs the program; gives the addresses of its views. A buffer that a later runner releases lives until then."""
    views, addresses = {}, []
    released = {step[1] for steps in runners for step in steps if step[0] == "release"}

    def intact(number):
        view, value = views[number]
        assert bool((view == value).all()), f"buffer {number} was written by another"

    for at, steps in enumerate(runners):
        own = []
        with enter(f"r{at}"):
            for step in steps:
                if step[0] == "acquire":
                    _, number, shape, dtype = step
                    view = storage.empty(shape, dtype, weight=str(number))
                    value = torch.tensor((number * 7 + salt) % 251, dtype=dtype)
                    view.fill_(value)
                    views[number] = view, value
                    addresses.append(view.data_ptr())
                    own.append(number)
                else:
                    intact(step[1])
                    storage.release(views[step[1]][0])
        for number in own:
            if number not in released:
                intact(number)
    return addresses


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_live_view_is_written_by_another(depth):
    reused = 0
    for seed in range(60):
        runners = make(seed)
        storage = GraphStorage(device="cpu", depth=depth)
        run(storage, runners, storage.discover, 1)
        plan = storage.seal()
        first = run(storage, runners, storage.capture, 2)
        for salt in (3, 4):
            assert run(storage, runners, storage.replay, salt) == first
        total = sum(size for _, _, _, size in plan.views)
        reused += plan.bytes < total
        assert plan.lower_bound_bytes <= plan.bytes <= total
    assert reused > 20

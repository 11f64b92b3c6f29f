"""Planned storage on a GPU: proofs of order, fences in graphs, memory that graphs own. Skipped where there is none."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import sessile
from sessile.torch import GraphStorage, ShardedParameter, make_graphed_callables, shard_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROWS = 1 << 20


def graph(stream, run):
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made, stream=stream, capture_error_mode="thread_local"):
        run()
    return made


def program(storage, side, source, sinks, joined=True):
    """A runner: two buffers one after the other; a side stream reads each, slowly. With `joined` the second is acquired
    after the first was released and that is waited for."""
    main = torch.cuda.current_stream()
    for at, sink in enumerate(sinks):
        buffer = storage.empty((ROWS,), torch.float32, weight=str(at))
        torch.add(source, at, out=buffer)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(20):
                sink.add_(buffer)
            storage.release(buffer)
        if joined:
            main.wait_stream(side)
    main.wait_stream(side)


def expected(source, runs, at):
    return 20 * runs * (source + at)


@pytest.fixture
def parts():
    source = torch.arange(ROWS, dtype=torch.float32, device="cuda") % 97
    sinks = [torch.zeros(ROWS, device="cuda") for _ in range(2)]
    return torch.cuda.Stream(), torch.cuda.Stream(), source, sinks


@pytest.mark.parametrize("joined", [True, False])
def test_order_is_proven_from_the_captured_edges(parts, joined):
    stream, side, source, sinks = parts
    storage = GraphStorage()
    for sink in sinks:
        sink.add_(0)

    def runs(scope):
        with scope("r"):
            program(storage, side, source, sinks, joined)

    graph(stream, lambda: runs(storage.discover))
    plan = storage.seal()
    # Joined, the second lies where the first was; else each has bytes of its own.
    assert plan.bytes == ROWS * 4 * (1 if joined else 2)
    replay = storage.launcher("r", graph(stream, lambda: runs(storage.capture)))
    for _ in range(5):
        replay()
    torch.cuda.synchronize()
    for at, sink in enumerate(sinks):
        assert torch.equal(sink, expected(source, 5, at))


def test_an_eager_discovery_proves_nothing(parts):
    stream, side, source, sinks = parts
    storage = GraphStorage()
    with storage.discover("r"):
        program(storage, side, source, sinks)
    graph(stream, lambda: prove(storage, side, source, sinks))
    assert storage.seal().bytes == ROWS * 4
    other = GraphStorage()
    with other.discover("r"):
        program(other, side, source, sinks)
    assert other.seal().bytes == 2 * ROWS * 4


def prove(storage, side, source, sinks):
    with storage.prove("r"):
        program(storage, side, source, sinks)


def test_a_capture_that_lost_the_order_is_an_error(parts):
    stream, side, source, sinks = parts
    storage = GraphStorage()

    def runs(scope, joined):
        with scope("r"):
            program(storage, side, source, sinks, joined)

    graph(stream, lambda: runs(storage.discover, True))
    storage.seal()
    with pytest.raises(sessile.MismatchError, match="neither before the other"):
        graph(stream, lambda: runs(storage.capture, False))
    # The storage can go on.
    replay = storage.launcher("r", graph(stream, lambda: runs(storage.capture, True)))
    replay()
    torch.cuda.synchronize()


def chain(storage, names, stream, side, source, sinks, scope):
    """Runners that each hand a buffer to the side stream and complete before it was read."""
    graphs = []
    for at, name in enumerate(names):

        def run(at=at, name=name):
            with scope(name):
                main = torch.cuda.current_stream()
                buffer = storage.empty((ROWS,), torch.float32, weight=name)
                torch.add(source, at, out=buffer)
                side.wait_stream(main)
                storage.complete()
                with torch.cuda.stream(side):
                    for _ in range(40):
                        sinks[at].add_(buffer)
                    storage.release(buffer)
                main.wait_stream(side)

        graphs.append(graph(stream, run))
    return graphs


@pytest.mark.parametrize("random", [True, False, None])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fences_keep_what_runs_on_beside_the_next_runner(depth, random):
    names = [f"r{at}" for at in range(6)]
    source = torch.arange(ROWS, dtype=torch.float32, device="cuda") % 97
    sinks = [torch.zeros(ROWS, device="cuda") for _ in names]
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    storage = GraphStorage(depth=depth)
    chain(storage, names, stream, side, source, sinks, storage.discover)
    plan = storage.seal()
    assert plan.bytes == min(depth, len(names)) * ROWS * 4
    assert bool(plan.fences) == (depth > 1)
    made = chain(storage, names, stream, side, source, sinks, storage.capture)
    replays = [storage.launcher(name, one, random=random) for name, one in zip(names, made)]
    for _ in range(10):
        for replay in replays:
            replay()
    storage.join()
    torch.cuda.synchronize()
    for at, sink in enumerate(sinks):
        assert torch.equal(sink, 40 * 10 * (source + at)), at
    assert storage.order_deviations == 0
    # Out of order: joined first, counted, and right.
    for at in (3, 1, 4):
        replays[at]()
    storage.join()
    torch.cuda.synchronize()
    assert storage.order_deviations == 3
    assert torch.equal(sinks[3], 40 * 11 * (source + 3)) and torch.equal(sinks[2], 40 * 10 * (source + 2))


@pytest.mark.parametrize("step_cut", ["barrier", "wrap"])
def test_the_log_is_in_order_and_a_wait_that_is_left_out_is_found(step_cut, tmp_path):
    names = [f"r{at}" for at in range(6)]
    source = torch.arange(ROWS, dtype=torch.float32, device="cuda") % 97
    sinks = [torch.zeros(ROWS, device="cuda") for _ in names]
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    storage = GraphStorage(depth=2, step_cut=step_cut, log=True)
    chain(storage, names, stream, side, source, sinks, storage.discover)
    storage.seal()
    made = chain(storage, names, stream, side, source, sinks, storage.capture)
    replays = [storage.launcher(name, one) for name, one in zip(names, made)]
    for _ in range(3):
        for replay in replays:
            replay()
    storage.join()
    storage.save_log(tmp_path / "log.json")
    text = (tmp_path / "log.json").read_text()
    assert sessile.check_log(text) == []
    waits = 0
    for graph_at, one in enumerate(json.loads(text)["ranks"][0]["graphs"]):
        for node_at, node in enumerate(one["nodes"]):
            if isinstance(node["work"], dict) and "wait" in node["work"]:
                waits += 1
                log = json.loads(text)
                log["ranks"][0]["graphs"][graph_at]["nodes"][node_at]["work"] = "empty"
                assert any(f"`{one['runner']}`" in line for line in sessile.check_log(json.dumps(log)))
    assert waits == len(storage.plan.fences) > 0
    storage.free()
    storage.save_log(tmp_path / "log.json")
    assert sessile.check_log((tmp_path / "log.json").read_text()) == []


def test_releases_at_one_place_are_one_record_and_one_wait():
    stream, side = torch.cuda.Stream(), torch.cuda.Stream()
    names, storage = [f"r{at}" for at in range(4)], GraphStorage(depth=2, step_cut="wrap")
    sinks = {name: torch.zeros(256, device="cuda") for name in names}

    def capture(scope):
        made = []
        for name in names:

            def run(name=name):
                with scope(name):
                    main = torch.cuda.current_stream()
                    views = [storage.empty((256,), torch.float32, weight=f"{at}") for at in range(3)]
                    for at, view in enumerate(views):
                        view.fill_(at + 1.0)
                    side.wait_stream(main)
                    storage.complete()
                    with torch.cuda.stream(side):
                        for view in views:
                            sinks[name].add_(view)
                        for view in views:
                            storage.release(view)
                    main.wait_stream(side)

            made.append(graph(stream, run))
        return made

    capture(storage.discover)
    plan = storage.seal()
    launches = [storage.launcher(name, one) for name, one in zip(names, capture(storage.capture))]
    assert len(plan.fences) > len(names)
    # The record of the completion is one more.
    assert [storage._core.event_nodes(at) for at in range(4)] == [(2, 1)] * 4
    for _ in range(50):
        for launch in launches:
            launch()
    storage.join()
    torch.cuda.synchronize()
    assert all(torch.equal(sink, torch.full_like(sink, 6.0 * 50)) for sink in sinks.values())
    assert all(launch.driver_calls == 4 for launch in launches)


def trained(storage):
    """A model with its optimizer, and one function for all of a step."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)).cuda()
    sharded = shard_(net, None, storage=storage)
    parameters = list(net.parameters())
    masters = [p.detach().clone() for p in parameters]
    for master, parameter in zip(masters, parameters):
        if isinstance(parameter, ShardedParameter):
            master.grad = parameter.main_grad
    optimizer = torch.optim.AdamW(masters, lr=1e-2, capturable=True)
    x, loss = torch.zeros(32, 64, device="cuda"), torch.zeros((), device="cuda")

    def iteration():
        result = net(x).square().mean()
        loss.copy_(result.detach())
        result.backward()
        sharded.join()
        for master, parameter in zip(masters, parameters):
            if parameter.grad is not None:
                master.grad = parameter.grad
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        sharded.zero_grad()
        for parameter in parameters:
            parameter.grad = None

    return iteration, x, loss, masters


def test_a_whole_iteration_is_one_graph():
    data = [torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda() for step in range(12)]
    iteration, x, loss, masters = trained(GraphStorage())
    expected = []
    for given in data:
        x.copy_(given)
        iteration()
        expected.append(loss.clone())
    eager = [master.clone() for master in masters]

    storage = GraphStorage()
    iteration, x, loss, masters = trained(storage)
    stream, losses = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    # The optimizer makes its state in the first two steps, outside any graph.
    with torch.cuda.stream(stream):
        for given in data[:2]:
            x.copy_(given)
            iteration()
            losses.append(loss.clone())
    torch.cuda.synchronize()

    def runs(scope):
        with scope("iteration"):
            iteration()

    graph(stream, lambda: runs(storage.discover))
    plan = storage.seal()
    assert plan.bytes < sum(view[3] for view in plan.views) and not plan.fences
    replay = storage.launcher("iteration", graph(stream, lambda: runs(storage.capture)))
    for given in data[2:]:
        x.copy_(given)
        replay()
        losses.append(loss.clone())
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert all(torch.equal(one, other) for one, other in zip(masters, eager))
    assert storage.replays == 10 and storage.order_deviations == 0


def test_the_first_launch_finds_out_whether_a_graph_draws_random_numbers():
    x, drawn = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")
    stream, storage = torch.cuda.Stream(), GraphStorage()
    bodies = {"plain": lambda: x.add_(1), "random": lambda: drawn.uniform_()}
    for body in bodies.values():
        body()

    def runs(scope, name):
        with scope(name):
            bodies[name]()

    for name in bodies:
        graph(stream, lambda name=name: runs(storage.discover, name))
    storage.seal()
    launch = {name: storage.launcher(name, graph(stream, lambda name=name: runs(storage.capture, name))) for name in bodies}
    x.zero_()
    seen = []
    for _ in range(3):
        launch["plain"]()
        launch["random"]()
        seen.append(drawn.clone())
    torch.cuda.synchronize()
    assert launch["plain"].direct and not launch["random"].direct
    assert float(x[0]) == 3 and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    assert launch["plain"].driver_calls == 1


def test_gradients_of_replays_are_those_of_eager_execution_and_stay_as_they_were():
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()).cuda() for _ in range(3)]
    storage = GraphStorage()
    sharded = shard_(nn.ModuleList(blocks), None, storage=storage)
    whole = [p for b in blocks for p in b.parameters() if not isinstance(p, ShardedParameter)]
    data = [torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda() for step in range(3)]

    def step(calls, given):
        for parameter in whole:
            parameter.grad = None
        x = y = given.clone().requires_grad_()
        for call in calls:
            y = call(y)
        y.square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in whole)]

    expected = [step(blocks, given) for given in data]
    sharded.zero_grad()
    sample = (torch.zeros(16, 64, device="cuda").requires_grad_(),)
    calls = make_graphed_callables(blocks, [sample], storage, chain=True)
    kept = [step(calls, given) for given in data]
    sharded.join()
    torch.cuda.synchronize()
    for found, want in zip(kept, expected):
        assert all(torch.equal(one, other) for one, other in zip(found, want))


def test_a_graph_owns_the_memory_it_was_captured_with(parts):
    stream, side, source, sinks = parts
    storage = GraphStorage()

    def runs(scope):
        with scope("r"):
            program(storage, side, source, sinks)

    graph(stream, lambda: runs(storage.discover))
    storage.seal()
    made = graph(stream, lambda: runs(storage.capture))
    storage.free()
    del storage
    gc.collect()
    fill = [torch.full((ROWS,), -5.0, device="cuda") for _ in range(8)]
    made.replay()
    torch.cuda.synchronize()
    assert torch.equal(sinks[1], expected(source, 1, 1))
    assert all(float(part.min()) == -5.0 for part in fill)


def test_phases_that_are_wrong_on_a_gpu(parts):
    stream, side, source, sinks = parts
    storage = GraphStorage()
    with storage.discover("r"):
        program(storage, side, source, sinks)
    storage.seal()
    with pytest.raises(sessile.PhaseError, match="captures nothing"):
        with storage.capture("r"):
            pass
    with pytest.raises(sessile.PhaseError, match="on CUDA call what"):
        with storage.replay("r"):
            pass
    with pytest.raises(sessile.PhaseError, match="no runner was entered"):
        graph(stream, lambda: storage.empty((4,), torch.float32))
    with pytest.raises(sessile.RunnerError, match="no graph"):
        storage.launcher("r", torch.cuda.CUDAGraph())


@pytest.mark.parametrize("how", ["eager", "graphs"])
def test_an_optimizer_does_not_step_on_what_a_rank_did_not_come_for(how):
    program = os.path.join(os.path.dirname(__file__), "late_rank.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program, how]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} as expected" in done.stdout for rank in range(2))


def test_gradients_are_not_checked_in_a_capture():
    sharded = shard_(nn.Sequential(nn.Linear(8, 8, bias=False)).cuda(), None, storage=GraphStorage())
    with pytest.raises(sessile.PhaseError, match="capture without a guard") as caught:
        graph(torch.cuda.Stream(), sharded.check)
    assert caught.value.call == "check" and "remove the guard" in caught.value.remedy
    sharded.check()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device: NCCL wants one for each rank")
def test_weights_gathered_in_buckets_give_the_bits_of_weights_gathered_alone():
    program = os.path.join(os.path.dirname(__file__), "bucket_ranks.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} as expected" in done.stdout for rank in range(2))

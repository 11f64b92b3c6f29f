"""Planned storage on a GPU: proofs of order, fences in graphs, memory that graphs own. Skipped where there is none."""

import gc

import pytest
import torch

import sessile
from sessile.torch import GraphStorage

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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fences_keep_what_runs_on_beside_the_next_runner(depth):
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
    replays = [storage.launcher(name, one) for name, one in zip(names, made)]
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

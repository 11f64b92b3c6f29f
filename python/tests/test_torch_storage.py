"""Planned storage on CPU tensors: the life of it, and what happens when it is used wrongly."""

import gc

import pytest
import torch

import sessile
from sessile.torch import GraphStorage


def two_runners(storage, enter):
    """Two backwards of a buffer each, with one released early."""
    views = []
    for runner in ("layer1", "layer0"):
        with enter(runner):
            first = storage.empty((8, 32), torch.float32, role="wgrad_input", weight=runner)
            first.fill_(1.0)
            storage.release(first)
            second = storage.empty((4, 32), torch.bfloat16, role="rs_output", weight=runner)
            second.fill_(2.0)
            views.append((first, second))
    return views


def sealed(storage):
    two_runners(storage, storage.discover)
    storage.seal()
    return storage


def test_capture_and_replay_get_the_planned_views(storage):
    eager = two_runners(storage, storage.discover)
    plan = storage.seal()
    captured = two_runners(storage, storage.capture)
    [(base, size)] = storage.arenas
    assert size == plan.bytes >= plan.lower_bound_bytes
    for view in (view for pair in captured for view in pair):
        assert base <= view.data_ptr() < base + size and view.data_ptr() % 256 == 0
    for pair, old in zip(captured, eager):
        for view, other in zip(pair, old):
            assert view.shape == other.shape and view.dtype == other.dtype
            assert view.data_ptr() != other.data_ptr()
    for _ in range(3):
        again = two_runners(storage, storage.replay)
        assert [[v.data_ptr() for v in p] for p in again] == [[v.data_ptr() for v in p] for p in captured]
        assert all(a is b for x, y in zip(again, captured) for a, b in zip(x, y))
    assert storage.replays == 6 and storage.order_deviations == 0


def test_released_bytes_are_used_again_inside_a_runner(storage):
    sealed(storage)
    views = two_runners(storage, storage.capture)
    # 1024 bytes, released, then 256: the second fits where the first was.
    assert storage.plan.bytes < 2 * (1024 + 256)
    for first, second in views:
        assert first.data_ptr() <= second.data_ptr() < first.data_ptr() + 1024


def test_outside_a_runner_requests_are_ordinary_tensors(storage):
    sealed(storage)
    one = storage.empty((3,), torch.float64)
    assert one.dtype == torch.float64
    storage.release(one)


def test_a_view_outlives_the_storage(storage):
    sealed(storage)
    (first, _), _ = two_runners(storage, storage.capture)
    storage.free()
    del storage
    gc.collect()
    # New memory of the same size must not lie where the view does.
    others = [torch.zeros(8, 32) for _ in range(64)]
    first.fill_(7.0)
    assert float(first.sum()) == 7.0 * 256
    assert all(float(other.sum()) == 0.0 for other in others)


def test_a_deviation_from_the_sealed_order_is_counted(storage):
    sealed(storage)
    two_runners(storage, storage.capture)
    with storage.replay("layer1"):
        storage.release(storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1"))
        storage.empty((4, 32), torch.bfloat16, role="rs_output", weight="layer1")
    with storage.replay("layer1"):
        storage.release(storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1"))
        storage.empty((4, 32), torch.bfloat16, role="rs_output", weight="layer1")
    assert storage.order_deviations == 1


class Replayed:
    """Stands for a captured graph."""

    def __init__(self):
        self.launches = 0

    def replay(self):
        self.launches += 1


def test_launches_are_counted_in_the_sealed_order_and_end_with_their_plan(storage):
    sealed(storage)
    graphs = {"layer1": Replayed(), "layer0": Replayed()}
    with pytest.raises(sessile.RunnerError, match="no graph"):
        storage.launcher("layer1", graphs["layer1"])
    two_runners(storage, storage.capture)
    launch = {name: storage.launcher(name, graph) for name, graph in graphs.items()}
    for name in ("layer1", "layer0", "layer1", "layer1"):
        launch[name]()
    assert (graphs["layer1"].launches, graphs["layer0"].launches) == (3, 1)
    assert storage.replays == 4 and storage.order_deviations == 1
    storage.free()
    sealed(storage)
    two_runners(storage, storage.capture)
    with pytest.raises(sessile.PhaseError, match="another plan"):
        launch["layer1"]()
    with storage.replay("layer1"):
        with pytest.raises(sessile.PhaseError, match="being replayed"):
            storage.launcher("layer0", graphs["layer0"])
        with pytest.raises(sessile.PhaseError):
            launch["layer0"]()
        storage.release(storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1"))
        storage.empty((4, 32), torch.bfloat16, role="rs_output", weight="layer1")
    assert graphs["layer1"].launches == 3


def test_the_trace_feeds_the_planner(storage, tmp_path):
    two_runners(storage, storage.discover)
    path = tmp_path / "trace.json"
    storage.save_trace(path)
    plan = sessile.plan(path.read_text())
    assert plan.digest == storage.seal().digest
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_cannot_be_written_leaves_nothing(storage, tmp_path):
    two_runners(storage, storage.discover)
    with pytest.raises(OSError):
        storage.save_trace(tmp_path / "absent" / "trace.json")
    with pytest.raises(sessile.TraceError):
        GraphStorage(device="cpu").save_trace(tmp_path / "empty.json")
    assert list(tmp_path.iterdir()) == []


def test_alternatives_share_their_bytes(storage):
    for name, rows in (("short", 8), ("long", 64)):
        with storage.discover(name):
            storage.empty((rows, 64), torch.float32)
        storage.next_alternative()
    assert storage.seal().bytes == 64 * 64 * 4


# ---------------------------------------------------------------------- bad input


def test_capture_of_another_shape_or_dtype_names_both(storage):
    sealed(storage)
    for shape, dtype in (((8, 33), torch.float32), ((8, 32), torch.bfloat16)):
        with pytest.raises(sessile.MismatchError) as caught:
            with storage.capture("layer1"):
                storage.empty(shape, dtype, role="wgrad_input", weight="layer1")
        error = caught.value
        assert (error.runner, error.index) == ("layer1", 0)
        assert "f32[8, 32]" in error.expected and error.found != error.expected
    # The failed captures changed nothing.
    two_runners(storage, storage.capture)


def test_a_capture_that_asks_for_more_or_less_fails(storage):
    sealed(storage)
    with pytest.raises(sessile.MismatchError) as caught:
        with storage.capture("layer1"):
            storage.release(storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1"))
    assert caught.value.found is None and "rs_output" in caught.value.expected
    with pytest.raises(sessile.MismatchError) as caught:
        with storage.capture("layer1"):
            storage.release(storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1"))
            storage.empty((4, 32), torch.bfloat16, role="rs_output", weight="layer1")
            storage.empty((1,), torch.float32)
    assert caught.value.expected is None
    two_runners(storage, storage.capture)


def test_a_release_in_another_place_fails(storage):
    sealed(storage)
    with pytest.raises(sessile.MismatchError) as caught:
        with storage.capture("layer1"):
            storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1")
            storage.empty((4, 32), torch.bfloat16, role="rs_output", weight="layer1")
    assert "release" in caught.value.expected


def test_phases_in_the_wrong_order(storage):
    with pytest.raises(sessile.PhaseError, match="nothing is sealed"):
        with storage.capture("layer1"):
            pass
    two_runners(storage, storage.discover)
    with pytest.raises(sessile.PhaseError):
        with storage.replay("layer1"):
            pass
    with pytest.raises(sessile.PhaseError, match="being discovered"):
        with storage.discover("layer2"):
            storage.seal()
    storage.restart_discovery()
    sealed(storage)
    with pytest.raises(sessile.PhaseError, match="free it first") as caught:
        storage.seal()
    assert caught.value.call == "seal"
    with pytest.raises(sessile.PhaseError):
        with storage.discover("layer2"):
            pass
    with pytest.raises(sessile.RunnerError, match="no graph"):
        with storage.replay("layer1"):
            pass
    two_runners(storage, storage.capture)
    with pytest.raises(sessile.RunnerError, match="has a graph already") as caught:
        with storage.capture("layer1"):
            pass
    assert caught.value.runner == "layer1"
    with pytest.raises(sessile.RunnerError, match="not discovered"):
        with storage.capture("layer9"):
            pass
    storage.free()
    with pytest.raises(sessile.PhaseError, match="nothing is sealed"):
        with storage.replay("layer1"):
            pass
    with pytest.raises(sessile.PhaseError):
        storage.free()
    # And it can begin anew.
    sealed(storage)


def test_a_discovery_that_differs_from_the_first(storage):
    with storage.discover("a"):
        storage.empty((4,), torch.float32)
    with pytest.raises(sessile.MismatchError, match="discovered twice"):
        with storage.discover("a"):
            storage.empty((5,), torch.float32)
    with pytest.raises(sessile.MismatchError):
        with storage.discover("a"):
            pass


def test_requests_that_cannot_be_planned(storage):
    with pytest.raises(sessile.ArgumentError, match="float64"):
        with storage.discover("a"):
            storage.empty((4,), torch.float64)
    with pytest.raises(sessile.ArgumentError, match="symmetric"):
        with storage.discover("a"):
            storage.empty((4,), torch.float32, symmetric=True)
    with pytest.raises(sessile.ArgumentError, match='use True, False or "planned"'):
        storage.empty((4,), torch.float32, symmetric="later")
    with pytest.raises(sessile.GroupError, match="experts"):
        with storage.discover("a"):
            storage.empty((4,), torch.float32, group="experts")
    with pytest.raises(sessile.TraceError, match="no elements"):
        with storage.discover("a"):
            storage.empty((0,), torch.float32)
        storage.seal()


def test_releases_that_cannot_be(storage):
    with storage.discover("a"):
        view = storage.empty((4,), torch.float32)
        with pytest.raises(sessile.ArgumentError, match="did not return"):
            storage.release(view[:2])
        storage.release(view)
        with pytest.raises(sessile.ArgumentError, match="released before"):
            storage.release(view)
    with pytest.raises(sessile.StorageError, match="outside any runner"):
        storage.release(view)


def test_devices_that_are_not_there():
    with pytest.raises(sessile.ArgumentError):
        GraphStorage(device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(sessile.DeviceError) as caught:
            GraphStorage(device="cuda")
        assert caught.value.remedy
    with pytest.raises(sessile.PlanError):
        GraphStorage(device="cpu", strategy="best")


def test_operands_of_a_reduction_that_do_not_fit(storage):
    storage.add_group("dp", None)
    main_grad, send = torch.zeros(4), torch.zeros(4)
    wrong = [
        (torch.zeros(4, dtype=torch.float64), send, "contiguous float32"),
        (main_grad, torch.zeros(4, dtype=torch.int32), "contiguous bfloat16"),
        (main_grad, torch.zeros(4, 2)[:, 0], "contiguous"),
        (main_grad, torch.zeros(4, device="meta"), "on meta"),
        (main_grad, torch.zeros(8), "8 elements"),
    ]
    for to, given, why in wrong:
        with pytest.raises(sessile.ArgumentError, match=why):
            storage.reduce_scatter_accumulate(to, given, "dp", 1.0)
    with pytest.raises(sessile.GroupError):
        storage.reduce_scatter_accumulate(main_grad, send, "nobody", 1.0)
    with pytest.raises(sessile.GroupError):
        storage.add_one_shot(None)
    with pytest.raises(sessile.PhaseError, match="of the CPU"):
        storage.reduce_scatter_accumulate(main_grad, send, "dp", 1.0)


def test_an_exception_inside_a_pass_leaves_the_storage_usable(storage):
    with pytest.raises(ZeroDivisionError):
        with storage.discover("a"):
            storage.empty((4,), torch.float32)
            raise ZeroDivisionError
    sealed(storage)
    with pytest.raises(ZeroDivisionError):
        with storage.capture("layer1"):
            storage.empty((8, 32), torch.float32, role="wgrad_input", weight="layer1")
            raise ZeroDivisionError
    two_runners(storage, storage.capture)

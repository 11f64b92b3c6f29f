"""Planned storage for code of one's own: discover, seal, capture, replay."""

from __future__ import annotations

import glob
import os
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Literal, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from .._sessile import Core, Launcher, Plan
from ..errors import ArgumentError, DeviceError, GroupError, PhaseError
from .groups import describe
from .pool import EagerPool

Group = Union[str, "dist.ProcessGroup", None]

#: Name of each dtype that planned storage may hold.
DTYPES: Dict[torch.dtype, str] = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}


class GraphStorage:
    """Fixed-address buffers of runners that are captured once and replayed.

    A *runner* is one module's forward or backward. Each is discovered once (``discover``), then all ranks agree and
    allocate (``seal``), then each is captured (``capture``) and replayed. In all of these, and in eager use, the same
    code asks for its buffers by ``empty``; after the seal it gets the planned views.

    On a device without streams (CPU) the program order is the order of everything, and ``replay`` is a scope in which
    the same code runs again over the same views.
    """

    def __init__(
        self,
        *,
        device: Union[str, torch.device, None] = None,
        groups: Optional[Mapping[str, "dist.ProcessGroup"]] = None,
        group: Optional["dist.ProcessGroup"] = None,
        strategy: str = "sessile",
        depth: int = 2,
        step_cut: str = "barrier",
        name: str = "torch",
        log: bool = False,
        patience: float = 60.0,
    ) -> None:
        """``groups`` names the process groups that requests may belong to; ``group`` is the one over which everything is
        agreed, by default that of all ranks. ``strategy``, ``depth`` and ``step_cut`` are those of ``sessile plan``. With
        ``log`` the event log is kept, for `save_log`: it grows with every launch. A reduction in one shot gives up after
        ``patience`` seconds in which another rank did not come."""
        self.device = _device(device)
        self._ordinal: Optional[int] = self.device.index
        #: Handle of the current stream, asked as `_current(_index)`: 0 where there are none.
        self._current: Callable[[int], int] = int if self._ordinal is None else torch._C._cuda_getCurrentRawStream
        self._index = self._ordinal or 0
        self._names: Dict[int, str] = {}
        self._lanes: Dict[int, "torch.cuda.Stream"] = {}
        ranks, rank, gather = describe(group, "world")
        self._core = Core(
            name,
            ranks,
            rank,
            gather,
            strategy=strategy,
            depth=depth,
            step_cut=step_cut,
            ordinal=self._ordinal,
            log=log,
            patience=float(patience),
        )
        self._pool = EagerPool(self._core, self._ordinal)
        for key, member in (groups or {}).items():
            self.add_group(key, member)

    # ------------------------------------------------------------------ groups

    def add_group(self, name: str, group: Optional["dist.ProcessGroup"]) -> None:
        """Makes a process group known under a name that is the same on all its ranks."""
        ranks, rank, gather = describe(group, name)
        self._core.add_group(name, ranks, rank, gather)
        if group is not None:
            self._names[id(group)] = name

    def add_one_shot(self, group: Group) -> None:
        """Makes a group able to reduce in one shot. Collective over the group; before any capture."""
        self._core.add_reducer(self._named(group))

    def _group_name(self, group: Group) -> Optional[str]:
        if group is None or isinstance(group, str):
            return group
        name = self._names.get(id(group))
        if name is None:
            raise GroupError("the process group has no name here: call add_group before the seal", group=str(group))
        return name

    def _named(self, group: Group) -> str:
        name = self._group_name(group)
        if name is None:
            raise GroupError("one-shot reduction belongs to a group: name it", group="None")
        return name

    # ------------------------------------------------------------------ passes

    def _raw(self, stream: Optional["torch.cuda.Stream"] = None) -> int:
        """The handle of a stream, by default the current one."""
        if stream is not None and self._ordinal is not None:
            return stream.cuda_stream
        return self._current(self._index)

    @contextmanager
    def discover(self, runner: str, stream: Optional["torch.cuda.Stream"] = None) -> Iterator[None]:
        """One launch of the runner in the step's order; its requests and releases are noted.

        Inside ``torch.cuda.graph`` (a capture that is thrown away), the order between streams is proven from the edges
        of the captured graph; elsewhere on CUDA nothing is proven, and every request lives as long as its runner."""
        self._core.begin_discover(runner, True, self._raw(stream))
        with self._pass(stream):
            yield

    @contextmanager
    def prove(self, runner: str, stream: Optional["torch.cuda.Stream"] = None) -> Iterator[None]:
        """A runner that was discovered eagerly, once more inside a capture that is thrown away: proves its order."""
        self._core.begin_discover(runner, False, self._raw(stream))
        with self._pass(stream):
            yield

    @contextmanager
    def capture(self, runner: str, stream: Optional["torch.cuda.Stream"] = None) -> Iterator[None]:
        """The capture of a runner: request k gets the view of request k of the discovery. On CUDA it is entered inside
        ``torch.cuda.graph``; fences become nodes of the graph, which owns the memory, and at the end the captured edges
        must still prove the order that the plan rests on."""
        self._core.begin_capture(runner, self._raw(stream))
        with self._pass(stream):
            yield

    @contextmanager
    def replay(self, runner: str) -> Iterator[None]:
        """The captured sequence once more, by hand, over the same views: for devices without graphs."""
        if self._ordinal is not None:
            raise PhaseError(
                "replay by hand is for the CPU: on CUDA call what `launcher` returns",
                call="replay",
                phase="the storage is of a CUDA device",
                remedy="use `launcher(runner, graph)`",
            )
        self._core.begin_replay(runner)
        with self._pass(None):
            yield

    @contextmanager
    def _pass(self, stream: Optional["torch.cuda.Stream"]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._pool.end_pass()
            self._core.abort()
            raise
        self._pool.end_pass()
        self._core.end(self._raw(stream))

    def launcher(
        self,
        runner: str,
        graph: "torch.cuda.CUDAGraph",
        *,
        random: Optional[bool] = None,
        stream: Optional["torch.cuda.Stream"] = None,
    ) -> Launcher:
        """A function that replays the runner's graph: in the sealed order, behind what the current stream has, or always
        behind ``stream``. A runner that called `complete` gets a stream of its own, on which the rest of it runs on beside
        the next runner; `join` waits for that. A launch out of order waits for everything first, and is counted.

        torch's own replay advances the state of random numbers that the graph draws. ``random=False`` says that it draws
        none, and it is then launched without torch; ``None`` finds out at the first launch, from the state of the device's
        default generator before and after it."""
        at = self._core.runner(runner)
        lane = None
        if self._ordinal is not None and self._core.completes(at):
            lane = self._lanes.setdefault(at, torch.cuda.Stream(self._ordinal))
        known = self._ordinal is not None and hasattr(graph, "raw_cuda_graph_exec")
        return Launcher(
            self._core,
            at,
            graph,
            graph.raw_cuda_graph_exec() if known else 0,
            None if lane is None else lane.cuda_stream,
            self._current if stream is None else self._raw(stream),
            self._index,
            self._by_hand(graph, stream if lane is None else lane, random if known else True),
            random is False,
        )

    def _by_hand(
        self, graph: "torch.cuda.CUDAGraph", stream: Optional["torch.cuda.Stream"], random: Optional[bool]
    ) -> Callable[[], bool]:
        """A launch by torch, on a stream or on the current one; it says whether the next one must be by torch too."""
        ordinal = self._ordinal

        def launch() -> bool:
            before = None
            if random is None:
                before = torch.cuda.default_generators[ordinal].get_state()
            with torch.cuda.stream(stream):
                graph.replay()
            if before is None:
                return random is not False
            return not torch.equal(before, torch.cuda.default_generators[ordinal].get_state())

        return launch

    def join(self) -> None:
        """Makes the current stream wait for everything that runners left running: before the optimizer reads gradients.
        Then `check`: the host does not wait, so a reduction that runs still is not judged yet."""
        self._core.join(self._raw())
        self.check()

    def check(self) -> None:
        """Raises `DeviceError`, at every call, if a reduction in one shot that has ended gave up waiting for another rank: what it
        and those after it were to add is missing. Costs a read of the host's memory; waits for nothing."""
        self._core.check()

    def next_alternative(self) -> None:
        """What is discovered from here on never runs in the same step as what was before: both share everything."""
        self._core.next_alternative()

    def restart_discovery(self) -> None:
        """Forgets what was discovered so far, as after a discovery that failed half-way."""
        self._core.restart_discovery()

    # ------------------------------------------------------------------ the plan

    def seal(self) -> Plan:
        """Agrees with all ranks on what was discovered, plans it and allocates. Nothing grows afterwards."""
        if self._ordinal is not None:
            torch.cuda.synchronize(self._ordinal)
        plan = self._core.seal(self._raw())
        tensors = {}
        for request, capsule in self._core.exports():
            view = from_dlpack(capsule)
            view._sessile_request = request  # type: ignore[attr-defined]
            tensors[request] = view
        self._core.set_tensors(tensors)
        return plan

    @property
    def plan(self) -> Optional[Plan]:
        """The plan, once sealed."""
        return self._core.plan

    @property
    def replays(self) -> int:
        """Replays so far."""
        return self._core.counters[0]

    @property
    def order_deviations(self) -> int:
        """Replays that were not the next one of the sealed order."""
        return self._core.counters[1]

    @property
    def arenas(self) -> List[Tuple[int, int]]:
        """Address and bytes of each arena, in the plan's order."""
        return self._core.arenas()

    def free(self) -> None:
        """Gives the plan up. Views that somebody still holds keep their memory, and so do graphs."""
        if self._ordinal is not None:
            torch.cuda.synchronize(self._ordinal)
        self._core.free()
        self._lanes.clear()

    def save_trace(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes what was discovered as a trace, for ``sessile plan``, ``compare`` and ``report``."""
        _write(path, self._core.trace())

    def save_log(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes this rank's event log, for ``sessile check``: each request as one operation from its acquire to its release, in
        the order that the captured graphs prove, with fences, launches, completions and joins. Kept with ``log=True``."""
        _write(path, self._core.log())

    # ------------------------------------------------------------------ requests

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        role: str = "buffer",
        group: Group = None,
        weight: str = "",
        unsharded_shape: Optional[Sequence[int]] = None,
        symmetric: Union[bool, Literal["planned"]] = False,
        expert: Optional[int] = None,
        accumulates_into: Optional[str] = None,
    ) -> torch.Tensor:
        """A buffer whose first write comes next on the current stream.

        In a capture or replay it is the planned view of the runner's next request, which must equal the discovered one
        in everything given here. Elsewhere it is a tensor of its own. ``symmetric`` asks for memory that all ranks of the
        group can read; ``"planned"`` needs none, but lies there in a plan, to share bytes with what does."""
        key = (shape, dtype, role, group, weight, unsharded_shape, symmetric, expert, accumulates_into)
        view = self._core.take(key, self._current(self._index))
        if view is not None:
            return view
        return self._request(key)

    def _request(self, key: Tuple[Any, ...]) -> torch.Tensor:
        shape, dtype, role, group, weight, unsharded, symmetric, expert, accumulates_into = key
        if symmetric not in (False, True, "planned"):
            raise ArgumentError(
                f'symmetric is {symmetric!r}: use True, False or "planned"', argument="symmetric", value=str(symmetric)
            )
        shape = tuple(shape)
        name = self._group_name(group)
        if self._core.scope == "idle":
            if self._ordinal is not None and torch.cuda.is_current_stream_capturing():
                raise PhaseError(
                    "empty is called in a capture that no runner was entered for",
                    call="empty",
                    phase="a stream captures outside any runner",
                    remedy="enter storage.capture(runner) inside torch.cuda.graph",
                )
            return self._eager(shape, dtype, name, symmetric)
        request, view = self._core.request(
            (shape, *key[1:]),
            weight,
            role,
            DTYPES.get(dtype, str(dtype)),
            list(shape),
            list(shape if unsharded is None else unsharded),
            name,
            bool(symmetric),
            expert,
            accumulates_into,
            self._raw(),
        )
        if view is None:
            view = self._eager(shape, dtype, name, symmetric)
            view._sessile_request = request  # type: ignore[attr-defined]
        return view

    def _eager(
        self, shape: Tuple[int, ...], dtype: torch.dtype, group: Optional[str], symmetric: Union[bool, str]
    ) -> torch.Tensor:
        if symmetric is True and group is not None and self._ordinal is not None:
            return self._pool.take(shape, dtype, group)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def release(self, view: torch.Tensor, stream: Optional["torch.cuda.Stream"] = None) -> None:
        """Nothing that is enqueued later on the stream (the current one) reads ``view``: its bytes may be used again.
        Outside a runner this does nothing for tensors that no runner asked for, except that registered ones go back to
        their pool."""
        pooled = self._pool.give(view, stream)
        request = getattr(view, "_sessile_request", None)
        if request is not None and not (pooled and self._core.scope == "idle"):
            self._core.release(request, self._raw(stream))
        elif request is None and self._core.scope != "idle":
            raise ArgumentError(
                "view is a tensor that `empty` did not return: release exactly what it returned, not a view of it",
                argument="view",
                value=str(tuple(view.shape)),
            )

    def complete(self, stream: Optional["torch.cuda.Stream"] = None) -> None:
        """The next runner may start from here on; what this one enqueues later runs beside it."""
        self._core.complete(self._raw(stream))

    # ------------------------------------------------------------------ reduction

    def reduce_scatter_accumulate(
        self,
        main_grad: torch.Tensor,
        send: torch.Tensor,
        group: Group,
        scale: float,
        stream: Optional["torch.cuda.Stream"] = None,
    ) -> None:
        """``main_grad += scale * sum over ranks of my block of send``, FP32, in rank order, in one launch on the stream.
        ``send`` lies in the group's registered memory (``empty(..., symmetric=True)``); call `add_one_shot` first."""
        name = self._named(group)
        fits = main_grad.dtype == torch.float32 and main_grad.is_contiguous() and send.is_contiguous()
        if not fits or send.dtype not in (torch.bfloat16, torch.float32):
            raise ArgumentError(
                "main_grad must be contiguous float32, send contiguous bfloat16 or float32",
                argument="main_grad, send",
                value=f"{main_grad.dtype}, {send.dtype}",
            )
        if main_grad.device != self.device or send.device != self.device:
            raise ArgumentError(
                f"main_grad is on {main_grad.device}, send on {send.device}, the storage on {self.device}: all must be on one",
                argument="main_grad, send",
                value=f"{main_grad.device}, {send.device}",
            )
        size = self._core.group_size(name)
        if send.numel() != size * main_grad.numel():
            raise ArgumentError(
                f"send has {send.numel()} elements: {size} ranks need {size} blocks of {main_grad.numel()}",
                argument="send",
                value=str(tuple(send.shape)),
            )
        self._core.reduce_scatter_accumulate(
            name,
            DTYPES[send.dtype],
            scale,
            send.data_ptr(),
            main_grad.data_ptr(),
            main_grad.numel(),
            self._raw(stream),
            getattr(send, "_sessile_request", None),
        )


def _write(path: Union[str, "os.PathLike[str]"], text: str) -> None:
    """Writes a file that is there whole or not at all."""
    part = f"{os.fspath(path)}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


def _device(device: Union[str, torch.device, None]) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device is {device}: use `cpu` or `cuda`", argument="device", value=str(device))
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError(
            "torch sees no CUDA device: look at `sessile doctor`, or use device='cpu'",
            remedy="install a CUDA build of torch and the driver, or use device='cpu'",
        )
    torch.cuda.init()
    _find_libraries()
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _find_libraries() -> None:
    """Shows the Rust half the libraries that came with torch, in an environment that is not activated too."""
    if "SESSILE_CUDA_LIBS" not in os.environ:
        packages = os.path.dirname(os.path.dirname(torch.__file__))
        found = sorted(glob.glob(os.path.join(packages, "nvidia", "*", "lib")))
        if found:
            os.environ["SESSILE_CUDA_LIBS"] = ":".join(found)

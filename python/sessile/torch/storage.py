"""Planned storage for code of one's own: discover, seal, capture, replay."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist
from torch.utils.dlpack import from_dlpack

from .._sessile import Core, Plan
from ..errors import ArgumentError, DeviceError, GroupError
from . import groups

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
    ) -> None:
        """``groups`` names the process groups that requests may belong to; ``group`` is the one over which everything is
        agreed, by default that of all ranks. ``strategy``, ``depth`` and ``step_cut`` are those of ``sessile plan``."""
        self.device = _device(device)
        self._names: Dict[int, str] = {}
        self._views: List[torch.Tensor] = []
        ranks, rank, gather = _describe(group, "world")
        self._core = Core(name, ranks, rank, gather, strategy=strategy, depth=depth, step_cut=step_cut)
        for key, member in (groups or {}).items():
            self.add_group(key, member)

    # ------------------------------------------------------------------ groups

    def add_group(self, name: str, group: Optional["dist.ProcessGroup"]) -> None:
        """Makes a process group known under a name that is the same on all its ranks."""
        ranks, rank, gather = _describe(group, name)
        self._core.add_group(name, ranks, rank, gather)
        if group is not None:
            self._names[id(group)] = name

    def _group_name(self, group: Group) -> Optional[str]:
        if group is None or isinstance(group, str):
            return group
        name = self._names.get(id(group))
        if name is None:
            raise GroupError("the process group has no name here: call add_group before the seal", group=str(group))
        return name

    # ------------------------------------------------------------------ passes

    @contextmanager
    def discover(self, runner: str) -> Iterator[None]:
        """One launch of the runner in the step's order; its requests and releases are noted."""
        self._core.begin_discover(runner, True)
        with self._pass():
            yield

    @contextmanager
    def capture(self, runner: str) -> Iterator[None]:
        """The capture of a runner: request k gets the view of request k of the discovery."""
        self._core.begin_capture(runner)
        with self._pass():
            yield

    @contextmanager
    def replay(self, runner: str) -> Iterator[None]:
        """The captured sequence once more, by hand, over the same views."""
        self._core.begin_replay(runner)
        with self._pass():
            yield

    @contextmanager
    def _pass(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._core.abort()
            raise
        self._core.end()

    def next_alternative(self) -> None:
        """What is discovered from here on never runs in the same step as what was before: both share everything."""
        self._core.next_alternative()

    def restart_discovery(self) -> None:
        """Forgets what was discovered so far, as after a discovery that failed half-way."""
        self._core.restart_discovery()

    # ------------------------------------------------------------------ the plan

    def seal(self) -> Plan:
        """Agrees with all ranks on what was discovered, plans it and allocates. Nothing grows afterwards."""
        plan = self._core.seal()
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

    def free(self) -> None:
        """Gives the plan up. Views that somebody still holds keep their memory."""
        self._core.free()

    def save_trace(self, path: Union[str, "os.PathLike[str]"]) -> None:
        """Writes what was discovered as a trace, for ``sessile plan``, ``compare`` and ``report``."""
        text = self._core.trace()
        part = f"{os.fspath(path)}.part"
        try:
            with open(part, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, path)
        except BaseException:
            if os.path.exists(part):
                os.unlink(part)
            raise

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
        symmetric: bool = False,
        expert: Optional[int] = None,
        accumulates_into: Optional[str] = None,
    ) -> torch.Tensor:
        """A buffer whose first write comes next on the current stream.

        In a capture or replay it is the planned view of the runner's next request, which must equal the discovered one
        in everything given here. Elsewhere it is a tensor of its own.
        """
        key = (shape, dtype, role, group, weight, unsharded_shape, symmetric, expert, accumulates_into)
        view = self._core.take(key)
        if view is not None:
            return view
        return self._request(key)

    def _request(self, key: Tuple[Any, ...]) -> torch.Tensor:
        shape, dtype, role, group, weight, unsharded, symmetric, expert, accumulates_into = key
        shape = tuple(shape)
        if self._core.scope == "idle":
            return torch.empty(shape, dtype=dtype, device=self.device)
        request, view = self._core.request(
            (shape, *key[1:]),
            weight,
            role,
            DTYPES.get(dtype, str(dtype)),
            list(shape),
            list(shape if unsharded is None else unsharded),
            self._group_name(group),
            symmetric,
            expert,
            accumulates_into,
        )
        if view is None:
            view = torch.empty(shape, dtype=dtype, device=self.device)
            view._sessile_request = request  # type: ignore[attr-defined]
        return view

    def release(self, view: torch.Tensor) -> None:
        """Nothing that is enqueued later on the current stream reads ``view``: its bytes may be used again. Outside a
        runner this does nothing for tensors that no runner asked for."""
        request = getattr(view, "_sessile_request", None)
        if request is None:
            if self._core.scope == "idle":
                return
            raise ArgumentError(
                "view is a tensor that `empty` did not return: release exactly what it returned, not a view of it",
                argument="view",
                value=str(tuple(view.shape)),
            )
        self._core.release(request)

    def complete(self) -> None:
        """The next runner may start from here on; what this one enqueues later runs beside it."""
        self._core.complete()

    # ------------------------------------------------------------------ for tests and learning

    @property
    def arenas(self) -> List[Tuple[int, int]]:
        """Address and bytes of each arena, in the plan's order."""
        return self._core.arenas()


def _device(device: Union[str, torch.device, None]) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device is {device}: use `cpu` or `cuda`", argument="device", value=str(device))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "torch sees no CUDA device: look at `sessile doctor`, or use device='cpu'",
            remedy="install a CUDA build of torch and the driver, or use device='cpu'",
        )
    return device


def _describe(group: Optional["dist.ProcessGroup"], name: str) -> Tuple[List[int], int, groups.Gather]:
    return groups.describe(group, name)

"""Modules as local graphs: each forward and each backward is captured once and replayed, with planned storage."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ..errors import MismatchError, PhaseError, ShardingError
from .flat import FlatGradients
from .gathers import Handover
from .shard import Sharded, ShardedParameter, Weight
from .storage import GraphStorage

Scope = Callable[[str], ContextManager[None]]
Tensors = Tuple[torch.Tensor, ...]


class _Runner:
    """One module: its static tensors, its two graphs, and what its backward announces."""

    def __init__(self, name: str, module: nn.Module, arguments: Tensors) -> None:
        self.name, self.module, self.inputs = name, module, arguments
        self.parameters = tuple(p for p in module.parameters() if p.requires_grad)
        #: Frozen ones too, which are gathered but not reduced.
        self.weights = [p.sharded for p in module.parameters() if isinstance(p, ShardedParameter)]
        #: Parameters whose gradients go through autograd; those of the sharded ones land in ``main_grad``.
        self.whole = tuple(p for p in self.parameters if not isinstance(p, ShardedParameter))
        #: One of these has autograd run the backward if nothing else that is given to it requires a gradient.
        self.sharded = tuple(p for p in self.parameters if isinstance(p, ShardedParameter))
        self.outputs: Tensors = ()
        self.single = True
        #: Whether its static inputs are the outputs of the runner before, so that nothing may be copied into them.
        self.chained = False
        self.differentiable: List[bool] = []
        self.grad_outputs: List[Optional[torch.Tensor]] = []
        #: Gradients of the inputs, where the backward writes them, and those of the whole parameters.
        self.grad_inputs: List[Optional[torch.Tensor]] = []
        self.grad_whole = FlatGradients()
        self.announces: List[Weight] = []
        self.forward: Callable[[], None] = lambda: None
        self.backward: Callable[[], None] = lambda: None
        #: In each direction: the runner that is launched next, the weight of each owner that this one uses first, and the weights
        #: that are gathered for it and by it.
        self.following: Dict[str, Optional[_Runner]] = {"forward": None, "backward": None}
        self.first: Dict[str, Dict[int, Optional[Weight]]] = {"forward": {}, "backward": {}}
        self.takes: Dict[str, List[Handover]] = {"forward": [], "backward": []}
        self.hands: Dict[str, List[Handover]] = {"forward": [], "backward": []}
        #: Forwards so far, and whether the last one had its backward.
        self.passes, self.consumed = 0, True

    def run_forward(self) -> None:
        """The module over its static inputs."""
        result = self.module(*self.inputs)
        self.single = isinstance(result, torch.Tensor)
        self.outputs = (result,) if self.single else tuple(result)

    def run_backward(self) -> None:
        """Gradients of the static outputs."""
        outputs = [o for o in self.outputs if o.requires_grad]
        given = [g for o, g in zip(self.outputs, self.grad_outputs) if o.requires_grad]
        inputs = [t for t in self.inputs if t.requires_grad]
        # The sharded ones too: autograd runs only what leads to something that is asked for.
        found = torch.autograd.grad(outputs, [*inputs, *self.parameters], given, allow_unused=True)
        of_inputs, of_parameters = iter(found[: len(inputs)]), found[len(inputs) :]
        self.grad_inputs = [next(of_inputs) if t.requires_grad else None for t in self.inputs]
        self.grad_whole.keep([g for p, g in zip(self.parameters, of_parameters) if not isinstance(p, ShardedParameter)])


def make_graphed_callables(
    modules: Sequence[nn.Module],
    sample_args: Sequence[Tensors],
    storage: GraphStorage,
    *,
    chain: bool = False,
    overlap: bool = True,
    random: Optional[bool] = None,
    warmup: int = 2,
) -> Tuple[Callable[..., Any], ...]:
    """Callables that replay each module's forward and backward, like ``torch.cuda.make_graphed_callables``, with buffers
    from ``storage``, which this discovers, seals and captures.

    Modules are called in the given order, their backwards run in reverse. With ``chain`` the output of each module is the
    only input of the next; their static tensors are then one, and nothing is copied between them. With ``overlap`` the last
    reduce-scatter of a backward runs on beside the next backward: call ``storage.join()`` before reading ``main_grad``.

    ``random``: whether modules draw random numbers, as `GraphStorage.launcher` takes it. By default each graph's first
    replay finds out; one that draws none is then launched without torch's replay, which is cheaper.

    Warm-up and captures leave ``main_grad`` and ``grad`` as they were."""
    names = _names(modules)
    if len(sample_args) != len(modules) and not (chain and len(sample_args) == 1):
        raise ShardingError(
            f"{len(sample_args)} sample_args for {len(modules)} modules",
            module="",
            remedy="give a tuple of tensors for each module; with chain=True one for the first suffices",
        )
    for name, module in zip(names, modules):
        _refuse(name, module)
    if storage.plan is not None:
        raise PhaseError(
            "the storage is sealed: its plan knows nothing of these modules",
            call="make_graphed_callables",
            phase="a plan is sealed",
            remedy="free it first, or use another storage",
        )
    runners: List[_Runner] = []
    owners = _owners(modules)
    saved = [(w, w.main_grad.clone()) for owner in owners for w in owner.weights]
    cuda = storage.device.type == "cuda"
    side = torch.cuda.Stream(storage.device) if cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    for owner in owners:
        owner.silent = True
    try:
        with torch.cuda.stream(side) if cuda else nullcontext():
            for at, (name, module) in enumerate(zip(names, modules)):
                given = sample_args[at] if at < len(sample_args) else ()
                if chain and at > 0:
                    given = tuple(o.detach().requires_grad_(o.requires_grad) for o in runners[-1].outputs)
                runner = _Runner(name, module, tuple(given))
                runner.chained = chain and at > 0 and cuda
                for _ in range(max(1, warmup)):
                    _eagerly(runner, owners)
                runners.append(runner)
        if cuda:
            torch.cuda.synchronize(storage.device)
        for owner in owners:
            owner.manual = True
        _pass_over(runners, owners, storage, storage.discover, side, chain, overlap, keep=False)
        storage.seal()
        _pass_over(runners, owners, storage, storage.capture, side, chain, overlap, keep=True, random=random)
    except BaseException:
        # Nothing half-done: the storage and the weights are as before, and the call can be made again.
        for owner in owners:
            owner.forget()
        if storage.plan is not None:
            storage.free()
        else:
            storage.restart_discovery()
        raise
    finally:
        for owner in owners:
            owner.manual = owner.silent = False
            owner.gathers.forget()
        for weight, before in saved:
            weight.main_grad.copy_(before)
        if cuda:
            torch.cuda.synchronize(storage.device)
    if not cuda:
        _by_hand(runners, owners, storage, overlap)
    return tuple(_callable(runner) for runner in runners)


def _names(modules: Sequence[nn.Module]) -> List[str]:
    seen: Dict[int, int] = {}
    for at, module in enumerate(modules):
        if id(module) in seen:
            raise ShardingError(
                f"modules[{at}] is modules[{seen[id(module)]}]: a module is captured once",
                module=str(at),
                remedy="call its one callable twice, in steps of their own, or give each use a module",
            )
        seen[id(module)] = at
    return [f"{at:03}.{type(module).__name__}" for at, module in enumerate(modules)]


def _refuse(name: str, module: nn.Module) -> None:
    if any(hasattr(inner, "_orig_mod") for inner in module.modules()):
        raise ShardingError(
            f"`{name}` is compiled: its code may replace the storage's calls",
            module=name,
            remedy="graph the module itself, without torch.compile",
        )
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(inner, attribute, None) for inner in module.modules() for attribute in hooks):
        raise ShardingError(
            f"`{name}` has hooks, which a replay does not run", module=name, remedy="remove them before graphing"
        )


def _owners(modules: Sequence[nn.Module]) -> List[Sharded]:
    owners = {id(p.sharded.owner): p.sharded.owner for m in modules for p in m.parameters() if isinstance(p, ShardedParameter)}
    return list(owners.values())


def _eagerly(runner: _Runner, owners: List[Sharded]) -> None:
    for owner in owners:
        # What evaluations before left ahead.
        owner.gathers.end_of_passes()
        owner.gathers.first.update(forward=None, backward=None)
    runner.run_forward()
    runner.grad_outputs = [torch.zeros_like(o) for o in runner.outputs]
    if any(o.requires_grad for o in runner.outputs):
        runner.run_backward()
    for direction in runner.first:
        runner.first[direction] = {id(owner): owner.gathers.first[direction] for owner in owners}
    for owner in owners:
        # No reduction ends the passes where all weights are frozen.
        owner.gathers.end_of_passes()


@contextmanager
def _inside(runner: _Runner, owners: List[Sharded], direction: str) -> Iterator[None]:
    """While it lives, weights are gathered ahead inside this runner, and at its end for the next one."""
    following = runner.following[direction]
    for owner in owners:
        if following is None:
            owner.gathers.begin_runner(direction, runner.weights)
        else:
            first = following.first[direction].get(id(owner))
            owner.gathers.begin_runner(direction, runner.weights, first, following.weights)
    yield
    handed = [owner.gathers.end_runner() for owner in owners]
    if following is not None:
        runner.hands[direction] = following.takes[direction] = [one for one in handed if one is not None]


def _backward(runner: _Runner, owners: List[Sharded], storage: GraphStorage, overlap: bool) -> None:
    """Stage 1 ends with the gradients of the inputs, stage 2 with the last reduction."""
    with _inside(runner, owners, "backward"):
        for owner in owners:
            owner.reduced = []
        runner.run_backward()
    if overlap and runner.sharded:
        storage.complete()
    for owner in owners:
        owner.drain()
    runner.announces = [weight for owner in owners for weight in owner.reduced]


def _pass_over(
    runners: List[_Runner],
    owners: List[Sharded],
    storage: GraphStorage,
    scope: Scope,
    side: Optional["torch.cuda.Stream"],
    chain: bool,
    overlap: bool,
    keep: bool,
    random: Optional[bool] = None,
) -> None:
    """All forwards in order, then all backwards in reverse, each in a graph of its own."""
    graphs = []
    pool = torch.cuda.graph_pool_handle() if side is not None else None

    def one(name: str, run: Callable[[], None]) -> Optional["torch.cuda.CUDAGraph"]:
        if side is None:
            with scope(name):
                run()
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            with scope(name):
                run()
        graphs.append(graph)
        return graph

    for runner, following in zip(runners, runners[1:]):
        runner.following["forward"] = following
    for at, runner in enumerate(runners):
        if chain and at > 0:
            before = runners[at - 1].outputs
            runner.inputs = tuple(o.detach().requires_grad_(o.requires_grad) for o in before)

        def forward(runner: _Runner = runner) -> None:
            with _inside(runner, owners, "forward"):
                runner.run_forward()

        graph = one(f"{runner.name}.forward", forward)
        if keep and graph is not None:
            runner.forward = storage.launcher(f"{runner.name}.forward", graph, random=random)
    backwards = [at for at in reversed(range(len(runners))) if any(o.requires_grad for o in runners[at].outputs)]
    for at, next_at in zip(backwards, backwards[1:]):
        runners[at].following["backward"] = runners[next_at]
    for at in backwards:
        runner = runners[at]
        after = runners[at + 1].grad_inputs if chain and at + 1 < len(runners) else []
        runner.grad_outputs = _grad_outputs(runner.outputs, after)

        def backward(runner: _Runner = runner) -> None:
            _backward(runner, owners, storage, overlap)

        graph = one(f"{runner.name}.backward", backward)
        if keep and graph is not None:
            runner.backward = storage.launcher(f"{runner.name}.backward", graph, random=random)
    if keep and graphs:
        # The graphs hold what lies between forward and backward; autograd's own nodes are of no use any more.
        for runner in runners:
            runner.differentiable = [o.requires_grad for o in runner.outputs]
            runner.outputs = tuple(o.detach() for o in runner.outputs)


def _grad_outputs(outputs: Tensors, after: Sequence[Optional[torch.Tensor]]) -> List[Optional[torch.Tensor]]:
    """Where gradients of the outputs are read from: where the next module's backward writes them, if it does."""
    found: List[Optional[torch.Tensor]] = []
    for at, output in enumerate(outputs):
        theirs = after[at] if at < len(after) else None
        found.append(theirs if theirs is not None and theirs.shape == output.shape else torch.zeros_like(output))
    return found


def _by_hand(runners: List[_Runner], owners: List[Sharded], storage: GraphStorage, overlap: bool) -> None:
    """On the CPU the captured sequence is run again, over the planned views."""

    def manual(runner: _Runner, direction: str, run: Callable[[], None]) -> None:
        for owner in owners:
            owner.manual = True
            owner.gathers.forget()
        for taken in runner.takes[direction]:
            taken.owner.gathers.resume(direction, taken)
        try:
            with storage.replay(f"{runner.name}.{direction}"):
                run()
        finally:
            for owner in owners:
                owner.manual = False
                owner.gathers.forget()

    for runner in runners:

        def forward(runner: _Runner = runner) -> None:
            def run() -> None:
                with torch.enable_grad(), _inside(runner, owners, "forward"):
                    runner.run_forward()

            manual(runner, "forward", run)

        def backward(runner: _Runner = runner) -> None:
            manual(runner, "backward", lambda: _backward(runner, owners, storage, overlap))

        runner.forward, runner.backward = forward, backward


def _take(runner: _Runner, static: torch.Tensor, given: torch.Tensor) -> None:
    """An input that is not the static tensor itself: refused, or copied there."""
    if static.shape != given.shape or static.dtype != given.dtype or static.device != given.device:
        raise MismatchError(
            f"`{runner.name}` was captured with {static.dtype}{tuple(static.shape)} on {static.device} and is called "
            f"with {given.dtype}{tuple(given.shape)} on {given.device}: call it as it was captured, or capture again",
            runner=runner.name,
            index=0,
            expected=f"{static.dtype}{tuple(static.shape)} on {static.device}",
            found=f"{given.dtype}{tuple(given.shape)} on {given.device}",
        )
    if static.data_ptr() == given.data_ptr() and static.stride() == given.stride():
        return
    if runner.chained:
        raise MismatchError(
            f"`{runner.name}` was captured in a chain and is called with something else than what the callable before "
            "it returned: call them one after the other, or capture without chain=True",
            runner=runner.name,
            index=0,
            expected="the output of the callable before",
            found="another tensor",
        )
    with torch.no_grad():
        static.copy_(given)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: _Runner, *inputs: torch.Tensor) -> Any:
        for static, given in zip(runner.inputs, inputs):
            # `is_set_to` can't compare tensors of two devices.
            if static.dtype != given.dtype or static.device != given.device or not static.is_set_to(given):
                _take(runner, static, given)
        for taken in runner.takes["forward"]:
            taken.renew()
        runner.forward()
        for handed in runner.hands["forward"]:
            handed.given()
        runner.passes += 1
        runner.consumed = False
        ctx.runner, ctx.serial = runner, runner.passes
        ctx.set_materialize_grads(False)
        outputs = tuple(o.detach() for o in runner.outputs)
        able = runner.differentiable or [o.requires_grad for o in runner.outputs]
        if not all(able):
            ctx.mark_non_differentiable(*(d for d, yes in zip(outputs, able) if not yes))
        return outputs[0] if runner.single else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], ...]:
        runner: _Runner = ctx.runner
        if ctx.serial != runner.passes or runner.consumed:
            why = "has had its backward" if ctx.serial == runner.passes else "was followed by another forward"
            raise ShardingError(
                f"this forward of `{runner.name}` {why}: its static tensors are overwritten",
                module=runner.name,
                remedy="run forward and backward in turn, without retain_graph=True",
            )
        runner.consumed = True
        for static, given in zip(runner.grad_outputs, grads):
            if static is not None and (given is None or not static.is_set_to(given)):
                _fill(static, given)
        for taken in runner.takes["backward"]:
            taken.renew()
        runner.backward()
        for handed in runner.hands["backward"]:
            handed.given()
        for weight in runner.announces:
            weight.owner.owe(weight)
        # The next replay writes the gradients again, and autograd may keep what it is given, or a view of it, as `.grad`: copies.
        # Not within a chain, where the next replay reads an input's gradient in place.
        of_inputs = runner.grad_inputs
        if not runner.chained:
            asked = ctx.needs_input_grad[1 : 1 + len(of_inputs)]
            of_inputs = [g.clone() if g is not None and needed else None for g, needed in zip(of_inputs, asked)]
        return (None, *of_inputs, *runner.grad_whole.copies(), None)


def _fill(static: torch.Tensor, given: Optional[torch.Tensor]) -> None:
    """A gradient of an output, to where the backward reads it."""
    with torch.no_grad():
        if given is None:
            static.zero_()
        else:
            static.copy_(given)


def _callable(runner: _Runner) -> Callable[..., Any]:
    whole, sharded = runner.whole, runner.sharded

    def call(*inputs: torch.Tensor) -> Any:
        """Replays the module."""
        if len(inputs) != len(runner.inputs):
            raise MismatchError(
                f"`{runner.name}` was captured with {len(runner.inputs)} inputs and is called with {len(inputs)}",
                runner=runner.name,
                index=len(inputs),
                expected=str(len(runner.inputs)),
                found=str(len(inputs)),
            )
        if not any(tensor.requires_grad for tensor in (*inputs, *whole)):
            # Weights may have been frozen since the capture.
            anchor = next((parameter for parameter in sharded if parameter.requires_grad), None)
            if anchor is not None:
                return _Replay.apply(runner, *inputs, *whole, anchor)
        return _Replay.apply(runner, *inputs, *whole)

    return call

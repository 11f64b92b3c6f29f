"""Sharded linear weights: gathered before each product, gradients reduce-scattered into ``main_grad``."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..errors import ArgumentError, PhaseError, ShardingError
from . import groups, kinds
from .gathers import BUCKET_BYTES, Gathers
from .storage import GraphStorage

Ready = Callable[[nn.Parameter], None]


class ShardedParameter(nn.Parameter):
    """This rank's rows of a linear weight. Implements Transformer Engine's protocol for distributed weights: layers that
    know it ask the parameter for the full weight and hand it their gradients."""

    is_distributed_weight = True
    sharded: "Weight"
    #: Weights of a grouped layer, if this is its leader; else only its own. See `lead_`.
    members: List["Weight"]

    @property
    def main_grad(self) -> torch.Tensor:
        """This rank's rows of the accumulated gradient, FP32."""
        return self.sharded.main_grad

    def materialize_group_for_forward(self) -> List[torch.Tensor]:
        """The full weights of the group, for the forward products. Valid until the next group but one is asked for."""
        return self.sharded.owner.gathers.lend(self.members, "forward")

    def materialize_group_for_backward(self, **_: Any) -> List[torch.Tensor]:
        """The full weights of the group, for the products of the backward."""
        return self.sharded.owner.gathers.lend(self.members, "backward")

    def grad_buffer(self) -> torch.Tensor:
        """Where the product writes this weight's full gradient; `finalize_group_grads` takes it from there."""
        weight = self.sharded
        weight.buffer = weight.owner.wgrad_input(weight)
        return weight.buffer[: weight.out]

    def finalize_group_grads(self, wgrads: Any, **_: Any) -> List[Optional[torch.Tensor]]:
        """Takes the full gradients of the group and reduces each into its ``main_grad``; nothing is left for autograd."""
        given = list(wgrads) if isinstance(wgrads, (list, tuple)) else [wgrads]
        if len(given) != len(self.members):
            raise ShardingError(
                f"{len(given)} gradients for a group of {len(self.members)} weights led by `{self.sharded.name}`",
                module=self.sharded.name,
                remedy="name the weights of a grouped layer with lead_",
            )
        for weight, wgrad in zip(self.members, given):
            send, weight.buffer = weight.buffer, None
            if send is None or send.data_ptr() != wgrad.data_ptr():
                send = weight.owner.wgrad_input(weight) if send is None else send
                send[: weight.out].copy_(wgrad.view(weight.out, weight.columns))
            weight.owner.reduce(weight, send)
            weight.parameter.grad_added_to_main_grad = True
        return [None] * len(given)

    grad_added_to_main_grad = False


def lead_(parameters: Sequence[ShardedParameter]) -> None:
    """Makes the first parameter the leader of a grouped layer: Transformer Engine asks it for the weights of all, and hands it
    the gradients of all, in this order."""
    weights = [parameter.sharded for parameter in parameters]
    if len({id(weight.owner) for weight in weights}) != 1:
        raise ShardingError(
            "the weights of a grouped layer were sharded by different calls",
            module=weights[0].name if weights else "",
            remedy="shard them by one call of shard_",
        )
    parameters[0].members = weights


class Weight:
    """A sharded weight: shape, place in its group, accumulator."""

    def __init__(
        self,
        owner: "Sharded",
        name: str,
        full: torch.Tensor,
        group: Optional["dist.ProcessGroup"],
        group_name: str,
        kind: str,
    ) -> None:
        self.owner, self.name, self.group, self.group_name = owner, name, group, group_name
        ranks, self.rank, _ = groups.describe(group, group_name)
        self.size = len(ranks)
        self.out, self.columns = full.shape
        # Equal rows on every rank, and blocks that begin at multiples of 16 bytes.
        rows = -(-self.out // self.size)
        while rows * self.columns * full.element_size() % 16:
            rows += 1
        self.rows, self.padded = rows, rows * self.size
        self.dtype = full.dtype
        self.full_bytes = self.padded * self.columns * full.element_size()
        self.kind = kind
        self.scale = 1.0 / self.size
        self.main_grad = torch.zeros(rows, self.columns, dtype=torch.float32, device=full.device)
        self.parameter = self._shard(full)
        #: What `grad_buffer` gave out last.
        self.buffer: Optional[torch.Tensor] = None
        self.ready: List[Ready] = []

    def _shard(self, full: torch.Tensor) -> ShardedParameter:
        mine = self.cut(full.detach())
        parameter = ShardedParameter(mine, requires_grad=full.requires_grad)
        parameter.sharded, parameter.members = self, [self]
        return parameter

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a full weight, padded with zeros."""
        mine = torch.zeros(self.rows, self.columns, dtype=self.dtype, device=self.main_grad.device)
        start = self.rank * self.rows
        have = full[start : min(start + self.rows, self.out)]
        mine[: have.shape[0]].copy_(have)
        return mine

    @property
    def symmetric(self) -> bool:
        """Whether gradients lie in the group's registered memory."""
        return self.kind == "one_shot" and self.size > 1


class _Pending:
    """A reduction under way: what it reads, what it writes, when it is done."""

    def __init__(self, weight: Weight, send: torch.Tensor) -> None:
        self.weight, self.send = weight, send
        self.output: Optional[torch.Tensor] = None
        self.done: Optional["torch.cuda.Event"] = None


class Sharded:
    """All sharded weights of a module, their streams, and what is under way. Made by `shard_`."""

    def __init__(self, storage: GraphStorage, bucket_bytes: int) -> None:
        self.storage = storage
        self.gathers = Gathers(storage, bucket_bytes)
        self.weights: List[Weight] = []
        #: The kind of reduce-scatter of each group.
        self.kinds: Dict[str, str] = {}
        self._pending: List[_Pending] = []
        self._queued = False
        #: Whether somebody else drains: a runner that is captured, at its two stages. What it reduced is then noted here.
        self.manual = False
        self.reduced: List[Weight] = []
        #: Whether gradients are only tried out, as in a warm-up: nothing is announced.
        self.silent = False
        self._owed: List[Weight] = []
        cuda = storage.device.type == "cuda"
        self._reduces = torch.cuda.Stream(storage.device, priority=-1) if cuda else None

    # ------------------------------------------------------------------ reductions

    def wgrad_input(self, weight: Weight) -> torch.Tensor:
        """A padded buffer for a full gradient; its tail is zero."""
        send = self.storage.empty(
            (weight.padded, weight.columns),
            weight.dtype,
            role="wgrad_input",
            group=weight.group_name,
            weight=weight.name,
            unsharded_shape=(weight.out, weight.columns),
            symmetric=weight.symmetric,
            accumulates_into=weight.name,
        )
        if weight.padded > weight.out:
            send[weight.out :].zero_()
        return send

    def reduce(self, weight: Weight, send: torch.Tensor) -> None:
        """Starts the reduce-scatter of a gradient; the one before is finalized."""
        pending = _Pending(weight, send)
        if weight.size > 1 and weight.kind != "one_shot":
            pending.output = self._output(weight)
        if self._reduces is None:
            self._reduce(pending)
        else:
            self._reduces.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._reduces):
                self._reduce(pending)
                pending.done = torch.cuda.Event()
                pending.done.record()
        while self._pending:
            self._finalize(self._pending.pop(0))
        self._pending.append(pending)
        if not self.manual and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)

    def _reduce(self, pending: _Pending) -> None:
        """Enqueues the collective, on the stream of reductions."""
        weight, send, output = pending.weight, pending.send, pending.output
        if weight.size == 1:
            weight.main_grad.add_(send[: weight.rows], alpha=weight.scale)
        elif output is None:
            if self._reduces is None:
                kinds.one_shot_on_cpu(send, weight)
            else:
                self.storage.reduce_scatter_accumulate(weight.main_grad, send, weight.group_name, weight.scale)
        elif weight.kind == "ring":
            kinds.reduce_scatter(output, send, weight)
        else:
            kinds.exchange(output, send, weight)

    def _output(self, weight: Weight) -> torch.Tensor:
        if weight.kind == "ring":
            return self._buffer(weight, weight.rows, "rs_output", weight.dtype)
        return self._buffer(weight, weight.padded, "a2a_scratch", weight.dtype)

    def _buffer(self, weight: Weight, rows: int, role: str, dtype: torch.dtype) -> torch.Tensor:
        return self.storage.empty(
            (rows, weight.columns),
            dtype,
            role=role,
            group=weight.group_name,
            weight=weight.name,
            unsharded_shape=(weight.out, weight.columns),
        )

    def _finalize(self, pending: _Pending) -> None:
        weight, output = pending.weight, pending.output
        if pending.done is not None:
            torch.cuda.current_stream().wait_event(pending.done)
        if output is not None and weight.kind == "ring":
            weight.main_grad.add_(output, alpha=weight.scale)
        elif output is not None:
            total = self._buffer(weight, weight.rows, "fp32_output", torch.float32)
            kinds.add(weight, kinds.sum_in_order(total, list(output.chunk(weight.size))))
            self.storage.release(total)
        self.storage.release(pending.send)
        if pending.output is not None:
            self.storage.release(pending.output)
        if self.manual:
            self.reduced.append(weight)
        else:
            self.announce(weight)

    def owe(self, weight: Weight) -> None:
        """A replay reduces the weight: announced by `join`, since it may run on."""
        self._owed.append(weight)

    def join(self) -> None:
        """Waits, on the current stream, for everything that runs on, and announces it. Before the optimizer. The host does not
        wait: a reduction that gives up later is told by the next call; `check` and `guard` wait."""
        self.storage.join()
        owed, self._owed = self._owed, []
        for weight in owed:
            self.announce(weight)

    def check(self) -> None:
        """Waits on the host for all reductions so far, and raises `DeviceError` if one gave up waiting for another rank: its
        ``main_grad`` is then not whole. With everything that the current stream has, since gradients are read behind it."""
        if self._reduces is not None:
            if torch.cuda.is_current_stream_capturing():
                raise PhaseError(
                    "gradients are checked in a capture, where nothing has run: capture without a guard, and call check() behind "
                    "each launch, before anything of it is kept",
                    call="check",
                    phase="the current stream captures",
                    remedy="remove the guard before the capture, and call check() behind the launch",
                )
            torch.cuda.current_stream(self.storage.device).wait_stream(self._reduces)
        self.join()
        if self._reduces is not None:
            torch.cuda.current_stream(self.storage.device).synchronize()
        self.storage.check()

    def guard(self, optimizer: Any) -> Any:
        """Makes each ``step()`` of the optimizer begin with `check`, so that it changes nothing after a reduction that gave up.
        Returns the handle of the hook; ``remove()`` takes it away. The host waits once a step."""
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise ArgumentError(
                f"optimizer is {type(optimizer).__name__}, which has no register_step_pre_hook: call sharded.check() before step()",
                argument="optimizer",
                value=type(optimizer).__name__,
            )
        return optimizer.register_step_pre_hook(lambda *_: self.check())

    def announce(self, weight: Weight) -> None:
        """A gradient of the weight has landed in ``main_grad``: as often as it is used."""
        for hook in () if self.silent else weight.ready:
            hook(weight.parameter)

    def drain(self) -> None:
        """Finalizes every reduction under way."""
        while self._pending:
            self._finalize(self._pending.pop(0))

    def forget(self) -> None:
        """Gives up all that is under way, as after an exception in the middle of it."""
        self._pending.clear()
        self.gathers.forget()
        self._queued = False

    def _end_of_backward(self) -> None:
        self._queued = False
        self.drain()
        self.gathers.end_of_passes()

    def on_grad_ready(self, hook: Ready) -> None:
        """Calls ``hook(parameter)`` each time a gradient has landed in the parameter's ``main_grad``."""
        for weight in self.weights:
            weight.ready.append(hook)

    def zero_grad(self) -> None:
        """Zeroes every ``main_grad``."""
        torch._foreach_zero_([weight.main_grad for weight in self.weights])

    # ------------------------------------------------------------------ state

    def full_weight(self, weight: Weight) -> torch.Tensor:
        """A weight as it was before it was sharded. Collective over its group."""
        full = torch.empty(
            weight.padded, weight.columns, dtype=weight.dtype, device=weight.parameter.device
        )
        kinds.gather([full], [weight.parameter.detach()], weight)
        return full[: weight.out].clone()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: ShardedParameter, bias: Optional[torch.Tensor]) -> torch.Tensor:
        weight = shard.sharded
        full = weight.owner.gathers.take(weight, "forward")
        y = F.linear(x, full[: weight.out], bias)
        weight.owner.storage.release(full)
        ctx.save_for_backward(x)
        ctx.weight, ctx.uses, ctx.bias = weight, 0, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        weight: Weight = ctx.weight
        if ctx.uses:
            raise ShardingError(
                f"the backward of `{weight.name}` runs twice over one forward: its gradient would be added twice",
                module=weight.name,
                remedy="run the forward again in place of retain_graph=True",
            )
        ctx.uses = 1
        (x,) = ctx.saved_tensors
        owner = weight.owner
        gx = None
        if ctx.needs_input_grad[0]:
            full = owner.gathers.take(weight, "backward")
            gx = gy.matmul(full[: weight.out])
            owner.storage.release(full)
        if ctx.needs_input_grad[1]:
            send = owner.wgrad_input(weight)
            torch.mm(
                gy.reshape(-1, weight.out).t(), x.reshape(-1, weight.columns), out=send[: weight.out]
            )
            owner.reduce(weight, send)
        gb = gy.reshape(-1, weight.out).sum(0) if ctx.bias and ctx.needs_input_grad[2] else None
        return gx, None, gb


class ShardedLinear(nn.Module):
    """A linear layer whose weight is sharded along its rows."""

    def __init__(self, weight: Weight, bias: Optional[nn.Parameter]) -> None:
        super().__init__()
        self.weight = weight.parameter
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias``."""
        weight: ShardedParameter = self.weight  # type: ignore[assignment]
        return _Linear.apply(x, weight, self.bias)

    def extra_repr(self) -> str:
        """Shape and group."""
        weight = self.weight.sharded
        return f"{weight.columns}, {weight.out}, group={weight.group_name} of {weight.size}, kind={weight.kind}"


def shard_(
    module: nn.Module,
    group: Optional["dist.ProcessGroup"] = None,
    *,
    storage: GraphStorage,
    expert_group: Optional["dist.ProcessGroup"] = None,
    is_expert: Callable[[str, nn.Module], bool] = lambda name, module: getattr(module, "is_expert", False),
    kind: str = "auto",
    gather_bucket_bytes: int = BUCKET_BYTES,
) -> Sharded:
    """Replaces every ``nn.Linear`` of ``module`` by one whose weight is sharded over ``group``; those of experts (`is_expert`,
    also for all below a module that is one) over ``expert_group``. Each rank must hold equal weights. Collective.

    Weights that are used one after the other are gathered by one call as far as they have ``gather_bucket_bytes`` together, whole;
    0 gathers each alone. Numbers that differ between the ranks of a group are an `AgreementError` on each of them."""
    integer = isinstance(gather_bucket_bytes, int) and not isinstance(gather_bucket_bytes, bool)
    if not integer or gather_bucket_bytes < 0:
        raise ArgumentError(
            f"gather_bucket_bytes is {gather_bucket_bytes!r}: give bytes, a whole number; 0 gathers each weight alone",
            argument="gather_bucket_bytes",
            value=str(gather_bucket_bytes),
        )
    sharded = Sharded(storage, gather_bucket_bytes)
    found = list(_linears(module, is_expert))
    _refuse(module, found, storage)
    names = {"gtp": group}
    if any(expert for _, _, _, _, expert in found):
        names["gtp_experts"] = expert_group if expert_group is not None else group
    groups.agree(names, "gather_bucket_bytes", str(gather_bucket_bytes))
    for name, member in names.items():
        storage.add_group(name, member)
    chosen = {
        name: kinds.choose(kind, len(groups.ranks_of(member, name)), groups.is_near(member, name))
        for name, member in names.items()
    }
    sharded.kinds = chosen
    for name, member in names.items():
        if chosen[name] == "one_shot" and len(groups.ranks_of(member, name)) > 1:
            storage.add_one_shot(name)
    for path, parent, attribute, linear, expert in found:
        name = "gtp_experts" if expert else "gtp"
        weight = Weight(sharded, f"{path}.weight", linear.weight, names[name], name, chosen[name])
        sharded.weights.append(weight)
        setattr(parent, attribute, ShardedLinear(weight, linear.bias))
    return sharded


def _linears(
    module: nn.Module, is_expert: Callable[[str, nn.Module], bool]
) -> Iterator[Tuple[str, nn.Module, str, nn.Linear, bool]]:
    def walk(prefix: str, parent: nn.Module, expert: bool) -> Iterator[Tuple[str, nn.Module, str, nn.Linear, bool]]:
        for attribute, child in parent.named_children():
            path = f"{prefix}.{attribute}" if prefix else attribute
            inside = expert or is_expert(path, child)
            if type(child) is nn.Linear:
                yield path, parent, attribute, child, inside
            else:
                yield from walk(path, child, inside)

    yield from walk("", module, is_expert("", module))


def _refuse(module: nn.Module, found: List[Tuple[str, nn.Module, str, nn.Linear, bool]], storage: GraphStorage) -> None:
    """Refuses what can't be sharded, before anything is changed."""
    if type(module) is nn.Linear or isinstance(module, ShardedLinear):
        raise ShardingError(
            "shard_ replaces the linear layers inside a module, and this is one", module="", remedy="give its parent"
        )
    for path, inner in module.named_modules():
        if hasattr(inner, "_orig_mod"):
            raise ShardingError(
                f"`{path}` is compiled: its code has the unsharded weights inside",
                module=path,
                remedy="shard first, without torch.compile",
            )
        if isinstance(inner, ShardedLinear):
            raise ShardingError(f"`{path}` is sharded already", module=path, remedy="shard each module once")
    if not found:
        raise ShardingError("there is no nn.Linear in the module", module="", remedy="give a module that has one")
    owners: Dict[int, str] = {}
    every = (
        (f"{path}.{name}" if path else name, parameter)
        for path, inner in module.named_modules(remove_duplicate=False)
        for name, parameter in inner.named_parameters(recurse=False)
    )
    for path, parameter in every:
        first = owners.setdefault(id(parameter), path)
        tied = first != path
        if tied and any(linear.weight is parameter for _, _, _, linear, _ in found):
            raise ShardingError(
                f"`{path}` and `{first}` are one tied weight: sharding would untie them",
                module=path,
                remedy="call the same module twice in place of tying, or untie the weights first",
            )
    for path, _, _, linear, _ in found:
        if linear.weight.device != storage.device:
            raise ShardingError(
                f"`{path}` is on {linear.weight.device}, the storage on {storage.device}",
                module=path,
                remedy="move the module to the storage's device first",
            )
        if linear.weight.dtype not in (torch.bfloat16, torch.float32):
            raise ShardingError(
                f"`{path}` is {linear.weight.dtype}", module=path, remedy="use bfloat16 or float32 weights"
            )


def full_state_dict(module: nn.Module) -> Dict[str, torch.Tensor]:
    """The state of a module as if nothing were sharded, on the CPU. Collective over the groups of its weights."""
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, ShardedParameter):
            value = value.sharded.owner.full_weight(value.sharded)
        state[name] = value.detach().cpu()
    return state


def load_full_state_dict(module: nn.Module, state: Dict[str, torch.Tensor]) -> None:
    """Loads what `full_state_dict` gave, also of another group size. Checks everything before it changes anything."""
    own = module.state_dict(keep_vars=True)
    if set(own) != set(state):
        differ = sorted(set(own) ^ set(state))
        raise ShardingError(f"the state differs in {differ[:4]}", module=differ[0], remedy="load the state of this model")
    for name, value in own.items():
        shape = value.shape
        if isinstance(value, ShardedParameter):
            shape = torch.Size((value.sharded.out, value.sharded.columns))
        if state[name].shape != shape:
            raise ShardingError(
                f"`{name}` is {tuple(state[name].shape)} in the state, {tuple(shape)} here",
                module=name,
                remedy="load the state of this model",
            )
    with torch.no_grad():
        for name, value in own.items():
            full = state[name].to(value.device)
            value.copy_(value.sharded.cut(full) if isinstance(value, ShardedParameter) else full)

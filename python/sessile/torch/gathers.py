"""Whole weights, gathered just before they are used: in the order that the first pass had, small ones together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from . import kinds
from .storage import GraphStorage

if TYPE_CHECKING:
    from .shard import Weight

#: Weights of one group and dtype that are gathered by one call, unless told otherwise.
BUCKET_BYTES = 32 << 20

Key = Tuple[str, int]


class _Ahead(NamedTuple):
    """A weight that was gathered and not used yet."""

    weight: "Weight"
    full: torch.Tensor
    #: When the bytes are there.
    done: Optional["torch.cuda.Event"]
    #: Of the shard that was gathered.
    version: int
    #: The weights that were gathered together, in the order of their use.
    bucket: Sequence["Weight"]


class Gathers:
    """The chain of weights in each direction, and what of it is gathered ahead: while the weights of one bucket are used, the
    next bucket is gathered. A bucket is what follows each other in the chain, of one group and dtype and inside the runner under
    way, up to ``bucket_bytes``; a larger weight is one alone. It depends on order and shapes only, so all ranks form the same."""

    def __init__(self, storage: GraphStorage, bucket_bytes: int) -> None:
        self._storage, self._bucket_bytes = storage, bucket_bytes
        #: Which weight follows which, in each direction, as the first pass had it.
        self._next: Dict[Key, "Weight"] = {}
        self._last: Dict[str, Optional["Weight"]] = {"forward": None, "backward": None}
        self._ahead: Dict[Key, _Ahead] = {}
        self._lent: List[List[torch.Tensor]] = []
        #: Weights of the runner under way; ``None`` outside runners, where every weight may be gathered ahead.
        self.runner_weights: Optional[Set[int]] = None
        self._stream = torch.cuda.Stream(storage.device) if storage.device.type == "cuda" else None

    def take(self, weight: "Weight", direction: str) -> torch.Tensor:
        """The full padded weight, ready on the current stream; the next bucket of the chain is gathered beside."""
        key = (direction, id(weight))
        ahead = self._ahead.get(key)
        if ahead is not None and ahead.version != weight.parameter._version:
            self._give_up_stale(direction)
            ahead = None
        if ahead is None:
            self._start(weight, direction)
        ahead = self._ahead.pop(key)
        if ahead.done is not None:
            torch.cuda.current_stream().wait_event(ahead.done)
        self._chain(weight, direction)
        follower = self._after(weight, ahead.bucket, direction)
        if follower is not None and self._may_start(follower, direction):
            self._start(follower, direction)
        return ahead.full

    def lend(self, weights: Sequence["Weight"], direction: str) -> List[torch.Tensor]:
        """The full weights of a layer that never says when it has read them: kept until the second layer after."""
        for weight in weights:
            if (direction, id(weight)) not in self._ahead:
                self._start(weight, direction)
        full = [self.take(weight, direction) for weight in weights]
        self._lent.append(full)
        if len(self._lent) > 2:
            self._take_back()
        return [view[: weight.out] for view, weight in zip(full, weights)]

    def end_of_pass(self, direction: str) -> None:
        """Forgets where the chain stands, and gives up what was gathered ahead and is not needed."""
        self._last[direction] = None
        for key in [key for key in self._ahead if key[0] == direction]:
            self._give_up(key)
        while self._lent:
            self._take_back()

    def forget(self) -> None:
        """Gives up all that is under way, as after an exception in the middle of it."""
        self._ahead.clear()
        self._lent.clear()
        self._last = {"forward": None, "backward": None}

    # ------------------------------------------------------------------ the chain

    def _chain(self, weight: "Weight", direction: str) -> None:
        last = self._last[direction]
        if last is not None and last is not weight:
            self._next.setdefault((direction, id(last)), weight)
        self._last[direction] = weight

    def _after(self, weight: "Weight", bucket: Sequence["Weight"], direction: str) -> Optional["Weight"]:
        """The first weight that follows and is none of the bucket's; in a chain that returns to them, one of them."""
        follower = self._next.get((direction, id(weight)))
        for _ in bucket:
            if follower is None or follower not in bucket:
                break
            follower = self._next.get((direction, id(follower)))
        return follower

    def _may_start(self, weight: "Weight", direction: str) -> bool:
        inside = self.runner_weights is None or id(weight) in self.runner_weights
        return inside and (direction, id(weight)) not in self._ahead

    def _bucket(self, weight: "Weight", direction: str) -> List["Weight"]:
        """The weight and what follows it, as far as one call gathers it."""
        bucket, total = [weight], weight.full_bytes
        while True:
            follower = self._next.get((direction, id(bucket[-1])))
            if follower is None or follower in bucket or not self._may_start(follower, direction):
                return bucket
            total += follower.full_bytes
            alike = follower.group_name == weight.group_name and follower.dtype == weight.dtype
            if not alike or total > self._bucket_bytes:
                return bucket
            bucket.append(follower)

    # ------------------------------------------------------------------ buffers

    def _start(self, weight: "Weight", direction: str) -> None:
        bucket = self._bucket(weight, direction)
        full = [self._buffer(one) for one in bucket]
        shards = [one.parameter.detach() for one in bucket]
        done = None
        if self._stream is None:
            kinds.gather(full, shards, weight)
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                kinds.gather(full, shards, weight)
                done = torch.cuda.Event()
                done.record()
        for one, view in zip(bucket, full):
            self._ahead[(direction, id(one))] = _Ahead(one, view, done, one.parameter._version, bucket)

    def _buffer(self, weight: "Weight") -> torch.Tensor:
        return self._storage.empty(
            (weight.padded, weight.columns),
            weight.dtype,
            role="gathered_weight",
            group=weight.group_name,
            weight=weight.name,
            unsharded_shape=(weight.out, weight.columns),
            symmetric="planned" if weight.symmetric else False,
        )

    def _give_up_stale(self, direction: str) -> None:
        """Gives up what was gathered of shards that were changed since: by an optimizer, or a state that was loaded."""
        for key, ahead in list(self._ahead.items()):
            if key[0] == direction and ahead.version != ahead.weight.parameter._version:
                self._give_up(key)

    def _give_up(self, key: Key) -> None:
        """A weight that was gathered ahead and is not needed."""
        ahead = self._ahead.pop(key)
        if ahead.done is not None:
            torch.cuda.current_stream().wait_event(ahead.done)
        self._storage.release(ahead.full)

    def _take_back(self) -> None:
        for view in self._lent.pop(0):
            self._storage.release(view)

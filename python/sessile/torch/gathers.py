"""Whole weights, gathered just before they are used: in the order that the first pass had, small ones together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch

from . import kinds
from .storage import GraphStorage

if TYPE_CHECKING:
    from .shard import Weight

#: Weights of one group and dtype that are gathered by one call, unless told otherwise.
BUCKET_BYTES = 32 << 20

Key = Tuple[str, int]

#: The backward that this thread runs, -1 in none. Older torch does not tell.
_backward_under_way: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


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


class Handover:
    """The first bucket of a runner, which the runner before gathers for it. Where another one was launched since, or the shards
    were changed, it is gathered again before the runner is launched. Each rank judges that by its own counts, and the gather is
    collective: a shard that is changed in place between the two, even to equal values, must be changed on all ranks."""

    def __init__(self, storage: GraphStorage, entries: Sequence[_Ahead]) -> None:
        self._storage, self._core, self.entries = storage, storage._core, list(entries)
        self.owner = entries[0].weight.owner
        self._parameters = [entry.weight.parameter for entry in entries]
        #: What the giver left: its launch, and the versions of the shards.
        self._given: Optional[Tuple[Tuple[int, int], List[int]]] = None

    def given(self) -> None:
        """The runner before was launched just now."""
        self._given = self._now()

    def renew(self) -> None:
        """The runner is launched next: makes sure that its bucket is that of now."""
        if self._given == self._now():
            return
        self._storage.join()
        shards = [parameter.detach() for parameter in self._parameters]
        kinds.gather([entry.full for entry in self.entries], shards, self.entries[0].weight)

    def _now(self) -> Tuple[Tuple[int, int], List[int]]:
        return self._core.counters, [parameter._version for parameter in self._parameters]


class Gathers:
    """The chain of weights in each direction, and what of it is gathered ahead: while the weights of one bucket are used, the
    next bucket is gathered. A bucket is what follows each other in the chain, of one group and dtype and inside one runner, up to
    ``bucket_bytes``; a larger weight is one alone. It depends on order and shapes only, so all ranks form the same."""

    def __init__(self, storage: GraphStorage, bucket_bytes: int) -> None:
        self._storage, self._bucket_bytes = storage, bucket_bytes
        #: Which weight follows which, in each direction, as the first pass had it.
        self._next: Dict[Key, "Weight"] = {}
        self._last: Dict[str, Optional["Weight"]] = {"forward": None, "backward": None}
        self._ahead: Dict[Key, _Ahead] = {}
        self._lent: List[List[torch.Tensor]] = []
        #: The first weight of the pass under way, or of the last one.
        self.first: Dict[str, Optional["Weight"]] = {"forward": None, "backward": None}
        #: Weights of the runner under way; ``None`` outside runners.
        self._inside: Optional[Set[int]] = None
        #: The direction of that runner.
        self._heading: Optional[str] = None
        #: The first weight of the runner after it and all of that runner's, until they are gathered for it.
        self._following: Optional[Tuple["Weight", Set[int]]] = None
        self._handed: Dict[Key, _Ahead] = {}
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
        if self._recomputes(direction):
            return ahead.full
        self._chain(weight, direction)
        follower = self._after(weight, ahead.bucket, direction)
        if follower is not None and self._reaches(follower, direction, self._inside):
            if (direction, id(follower)) not in self._ahead:
                self._start(follower, direction)
        elif self._following is not None:
            (first, weights), self._following = self._following, None
            self._gather(self._bucket(first, direction, weights, self._handed), direction, self._handed)
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

    def end_of_passes(self) -> None:
        """The passes in both directions end."""
        self.end_of_pass("forward")
        self.end_of_pass("backward")

    def forget(self) -> None:
        """Gives up all that is under way, as after an exception in the middle of it."""
        self._ahead.clear()
        self._handed.clear()
        self._lent.clear()
        self._last = {"forward": None, "backward": None}
        self._inside = self._heading = self._following = None

    # ------------------------------------------------------------------ runners

    def begin_runner(
        self,
        direction: str,
        weights: Sequence["Weight"],
        first: Optional["Weight"] = None,
        following: Sequence["Weight"] = (),
    ) -> None:
        """A runner in this direction with these weights begins. ``first``: the weight that the runner after it uses first, of all of its weights;
        with the last bucket of this one in use, its first bucket is gathered for it, unless ``first`` is larger than a bucket."""
        self._inside, self._heading = {id(weight) for weight in weights}, direction
        self._following = None
        if first is not None and first.full_bytes <= self._bucket_bytes:
            self._following = (first, {id(weight) for weight in following})

    def end_runner(self) -> Optional[Handover]:
        """It ends: all that it gathered is there. Gives what the next one takes over."""
        self.end_of_passes()
        self._inside = self._heading = self._following = None
        for key, ahead in self._handed.items():
            if ahead.done is not None:
                torch.cuda.current_stream().wait_event(ahead.done)
            # Another graph can't wait for an event of this one, and need not.
            self._ahead[key] = ahead._replace(done=None)
        self._handed.clear()
        return Handover(self._storage, list(self._ahead.values())) if self._ahead else None

    def resume(self, direction: str, taken: Handover) -> None:
        """A runner begins again, by hand, with what the one before gathered for it."""
        for entry in taken.entries:
            self._ahead[(direction, id(entry.weight))] = entry._replace(version=entry.weight.parameter._version)

    # ------------------------------------------------------------------ the chain

    def _recomputes(self, direction: str) -> bool:
        """Whether a backward asks for weights of the forward, as checkpoints of activations do: each part anew, from the last to the
        first. What follows in the chain is not used next then, and would be held to the end of the backward."""
        if direction != "forward":
            return False
        return _backward_under_way() != -1 if self._heading is None else self._heading == "backward"

    def _chain(self, weight: "Weight", direction: str) -> None:
        last = self._last[direction]
        # What runs eagerly once a plan is sealed is in no order that its runners have.
        if last is not None and last is not weight and self._storage.plan is None:
            self._next.setdefault((direction, id(last)), weight)
        if last is None:
            self.first[direction] = weight
        self._last[direction] = weight

    def _after(self, weight: "Weight", bucket: Sequence["Weight"], direction: str) -> Optional["Weight"]:
        """The first weight that follows and is none of the bucket's; in a chain that returns to them, one of them."""
        follower = self._next.get((direction, id(weight)))
        for _ in bucket:
            if follower is None or follower not in bucket:
                break
            follower = self._next.get((direction, id(follower)))
        return follower

    def _reaches(self, follower: "Weight", direction: str, inside: Optional[Set[int]]) -> bool:
        """Whether what follows may be gathered ahead: what the runner has; outside runners all but the first weight of the pass,
        since another evaluation may never come, or come after the shards were changed."""
        return follower is not self.first[direction] if inside is None else id(follower) in inside

    def _bucket(
        self, weight: "Weight", direction: str, inside: Optional[Set[int]], ahead: Dict[Key, _Ahead]
    ) -> List["Weight"]:
        """The weight and what follows it, as far as one call gathers it."""
        bucket, total = [weight], weight.full_bytes
        while True:
            follower = self._next.get((direction, id(bucket[-1])))
            if follower is None or follower in bucket or (direction, id(follower)) in ahead:
                return bucket
            total += follower.full_bytes
            alike = follower.group_name == weight.group_name and follower.dtype == weight.dtype
            if not alike or total > self._bucket_bytes or not self._reaches(follower, direction, inside):
                return bucket
            bucket.append(follower)

    # ------------------------------------------------------------------ buffers

    def _start(self, weight: "Weight", direction: str) -> None:
        alone = self._recomputes(direction)
        bucket = [weight] if alone else self._bucket(weight, direction, self._inside, self._ahead)
        self._gather(bucket, direction, self._ahead)

    def _gather(self, bucket: List["Weight"], direction: str, ahead: Dict[Key, _Ahead]) -> None:
        full = [self._buffer(one) for one in bucket]
        shards = [one.parameter.detach() for one in bucket]
        done = None
        if self._stream is None:
            kinds.gather(full, shards, bucket[0])
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                kinds.gather(full, shards, bucket[0])
                done = torch.cuda.Event()
                done.record()
        for one, view in zip(bucket, full):
            ahead[(direction, id(one))] = _Ahead(one, view, done, one.parameter._version, bucket)

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

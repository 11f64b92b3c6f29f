"""Registered buffers of eager work. A miss is collective over the group, so every rank must ask in the same order."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
from torch.utils.dlpack import from_dlpack

from .._sessile import Core


class Buffer(NamedTuple):
    """A registered buffer that is free: its words, and what must have happened before it is written."""

    words: torch.Tensor
    freed: Optional["torch.cuda.Event"]
    #: The pass in a capture that freed it; 0 outside captures.
    capture: int


class EagerPool:
    """Free buffers by group and size."""

    def __init__(self, core: Core, ordinal: Optional[int]) -> None:
        self._core = core
        self._ordinal = ordinal
        self._free: Dict[Tuple[str, int], List[Buffer]] = {}
        #: Buffers in use, by the address of their tensor: their key and words.
        self._lent: Dict[int, Tuple[Tuple[str, int], torch.Tensor]] = {}
        self._passes = 1

    def take(self, shape: Tuple[int, ...], dtype: torch.dtype, group: str) -> torch.Tensor:
        """A buffer that may be written on the current stream."""
        count = 1
        for extent in shape:
            count *= extent
        size = (count * torch.empty((), dtype=dtype).element_size() + 255) // 256 * 256
        key = (group, size)
        free = self._free.setdefault(key, [])
        if free:
            buffer = free.pop(0)
            now = self._passes if torch.cuda.is_current_stream_capturing() else 0
            # Between captures and eager work no wait is possible, and none is needed: what was captured only to be
            # thrown away never runs.
            if buffer.freed is not None and buffer.capture == now:
                torch.cuda.current_stream(self._ordinal).wait_event(buffer.freed)
            words = buffer.words
        else:
            words = from_dlpack(self._core.eager(group, size))
        view = words.view(dtype)[:count].view(shape)
        self._lent[view.data_ptr()] = (key, words)
        return view

    def give(self, view: torch.Tensor, stream: Optional["torch.cuda.Stream"]) -> bool:
        """Takes a buffer back once the stream has come here. Other tensors are left alone, with ``False``."""
        if self._ordinal is None:
            return False
        lent = self._lent.pop(view.data_ptr(), None)
        if lent is None:
            return False
        key, words = lent
        stream = stream or torch.cuda.current_stream(self._ordinal)
        freed = torch.cuda.Event()
        freed.record(stream)
        capture = self._passes if torch.cuda.is_current_stream_capturing() else 0
        self._free[key].append(Buffer(words, freed, capture))
        return True

    def end_pass(self) -> None:
        """Ends a pass: events of a capture mean nothing after it."""
        self._passes += 1

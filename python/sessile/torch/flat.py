"""Gradients that every replay writes at the same place, and copies of them that outlive the next replay."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch

#: Bytes at whose multiples each gradient begins, so that vectorized kernels can take it.
ALIGNMENT = 16

Layout = Tuple[torch.dtype, torch.device, torch.Size, Tuple[int, ...]]


class FlatGradients:
    """One buffer for each dtype of a backward's gradients. `keep` fills it, inside the graph; `copies` clones it, behind a replay,
    and gives views of the clone, which are the caller's own."""

    def __init__(self) -> None:
        self._layout: Tuple[Optional[Layout], ...] = ()
        self._flat: List[torch.Tensor] = []
        #: What is written: a view of each gradient's bytes.
        self._views: List[torch.Tensor] = []
        #: Of each gradient, its buffer, shape, strides and offset.
        self._places: List[Optional[Tuple[int, torch.Size, Tuple[int, ...], int]]] = []

    def keep(self, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        """Writes the gradients to their places. New ones are made only if shapes or dtypes are others than at the last call."""
        layout = tuple(None if g is None else (g.dtype, g.device, g.shape, g.stride()) for g in gradients)
        if layout != self._layout:
            self._place(gradients)
            self._layout = layout
        given = [g for g in gradients if g is not None]
        if not given:
            return
        with torch.no_grad():
            if hasattr(torch, "_foreach_copy_"):
                torch._foreach_copy_(self._views, given)
            else:
                for view, gradient in zip(self._views, given):
                    view.copy_(gradient)

    def copies(self) -> List[Optional[torch.Tensor]]:
        """The gradients as the last replay left them, with shapes, strides and dtypes as `clone` would give them."""
        clones = [flat.clone() for flat in self._flat]
        return [
            None if place is None else clones[place[0]].as_strided(place[1], place[2], place[3]) for place in self._places
        ]

    def _place(self, gradients: Sequence[Optional[torch.Tensor]]) -> None:
        buffers: Dict[Tuple[torch.dtype, torch.device], int] = {}
        sizes: List[int] = []
        self._places = []
        for gradient in gradients:
            if gradient is None:
                self._places.append(None)
                continue
            at = buffers.setdefault((gradient.dtype, gradient.device), len(buffers))
            if at == len(sizes):
                sizes.append(0)
            # Those of a clone: dense, whatever the gradient is.
            strides = torch.empty_like(gradient, memory_format=torch.preserve_format).stride()
            self._places.append((at, gradient.shape, strides, sizes[at]))
            step = max(1, ALIGNMENT // gradient.element_size())
            sizes[at] += -(-gradient.numel() // step) * step
        self._flat = [
            torch.zeros(size, dtype=dtype, device=device) for (dtype, device), size in zip(buffers, sizes)
        ]
        self._views = [
            self._flat[place[0]].as_strided(place[1], place[2], place[3]) for place in self._places if place is not None
        ]

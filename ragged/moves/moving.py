"""Carry a compiled move out: local copies, and one packed exchange per group of axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragged.collectives import Pending, exchange, plain
from ragged.mesh import Comm
from ragged.moves.compiling import Exchange, Move, Window

__all__ = ["Moving", "start_move"]


class _Arriving(NamedTuple):
    """An exchange in flight, and the messages to unpack once it is done."""

    pending: Pending
    packed: list[tuple[Sequence[Window], Tensor]]


class Moving:
    """A move in flight; `wait` puts what arrives into place."""

    def __init__(self, arriving: Sequence[_Arriving], target: Sequence[Tensor]) -> None:
        self._arriving, self._target = arriving, target

    def wait(self) -> None:
        for pending, packed in self._arriving:
            pending.wait()
            for windows, raw in packed:
                _unpack(windows, raw, self._target)
        self._arriving = ()


def start_move(move: Move, source: Sequence[Tensor], target: Sequence[Tensor], comm: Comm) -> Moving:
    """Launch a move from local 1-D tensors into others, which must not overlap with them.

    `source` must not change, and what the move fills of `target` is undefined, until `wait`. A message that is
    one window is sent from, or received into, its place; others are packed.
    """
    source = [plain(x) for x in source]
    arriving = [_launch(each, source, target, comm) for each in move.exchanges]
    for here, there in move.copies:
        _view(target, there).copy_(_view(source, here))
    return Moving(arriving, target)


def _launch(each: Exchange, source: Sequence[Tensor], target: Sequence[Tensor], comm: Comm) -> _Arriving:
    nothing = torch.empty(0, dtype=torch.uint8, device=comm.device)
    sent = [_pack(windows, source) if windows else nothing for windows in each.send]
    received: list[Tensor] = []
    packed: list[tuple[Sequence[Window], Tensor]] = []
    for windows in each.receive:
        if not windows:
            received.append(nothing)
        elif len(windows) == 1 and windows[0].strides == (1,):
            received.append(_view(target, windows[0]).view(torch.uint8))
        else:
            size = sum(_bytes(window, target) for window in windows)
            received.append(torch.empty(size, dtype=torch.uint8, device=comm.device))
            packed.append((windows, received[-1]))
    group = comm.everyone if each.axes is None else comm.group(each.axes)
    return _Arriving(exchange(sent, received, group), packed)


def _view(tensors: Sequence[Tensor], window: Window) -> Tensor:
    x = tensors[window.tensor]
    return x.as_strided(window.shape, window.strides, x.storage_offset() + window.offset)


def _bytes(window: Window, tensors: Sequence[Tensor]) -> int:
    n = tensors[window.tensor].itemsize
    for size in window.shape:
        n *= size
    return n


def _pack(windows: Sequence[Window], source: Sequence[Tensor]) -> Tensor:
    """One message as contiguous bytes; no copy if it is one window of neighbours."""
    views = [_view(source, window) for window in windows]
    if len(views) == 1:
        return views[0].contiguous().view(-1).view(torch.uint8)
    if len({view.dtype for view in views}) == 1:
        return torch.cat([view.reshape(-1) for view in views]).view(torch.uint8)
    return torch.cat([view.contiguous().view(-1).view(torch.uint8) for view in views])


def _unpack(windows: Sequence[Window], raw: Tensor, target: Sequence[Tensor]) -> None:
    start = 0
    for window in windows:
        size, dtype = _bytes(window, target), target[window.tensor].dtype
        piece = raw[start : start + size]
        if start % dtype.itemsize:  # behind a message part of a narrower dtype
            piece = piece.clone()
        _view(target, window).copy_(piece.view(dtype).view(window.shape))
        start += size

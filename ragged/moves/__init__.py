"""Moves: any change of layout, compiled into copies and one packed exchange per group of axes.

Redistribution, unsharding to one rank, an optimizer's trip to the roots and back: the same compiled move with
different ends. To read: `boxes`, `holdings`, `compiling`, `moving`.
"""

from ragged.moves.compiling import Exchange, Move, Window, compile_move
from ragged.moves.holdings import Grid, Holding, holdings_of, one_rank
from ragged.moves.moving import Moving, start_move

__all__ = [
    "Exchange",
    "Grid",
    "Holding",
    "Move",
    "Moving",
    "Window",
    "compile_move",
    "holdings_of",
    "one_rank",
    "start_move",
]

"""Optimizers as pure functions over sharded trees, with optax's names and shapes."""

from optim import schedules
from optim.adam import ScaleByAdamState, adamw, scale_by_adam
from optim.adam8bit import ScaleByAdam8bitState, adamw8bit
from optim.applying import apply_updates, make_step
from optim.base import EmptyState, GradientTransformation, identity
from optim.bytes_state import Blockwise
from optim.chaining import chain, named_chain
from optim.clipping import clip_by_global_norm
from optim.decay import add_decayed_weights
from optim.finite import ApplyIfFiniteState, apply_if_finite
from optim.injecting import InjectHyperparamsState, inject_hyperparams
from optim.muon import MuonState, muon
from optim.newton_schulz import newton_schulz
from optim.norms import all_finite, global_norm
from optim.partitioning import PartitionState, freeze, masked, partition, set_to_zero
from optim.scaling import ScaleByScheduleState, scale, scale_by_learning_rate, scale_by_schedule
from optim.sgd import TraceState, sgd, trace

__all__ = [
    "ApplyIfFiniteState",
    "Blockwise",
    "EmptyState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "MuonState",
    "PartitionState",
    "ScaleByAdam8bitState",
    "ScaleByAdamState",
    "ScaleByScheduleState",
    "TraceState",
    "adamw",
    "adamw8bit",
    "add_decayed_weights",
    "all_finite",
    "apply_if_finite",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "freeze",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "make_step",
    "masked",
    "muon",
    "named_chain",
    "newton_schulz",
    "partition",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "schedules",
    "set_to_zero",
    "sgd",
    "trace",
]

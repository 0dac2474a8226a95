"""The memory of small plans, by hand; and what a footprint counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp import Footprint, MixedPrecision, footprint, gathered
from optim import adamw, identity, sgd
from ragged import P, Plan, plan, rules
from ragged.ahead import AHEAD, Ahead

F32, BF16 = torch.float32, torch.bfloat16
KIB = 1024


def layers(n: int = 3, ranks: int = 2, **options: Any) -> Plan:
    """Units of 4 KiB in fp32, 2 KiB per rank on two."""
    one = {"w": ((32, 32), F32)}
    return plan({"layers": [one] * n}, {"fsdp": ranks}, P(ragged="fsdp"), units=["layers.*"], **options)


def moments(layout: Plan, *args: Any, **options: Any) -> dict[str, int]:
    """What is alive at each moment beside parameters and state, in KiB."""
    said = layout.memory(*args, **options)
    return {what: (n - said.params - said.state) // KIB for what, n in said.moments}


# --- what stays --------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "state"), [(None, 12), (adamw(1e-3), 12), (sgd(1e-3), 0), (identity(), 0)])
def test_static_bytes(optimizer: Any, state: int) -> None:
    said = layers().memory(optimizer)
    assert (said.params, said.grads, said.state) == (6 * KIB, 6 * KIB, state * KIB)


def test_the_largest_share_counts() -> None:
    spec = rules({"a": P(ragged="fsdp", shares=(3, 1)), "b": P(ragged="fsdp")})
    said = plan({"a": ((64, 64), F32), "b": ((64, 64), F32)}, {"fsdp": 2}, spec).memory(identity())
    assert said.params == (12 + 8) * KIB


def test_frozen_units_have_neither_gradients_nor_state() -> None:
    layout = layers(frozen=rules({"layers.0.**": True, "**": False}))
    said = layout.memory(adamw(1e-3), ahead=0)
    assert (said.params, said.grads, said.state) == (6 * KIB, 4 * KIB, 8 * KIB)
    whats = [what for what, _ in said.moments]
    assert "forward of layers.0" in whats
    assert "backward of layers.0" not in whats


# --- the step ----------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    assert moments(layers(), ahead=0) == {
        "forward of layers.0": 8,  # it, and the next on its way
        "forward of layers.1": 8,
        "forward of layers.2": 4,
        "backward of layers.2": 8,
        "reduce of layers.2": 8 + 4 + 2,  # gradients of the leaf, what arrives
        "backward of layers.1": 12 + 2,
        "reduce of layers.1": 12 + 4 + 2,  # before layers.2 lands, it is freed afterwards
        "sum of layers.2": 12 + 4 + 2 + 2,
        "backward of layers.0": 8 + 2 + 2,
        "reduce of layers.0": 8 + 4 + 2 + 2,
        "sum of layers.1": 8 + 4 + 2 + 2 + 2,
        "sum of layers.0": 4 + 2 + 4 + 2,
        "optimizer": 6,
    }


def test_kept_parameters() -> None:
    found = moments(layers(), ahead=0, reshard_after_forward=False)
    assert [found[f"forward of layers.{i}"] for i in range(3)] == [8, 12, 12]
    assert found["backward of layers.2"] == 12
    found = moments(layers(), ahead=0, reshard_after_forward=4 * KIB)
    assert [found[f"forward of layers.{i}"] for i in range(3)] == [8, 12, 8]


def test_small_units_run_far_ahead() -> None:
    found = moments(layers(6), ahead=12 * KIB)
    assert found["forward of layers.0"] == 4 + 12
    assert found["forward of layers.5"] == 4
    # two reductions are in flight when the third comes, and one lands
    assert found["sum of layers.5"] == max(n for what, n in found.items() if what.startswith("sum"))


def test_gathers_run_ahead_by_bytes() -> None:
    ahead = Ahead([8, 4, 16, 3, 5, 12, 7, 0, 32, 1], within=16)
    due = [list(ahead.due(turn)) for turn in range(10)]
    assert due == [[1], [2], [3, 4], [], [5], [6, 7], [], [8], [9], []]
    assert layers().memory() == layers().memory(ahead=AHEAD)


def test_one_rank_has_no_buffers() -> None:
    found = moments(layers(ranks=1), ahead=0)
    assert found["forward of layers.0"] == 0
    assert found["reduce of layers.2"] == 8  # gradients of the leaf, and the buffer that they are copied to
    assert found["optimizer"] == 12


def test_mixed_precision() -> None:
    found = moments(layers(1), precision=MixedPrecision(BF16))
    assert found["forward of layers.0"] == 2
    assert found["reduce of layers.0"] == 2 + 2 + 1
    assert found["sum of layers.0"] == 2 + 1 + 3 * 2  # two parts and their sum in fp32
    assert found["optimizer"] == 2
    found = moments(layers(1), precision=SimpleNamespace(param_dtype=BF16, reduce_dtype=F32))
    assert found["reduce of layers.0"] == 4 + 2 + 2  # the copy for the wire; then what arrives


def test_on_a_gpu_the_backend_sums() -> None:
    found = moments(layers(1), device_type="cuda")
    assert found["reduce of layers.0"] == found["sum of layers.0"] + 4 == 4 + 4 + 2


def test_replicas() -> None:
    shapes = {"w": ((128, 128), F32)}
    layout = plan(shapes, {"replica": 2, "fsdp": 2}, P(ragged="fsdp"))
    found = moments(layout)
    assert found["sum of w"] == 64 + 32 + 32  # what arrives and its sum; then the sum, half of it, and the sum of that


def test_a_new_state_where_nothing_is_donated() -> None:
    assert moments(layers(), donate=False)["optimizer"] == 6 + 6 + 6 + 12


def test_activations() -> None:
    foot = Footprint(saved=10 * KIB, forward=16 * KIB, backward=20 * KIB, passed=KIB)
    found = moments(layers(), ahead=0, footprints={"layers.*": foot})
    assert [found[f"forward of layers.{i}"] for i in range(3)] == [8 + 16, 8 + 10 + 16, 4 + 20 + 16]
    assert found["backward of layers.2"] == 8 + 20 + 20
    assert found["backward of layers.0"] == 8 + 2 + 2 + 20
    assert found["reduce of layers.2"] == 14 + 20 + 1
    assert found["reduce of layers.0"] == 16


def test_a_unit_that_is_called_twice_stays() -> None:
    small = Footprint(0, 0, 0, 0)
    found = moments(
        layers(2),
        ahead=0,
        calls=["layers.0", "layers.1", "layers.0"],
        footprints={"layers.0": [small, small._replace(forward=10 * KIB)], "layers.1": small},
    )
    assert found["forward of layers.0"] == 4 + 10
    assert found["forward of layers.1"] == 8
    assert found["reduce of layers.1"] == 8 + 4 + 4 + 2  # its gradients, and those of layers.0 that wait
    # then the gradient that waited, the new one and their sum, while layers.1 is in flight
    assert found["backward of layers.0"] == 8 + 2 + 4 + 8


def test_one_call_of_all_units() -> None:
    found = moments(layers(2), calls=[["layers.0", "layers.1"]])
    assert found["forward of layers.0 + layers.1"] == 8
    assert found["reduce of layers.1"] == 8 + 8 + 2


def test_units_are_called_in_the_order_of_the_tree() -> None:
    one = ((8, 8), F32)
    layout = plan({"z": one, "layers": [{"w": one}] * 2, "a": one}, {"fsdp": 2}, P(ragged="fsdp"), units=["layers.*"])
    called = [what for what, _ in layout.memory().moments if what.startswith("forward")]
    assert called == [f"forward of {name}" for name in ("z", "layers.0", "layers.1", "a")]


def test_what_a_person_reads() -> None:
    said = layers().memory(adamw(1e-3), ahead=0)
    text = str(said)
    first = text.splitlines()[0]
    assert first.startswith(f"peak: {said.when} ")
    assert first.endswith(f" {said.peak / KIB:.1f} KiB")
    assert sum(n for _, n in said.alive) == said.peak == max(n for _, n in said.moments)
    for what, _ in said.alive:
        assert f"  {what} " in text
    assert "\noptimizer " in text


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"calls": ["layer.0"]}, r"names the unit 'layer.0', which the plan lacks; its units are \['layers.0'"),
        ({"calls": "layers.0"}, r"calls=\['layers.0'\]"),
        ({"calls": [[]]}, "without units"),
        ({"footprints": {"head": Footprint(0, 0, 0, 0)}}, r"names 'head', which matches no unit; its units are"),
        ({"footprints": {"**": 3}}, r"footprints\['\*\*'\] is 3: expected saved, forward and backward"),
        ({"footprints": {"**": Footprint(-1, 0, 0, 0)}}, "expected saved, forward and backward in bytes"),
        ({"footprints": {"**": [Footprint(0, 0, 0, 0)] * 2}}, "is called 1 times and has 2 footprints"),
        ({"footprints": Footprint(0, 0, 0, 0)}, "expected a dict from unit names"),
        ({"reshard_after_forward": -1}, "reshard_after_forward=-1"),
        ({"ahead": -1}, "ahead=-1"),
    ],
)
def test_errors(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        layers().memory(**options)


# --- footprints --------------------------------------------------------------------------------


def linear(p: Any, x: Tensor) -> Tensor:
    return x @ p["w"]


def test_a_footprint_by_hand() -> None:
    params, x = {"w": torch.ones(64, 64)}, torch.ones(16, 64)
    # data: only its product, then the gradients of that and of w
    assert footprint(linear, params, x) == (0, 4 * KIB, 4 * KIB + 16 * KIB, 0)
    # a result of an earlier call: it is kept, and gets a gradient
    assert footprint(linear, params, x.requires_grad_()) == (4 * KIB, 8 * KIB, 12 * KIB + 16 * KIB, 4 * KIB)
    assert params["w"].grad is None
    assert x.grad is None
    assert not params["w"].requires_grad


def test_recomputation_keeps_the_argument_only() -> None:
    def deep(p: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ p["w"])
        return x

    params, x = {"w": torch.ones(64, 64)}, torch.ones(16, 64, requires_grad=True)
    whole = footprint(deep, params, x)
    assert whole.saved == 4 * 4 * KIB
    again = footprint(lambda p, x: checkpoint(deep, p, x, use_reentrant=False), params, x)
    assert footprint(gathered(deep, remat=True), params, x) == again
    assert again.saved == 4 * KIB
    assert again.forward < whole.forward
    assert again.backward >= whole.backward


def test_views_share_and_parameters_do_not_count() -> None:
    params, x = {"w": torch.ones(64, 64, dtype=BF16), "ids": torch.arange(3)}, torch.ones(16, 64, dtype=BF16)
    found = footprint(lambda p, x: [y := x @ p["w"], y.t(), y.view(-1), p["w"].t()], params, x)
    assert found.forward == 2 * KIB
    assert found.saved == 0


def test_footprint_errors() -> None:
    with pytest.raises(ValueError, match="no floating point tensor"):
        footprint(linear, {"w": torch.ones(2, 2, dtype=torch.int64)}, torch.ones(2, 2))
    with pytest.raises(ValueError, match="no result of the function requires grad"):
        footprint(lambda p, x: x + 1, {"w": torch.ones(2, 2)}, torch.ones(2, 2))

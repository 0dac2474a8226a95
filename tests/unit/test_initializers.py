"""Initializers: scales, shapes and refusals; the bits behind them are tested in test_random.py."""

import math
import random
from fractions import Fraction

import pytest
import torch

import ragged.random as rr
from ragged.random import initializers

SHAPE = (311, 223)
N = math.prod(SHAPE)


def values(init, shape, path="w", seed=0):
    return init(seed, path, shape, torch.arange(math.prod(shape))).view(shape)


def test_normal_scales_and_shifts():
    z = rr.standard_normal(0, "w", torch.arange(N)).view(SHAPE)
    assert torch.equal(values(rr.normal(0.5, mean=2), SHAPE), z * 0.5 + 2)
    assert torch.equal(values(rr.normal(), SHAPE), z)


def test_uniform_fills_its_range():
    x = values(rr.uniform(-3, 5), SHAPE)
    assert -3 <= x.min() < -2.99
    assert 4.99 < x.max() <= 5
    assert torch.equal(values(rr.uniform(), SHAPE).ravel(), rr.uniform01(0, "w", torch.arange(N)))


def test_uniform_stays_within_bounds_whatever_is_rounded(monkeypatch):
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(initializers, "uniform01", lambda seed, path, index: ends.clone())
    rng = random.Random(0)
    rounded_up = 0
    for _ in range(1000):
        low, high = -rng.random(), rng.random() * 2.0 ** -rng.randrange(60)
        rounded_up += Fraction(high - low) > Fraction(high) - Fraction(low)
        x = rr.uniform(low, high)(0, "w", (2,), torch.arange(2))
        assert low <= x[0] <= x[1] <= high
    assert rounded_up > 300  # the case in question


LAYERS = {
    "linear": lambda: torch.nn.Linear(48, 80),
    "conv1d": lambda: torch.nn.Conv1d(6, 9, 5),
    "conv2d": lambda: torch.nn.Conv2d(6, 9, (3, 5)),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_fan_in_follows_torch_by_default(layer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight = layer().weight.detach()
    fan, _ = torch.nn.init._calculate_fan_in_and_fan_out(weight)
    bound = 1 / math.sqrt(fan)
    x = values(rr.fan_in(), tuple(weight.shape))
    assert torch.equal(x, values(rr.uniform(-bound, bound), tuple(weight.shape)))
    # and so does torch: the largest of hundreds of weights is close to the same bound
    assert 0.95 * bound < weight.abs().max() <= bound
    assert 0.95 * bound < x.abs().max() <= bound


@pytest.mark.parametrize(
    ("dim", "shape", "fan"),
    [
        (0, (80, 48), 48),
        (1, (48, 80), 48),
        (-1, (48, 80), 48),
        (-1, (3, 5, 6, 9), 90),
        ((0, 1), (4, 80, 48), 48),
        ((0, -1), (4, 48, 80), 48),
        ((), (48,), 48),
        (0, (0, 48), 48),
        (0, (48, 0), 0),
    ],
)
def test_fan_in_sums_over_the_other_dims(dim, shape, fan):
    size = 3 / math.sqrt(fan) if fan else 0.0
    for distribution, plain in {"uniform": rr.uniform(-size, size), "normal": rr.normal(size)}.items():
        assert torch.equal(values(rr.fan_in(3, distribution, dim=dim), shape), values(plain, shape))


def test_fan_in_takes_the_global_shape():
    """A shard of 64x32 on 8 ranks looks like 8x32 or 64x4: the bound must not."""
    whole = values(rr.fan_in(dim=1), (64, 32)).ravel()
    for rank in range(8):
        run = torch.arange(rank * 256, (rank + 1) * 256)
        part = rr.fan_in(dim=1)(0, "w", (64, 32), run)
        assert torch.equal(part, whole[run])
        assert 0.11 < part.abs().max() <= 1 / 8
        assert rank == 0 or not torch.equal(part, whole[:256])


@pytest.mark.parametrize(
    ("dim", "shape"), [(0, ()), ((), ()), (0, (64,)), (2, (4, 5)), (-3, (4, 5)), ((0, 0), (4, 5)), ((0, 1), (4, 5))]
)
def test_undefined_fan_in_is_refused(dim, shape):
    with pytest.raises(ValueError, match=r"no fan-in for 'layers\.0\.bias' of shape") as error:
        values(rr.fan_in(dim=dim), shape, "layers.0.bias")
    assert str(shape) in str(error.value)
    assert "write zeros, ones, or uniform" in str(error.value)


def test_constants():
    assert values(rr.constant(-2.5), (3, 2)).tolist() == [[-2.5] * 2] * 3
    assert values(rr.zeros, (3,)).tolist() == [0.0] * 3
    assert values(rr.ones, (3,)).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: rr.normal(-1),
        lambda: rr.normal(math.nan),
        lambda: rr.normal(mean=math.inf),
        lambda: rr.uniform(1, 0),
        lambda: rr.uniform(0, math.nan),
        lambda: rr.uniform(-1e308, 1e308),
        lambda: rr.fan_in(-1),
        lambda: rr.fan_in(math.inf),
        lambda: rr.fan_in(distribution="gaussian"),
    ],
)
def test_bad_hyperparameters_are_refused_where_they_are_written(make):
    with pytest.raises(ValueError, match=r"^(normal|uniform|fan_in)\(.*\): write "):
        make()


INITIALIZERS = [rr.normal(0.02), rr.uniform(-1, 1), rr.fan_in(2, "normal", dim=(0, 1)), rr.zeros]


@pytest.mark.parametrize("init", INITIALIZERS, ids=repr)
def test_initializers_are_values_that_print_as_written(init):
    again = eval(repr(init), vars(rr))
    assert again == init
    assert hash(again) == hash(init)

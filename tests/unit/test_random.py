"""Random numbers addressed by (seed, path, index): the same bits everywhere, and good ones."""

import doctest
import hashlib
import importlib
import math
import re
import statistics
import struct
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

import ragged.random as rr
from ragged.random import counter, quantile
from ragged.random.quantile import normal_quantile_

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SHAPE = (311, 223)
N = math.prod(SHAPE)
DRAWS = {
    "bits": rr.bits,
    "uniform01": rr.uniform01,
    "standard_normal": rr.standard_normal,
    "normal": lambda seed, path, i: rr.normal(0.3, -0.1)(seed, path, SHAPE, i),
    "uniform": lambda seed, path, i: rr.uniform(-0.1, 0.3)(seed, path, SHAPE, i),
    "fan_in": lambda seed, path, i: rr.fan_in(distribution="normal")(seed, path, SHAPE, i),
    "constant": lambda seed, path, i: rr.constant(0.1)(seed, path, SHAPE, i),
}


def hex_head(seed):
    return f"{seed:x}"[:20]  # decimal text of huge integers is refused by Python


# --- plain references: Python's integers and floats, one element at a time ---


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def plain_bits(seed, path, i):
    """The documented formula, as an unsigned word."""
    digest = hashlib.blake2b(f"{seed:x}\0{path}".encode(), digest_size=16, person=b"ragged.random").digest()
    k0, k1 = struct.unpack("<QQ", digest)
    return mix(mix((i * 0x9E3779B97F4A7C15 + k0) % 2**64) ^ k1)


def horner(coefficients, r):
    total = coefficients[0] * r
    for c in coefficients[1:-1]:
        total = (total + c) * r
    return total + coefficients[-1]


def plain_quantile(p):
    """Each operation rounded once, as IEEE 754 has it: what every kernel must reproduce bitwise."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * horner(quantile._CENTRE[0], r) / horner(quantile._CENTRE[1], r)
    m, e = math.frexp(0.5 - abs(q))
    if m < math.sqrt(0.5):
        m, e = 2 * m, e - 1
    s = (m - 1) / (m + 1)
    x = e * -math.log(2) - horner([2 / (2 * k + 1) for k in reversed(range(12))], s * s) * s
    m, e = math.frexp(x)  # half the exponent, half the fraction
    e -= 1
    y = math.ldexp(1 + (2 * m - 1 + e % 2) / 2, e // 2)
    for _ in range(4):
        y = (x / y + y) * 0.5
    num, den, shift = (*quantile._TAIL, 1.6) if y <= 5 else (*quantile._FAR_TAIL, 5.0)
    return math.copysign(horner(num, y - shift) / horner(den, y - shift), q)


def grid(k):
    """The points of `uniform01` for an int64 tensor of their numbers in [0, 2^52)."""
    return (2 * k + 1).double() * 2.0**-53


def landmarks():
    """Points of `uniform01` at the ends, at the joints of the three formulas, and between them."""
    near = torch.arange(-300, 300)
    low = [0.075, 0.5, math.exp(-25)]
    powers = torch.tensor([3**n // 2**n for n in range(88)])
    k = torch.cat([torch.arange(600), *(round(p * 2**52) + near for p in low), powers])
    return grid(torch.cat([k, 2**52 - 1 - k]))


# --- what the numbers are ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1, -1, 2**64, -(2**63), 10**5000], ids=hex_head)
@pytest.mark.parametrize("path", ["", "a", "layers.0.wq", "ü\0"])
def test_bits_follow_the_documented_formula(seed, path, device):
    index = torch.tensor([0, 1, 2, 3, 767, 2**31, 2**32, 2**40 + 1, 2**63 - 1], device=device)
    got = [b % 2**64 for b in rr.bits(seed, path, index).tolist()]
    assert got == [plain_bits(seed, path, i) for i in index.tolist()]


def test_numbers_never_change():
    """Initial values are part of a result: a change here makes every published run irreproducible."""
    index = torch.tensor([0, 1, 10**12])
    assert rr.bits(0, "layers.0.wq", index).tolist() == [
        -271891309113243245,
        -3986647299545692957,
        8501317498443984858,
    ]
    assert [x.hex() for x in rr.uniform01(0, "layers.0.wq", index).tolist()] == [
        "0x1.f8741896fd941p-1",
        "0x1.91592ace739e1p-1",
        "0x1.d7eafce44643ap-2",
    ]
    assert [x.hex() for x in rr.standard_normal(0, "layers.0.wq", index).tolist()] == [
        "0x1.16a8d666a5235p+1",
        "0x1.921ccc893ac17p-1",
        "-0x1.9287cd34ec3b1p-4",
    ]


def test_no_digit_of_a_constant_changes():
    z = torch.cat([rr.standard_normal(0, "w", torch.arange(N)), normal_quantile_(landmarks())])
    assert hashlib.blake2b(z.numpy().tobytes(), digest_size=16).hexdigest() == "76b08e8d4439fe8b2a544e274491b576"


@pytest.mark.parametrize("device", DEVICES)
def test_uniform01_is_the_midpoint_of_the_top_bits(device):
    index = torch.arange(3000, device=device)
    words = [b % 2**64 for b in rr.bits(5, "w", index).tolist()]
    exact = [Fraction(2 * (b >> 12) + 1, 2**53) for b in words]
    assert [Fraction(u) for u in rr.uniform01(5, "w", index).tolist()] == exact


def test_uniform01_reaches_neither_0_nor_1(monkeypatch):
    ends = torch.tensor([0, -1])  # the smallest and the largest word
    monkeypatch.setattr(counter, "_bits_into", lambda keys, index, out: out.copy_(ends))
    assert rr.uniform01(0, "w", ends).tolist() == [2.0**-53, 1 - 2.0**-53]


@pytest.mark.parametrize("device", DEVICES)
def test_normals_are_rounded_as_in_the_plain_reference(device):
    u = torch.cat([landmarks(), rr.uniform01(2, "w", torch.arange(20001))])
    z = normal_quantile_(u.to(device, copy=True))
    assert z.tolist() == [plain_quantile(p) for p in u.tolist()]


def test_standard_normal_is_the_quantile_of_uniform01():
    index = torch.arange(40001)
    assert torch.equal(rr.standard_normal(7, "w", index), normal_quantile_(rr.uniform01(7, "w", index)))


def test_normal_quantile_is_accurate_to_the_last_digits():
    u = torch.cat([landmarks(), rr.uniform01(3, "w", torch.arange(20001))])
    z = normal_quantile_(u.clone()).tolist()
    inverse = statistics.NormalDist().inv_cdf
    for p, x in zip(u.tolist(), z, strict=True):
        assert math.isclose(x, inverse(p), rel_tol=3e-15)
        # A second opinion, which shares no constants: the tail beyond x holds the probability asked for.
        assert math.isclose(0.5 * math.erfc(abs(x) * math.sqrt(0.5)), min(p, 1 - p), rel_tol=1e-13)


def test_normal_quantile_is_odd():
    u = landmarks()
    assert torch.equal(normal_quantile_(1 - u), -normal_quantile_(u.clone()))


# --- the same bits, whoever asks ---


@pytest.fixture(params=DRAWS.values(), ids=DRAWS)
def draw(request):
    return request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 101])
def test_any_rank_count_makes_the_same_leaf(draw, ranks):
    whole = draw(0, "w", torch.arange(N))
    cuts = [N * r // ranks for r in range(ranks + 1)]
    parts = [draw(0, "w", torch.arange(a, b)) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("length", [1, 3, 5, 7, 31, 33])
def test_slices_of_odd_length_at_any_offset(draw, length):
    whole = draw(0, "w", torch.arange(N))
    for start in [*range(9), 32767, 32768, 65533, N - length]:
        part = draw(0, "w", torch.arange(start, start + length))
        assert torch.equal(part, whole[start : start + length])


def test_order_and_strides_of_the_indices_do_not_matter(draw):
    index = torch.arange(N)
    whole = draw(0, "w", index)
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw(0, "w", shuffled), whole[shuffled])
    assert torch.equal(draw(0, "w", index[::3]), whole[::3])
    assert torch.equal(draw(0, "w", index.view(SHAPE).t()), whole.view(SHAPE).t())
    assert torch.equal(draw(0, "w", torch.tensor(5).expand(9)), whole[5].expand(9))


def test_thread_count_does_not_matter(draw, threads):
    threads(1)
    index = torch.arange(3 * N)
    one = draw(0, "w", index)
    for n in (2, 3):
        threads(n)
        assert torch.equal(draw(0, "w", index), one)


@pytest.mark.parametrize("chunk", [1, 61, 1000, 1 << 30])
def test_chunks_do_not_matter(draw, chunk, monkeypatch):
    index = torch.arange(min(N, 200 * chunk))
    before = draw(0, "w", index)
    monkeypatch.setattr(counter, "_CHUNK", chunk)
    assert torch.equal(draw(0, "w", index), before)


def test_quantiles_do_not_depend_on_their_neighbours():
    """The rare far tail, too, which no ordinary leaf reaches."""
    u = landmarks()
    whole = normal_quantile_(u.clone())
    for start in range(0, len(u), 97):
        for length in (1, 2, 5, 64):
            part = normal_quantile_(u[start : start + length].clone())
            assert torch.equal(part, whole[start : start + length])


@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree(draw, device):
    index = torch.arange(3 * N)
    assert torch.equal(draw(0, "w", index.to(device)).cpu(), draw(0, "w", index.clone()))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3, 4)])
def test_results_have_the_shape_of_the_index(draw, shape):
    index = torch.arange(math.prod(shape)).view(shape)
    before = index.clone()
    got = draw(0, "w", index)
    assert got.shape == index.shape
    assert got.dtype == (torch.int64 if draw is rr.bits else torch.float64)
    assert torch.equal(index, before)


def test_torch_state_is_neither_read_nor_written(draw):
    state = torch.get_rng_state()
    first = draw(0, "w", torch.arange(9))
    assert torch.equal(torch.get_rng_state(), state)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(draw(0, "w", torch.arange(9)), first)
    finally:
        torch.set_default_dtype(before)


# --- statistics: fixed seeds, and limits of five standard deviations ---


def unpack(words):
    return ((words[..., None] >> torch.arange(64)) & 1).double()


def sigmas_from_half(bit):
    """Standard deviations by which the mean over dim 0 of fair bits differs from 1/2, at worst."""
    return (bit.mean(0) - 0.5).abs().max().item() * 2 * math.sqrt(bit.shape[0])


def sigmas_of_pairs(a, b):
    """Chi-square of pairs of bytes: standard deviations from a uniform distribution of all 65536."""
    counts = torch.bincount(((a & 255) << 8) | (b & 255), minlength=1 << 16).double()
    expected = a.numel() / (1 << 16)
    chi2 = ((counts - expected) ** 2 / expected).sum().item()
    return abs(chi2 - 65535) / math.sqrt(2 * 65535)


def test_every_bit_is_balanced():
    assert sigmas_from_half(unpack(rr.bits(0, "w", torch.arange(1 << 15)))) < 5


STREAMS = [
    ((0, "a.0"), (0, "a.1")),
    ((0, "a"), (1, "a")),
    ((0, "a"), (-1, "a")),
    ((1, "1"), (11, "")),
    ((0, "a"), (2**64, "a")),
    ((0, "a"), (0, "a/noise")),
]


@pytest.mark.parametrize(("one", "other"), STREAMS)
@pytest.mark.parametrize("lag", [0, 1])
def test_paths_and_seeds_are_independent(one, other, lag):
    index = torch.arange(1 << 18)
    x, y = rr.bits(*one, index), rr.bits(*other, index + lag)
    assert sigmas_from_half(unpack(x[: 1 << 13] ^ y[: 1 << 13])) < 5
    assert sigmas_of_pairs(x, y) < 5
    z = rr.standard_normal(*one, index) * rr.standard_normal(*other, index + lag)
    assert abs(z.mean().item()) * math.sqrt(z.numel()) < 5


@pytest.mark.parametrize("lag", [1, 2, 64, 768, 1 << 12, 1 << 20, 1 << 32, 1 << 40])
def test_neighbouring_indices_are_independent(lag):
    index = torch.arange(1 << 18)
    x, y = rr.bits(0, "w", index), rr.bits(0, "w", index + lag)
    for shift in (0, 24, 56):
        assert sigmas_of_pairs(x >> shift, y >> shift) < 5
    z = rr.standard_normal(0, "w", index) * rr.standard_normal(0, "w", index + lag)
    assert abs(z.mean().item()) * math.sqrt(z.numel()) < 5


def test_every_bit_of_the_index_reaches_every_bit_of_the_word():
    index = torch.arange(1024)
    flipped = index ^ (1 << torch.arange(63))[:, None]
    changed = unpack(rr.bits(0, "w", index) ^ rr.bits(0, "w", flipped))
    assert sigmas_from_half(changed.transpose(0, 1)) < 5


def test_moments_and_histogram_of_the_normals():
    n = 1 << 20
    z = rr.standard_normal(0, "w", torch.arange(n))
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        moment = torch.stack([z] * power).prod(0).mean().item()
        assert abs(moment - mean) < 5 * math.sqrt(variance / n), power
    cdf = statistics.NormalDist().cdf
    edges = torch.tensor([-4 + 0.25 * k for k in range(33)], dtype=torch.float64)
    counts = torch.bincount(torch.bucketize(z, edges), minlength=34)
    bounds = [0.0, *(cdf(e) for e in edges.tolist()), 1.0]
    for count, (a, b) in zip(counts.tolist(), pairwise(bounds), strict=True):
        assert abs(count - n * (b - a)) < 5 * math.sqrt(n * (b - a))


def test_moments_of_the_uniforms():
    n = 1 << 20
    u = rr.uniform01(0, "w", torch.arange(n))
    assert abs(u.mean().item() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var().item() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)


# --- arguments and examples ---


@pytest.mark.parametrize("seed", [0.0, "0", None])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ValueError, match=re.escape(f"seed must be an integer, got {seed!r}")):
        rr.bits(seed, "w", torch.arange(3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bool])
def test_an_index_is_int64(dtype):
    with pytest.raises(ValueError, match=rf"int64.*{dtype} of shape \(3,\); write index\.long\(\)"):
        rr.standard_normal(0, "w", torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("name", ["", ".counter", ".quantile", ".initializers"])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module("ragged.random" + name), extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0

"""`torch.compile` inside gathered functions and around optimizer steps: same values, and no compilation twice."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

from fsdp import MixedPrecision, fold, fully_shard, gathered, value_and_grad
from optim import adamw, make_step, sgd
from ragged import P, ShardedTree, make_mesh, map_leaves, shard, tree_map
from tests.dist.test_value_and_grad import mesh
from tests.models import block

D, LAYERS = 7, 3  # rows that no number of ranks divides


def counting(graphs: list[int], backend: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A backend that notes the length of each graph that it gets."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward if backend is None else backend(graph, inputs)

    return compile_graph


def model(layer: Any, precision: Any, **options: Any) -> Any:
    embed, body = gathered(lambda p, t: p[t]), gathered(layer, **options)
    return value_and_grad(
        lambda p, t: fold(body, p["layers"], embed(p["embed"], t)).float().square().mean(), precision=precision
    )


def layers() -> None:
    """One graph for all layers, made in the first step, and the gradients of the function as it is."""
    # dynamo looks at the grad of non-leaf inputs, activations too, and hides torch's warning from print only
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    aot_eager = importlib.import_module("torch._dynamo.backends.debugging").aot_eager  # seconds: only where needed
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    tree = {"embed": draw(5, D), "layers": [{"w": draw(D, D), "b": draw(D)} for _ in range(LAYERS)]}
    params, t = shard(tree, mesh(), P(ragged="fsdp"), units=["layers.*"]), torch.tensor([0, 3, 1])
    precision = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    table: list[tuple[Any, dict[str, Any]]] = [
        (None, {}),
        (precision, {}),
        (None, {"remat": True}),
        (None, {"reshard_after_forward": False}),
    ]
    for policy, options in table:
        torch.compiler.reset()
        graphs: list[int] = []
        compiled = torch.compile(block, backend=counting(graphs, aot_eager), fullgraph=True)
        f, plain = model(compiled, policy, **options), model(block, policy, **options)
        for step in range(5):
            with torch.compiler.set_stance("fail_on_recompile" if step > 1 else "default"):
                loss, grads = f(params, t)
            want_loss, want = plain(params, t)
            for a, b in zip((loss, *grads.tensors), (want_loss, *want.tensors), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            assert len(graphs) == 1, (policy, options)


def test_compiled_layers(run: Any) -> None:
    run(2, layers, timeout=120)


def leaves() -> dict[str, Tensor]:
    """IN-08: weights of 1601 x 8 and 30 further distinct shapes, of which some ranks hold no rows."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (1601, 8)} | {f"v{i}": (1 + i, 3 + i % 5) for i in range(30)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def compiles(params: ShardedTree) -> bool:
    """Whether this rank takes part: one with runs of many lengths, and one with none of most leaves. It is slow."""
    lengths = [params.leaf(path).numel() for path in params.paths]
    kinds = {0: len(set(lengths)), 1: lengths.count(0)}.get(params.rank["fsdp"])
    assert kinds is None or kinds > 20
    return kinds is not None


def compiled_step(name: str, donate: bool) -> None:
    """Three steps: the values of the step as it is, and no graph after the first."""
    tx = OPTIMIZERS[name]()
    params = shard({"u": leaves()}, mesh(), P(ragged="fsdp"))
    if not compiles(params):
        return
    torch.compiler.reset()
    graphs: list[int] = []
    plain = make_step(tx, donate=donate)
    compiled = torch.compile(make_step(tx, donate=donate), backend=counting(graphs))
    both = [(step, tree_map(torch.clone, params), tx.init(params)) for step in (plain, compiled)]
    before = 0
    for i in range(3):
        after = []
        for step, p, state in both:
            stance = "fail_on_recompile" if step is compiled and i > 1 else "default"
            with torch.compiler.set_stance(stance):
                after.append((step, *step(p, tree_map(lambda x: x.sin() * (i + 1), p), state)))  # noqa: B023
        both = after
        for a, b in zip(*(optree.tree_leaves((p, state)) for _, p, state in both), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert i == 0 or len(graphs) == before
        before = len(graphs)


OPTIMIZERS: dict[str, Callable[[], Any]] = {"adamw": lambda: adamw(1e-3), "sgd": lambda: sgd(1e-3, momentum=0.9)}


@pytest.mark.parametrize(("name", "donate"), [("adamw", False), ("adamw", True), ("sgd", True)])
def test_compiled_steps(run: Any, name: str, donate: bool) -> None:
    run(4, compiled_step, name, donate, timeout=120)


def compiled_leaves() -> None:
    """A compiled function of each leaf's run: lengths of all kinds, zero too, soon need no other graph."""
    params = shard({"u": leaves()}, mesh(), P(ragged="fsdp"))
    if not compiles(params):
        return
    torch.compiler.reset()
    graphs: list[int] = []

    def scale(x: Tensor) -> Tensor:
        return x * 0.9 + x.tanh()

    compiled = torch.compile(scale, backend=counting(graphs), fullgraph=True)
    tree, plain = params, params
    counts = []
    for _ in range(3):
        tree, plain = map_leaves(compiled, tree), map_leaves(scale, plain)
        counts.append(len(graphs))
        for a, b in zip(tree.tensors, plain.tensors, strict=True):
            assert torch.equal(a, b)
    assert counts[0] == counts[2] <= 4  # one length, then any length; none, and one element


def test_compiled_functions_of_leaves(run: Any) -> None:
    run(4, compiled_leaves, timeout=120)


def layers_of_a_module() -> tuple[int, int]:
    """Graphs after the first step and after four, of layers that were compiled before they were sharded."""
    graphs: list[Any] = []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3)))

    a, b = module(), module()
    for layer in a:
        layer.compile(backend=backend, fullgraph=True)
    fully_shard(a, mesh=make_mesh((-1,), ("fsdp",), device_type="cpu"), units=["*"])
    first = 0
    for step in range(4):
        a.zero_grad()
        b.zero_grad()
        x = torch.ones(2, 6) + step
        for m in (a, b):
            m(x).square().sum().backward()
        first = first or len(graphs)
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-6)
    return first, len(graphs)


def test_compiled_layers_of_a_sharded_module(run: Any) -> None:
    for first, last in run(2, layers_of_a_module):
        assert 1 <= first == last

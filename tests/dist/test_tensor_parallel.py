"""`gathered(as_dtensor=True)`: torch's tensor parallelism on gathered parameters equals one process."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp import fold, gathered, value_and_grad
from ragged import P, make_mesh, rules, shard, unshard

MESHES = [(2, 2), (1, 4), (4, 1)]
D, H, HEADS, T, BATCH, LAYERS = 8, 16, 4, 5, 8, 2
COLUMNS, ROWS, WHOLE = P(None, "tp", ragged="fsdp"), P("tp", ragged="fsdp"), P(ragged="fsdp")
SPECS = rules({"**.w*": COLUMNS, "**.up": COLUMNS, "**.bias": ROWS, "**.out": ROWS, "**.down": ROWS, "**": WHOLE})


def mesh_of(shape: tuple[int, int]) -> Any:
    return make_mesh(shape, ("fsdp", "tp"), device_type="cpu")


def full_params() -> Any:
    g = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * 0.3

    def layer() -> dict[str, Tensor]:
        square = {name: draw(D, D) for name in ("wq", "wk", "wv", "out")}
        return square | {"up": draw(D, H), "bias": draw(H), "down": draw(H, D), "norm": 1 + draw(D), "end": draw(D)}

    return {"layers": [layer() for _ in range(LAYERS)], "head": {"norm": 1 + draw(D), "down": draw(D, 3)}}


def batch(mesh: Any = None) -> Tensor:
    """The global batch, or this rank's share: ranks that differ on "tp" only see the same."""
    x = torch.randn(BATCH, T, D, generator=torch.Generator().manual_seed(6))
    return x if mesh is None else x.chunk(mesh["fsdp"].size())[mesh["fsdp"].get_local_rank()]


def local(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def like(x: Tensor, p: Tensor) -> Tensor:
    """`x`, equal on all ranks of the parameter's mesh, as a DTensor on it."""
    return DTensor.from_local(x, p.device_mesh, [Replicate()], run_check=False) if isinstance(p, DTensor) else x


def block(p: Any, x: Tensor) -> Tensor:
    """Attention and MLP, column then row parallel; plain tensors run through it too."""
    x = like(x, p["norm"])
    h = x * p["norm"]
    q, k, v = (((h @ p[w]).view(*x.shape[:2], HEADS, D // HEADS)).transpose(1, 2) for w in ("wq", "wk", "wv"))
    scores = torch.softmax(q @ k.transpose(-1, -2) / 2, -1)
    x = x + (scores @ v).transpose(1, 2).reshape(x.shape) @ p["out"]
    x = x + torch.tanh(x @ p["up"] + p["bias"]) @ p["down"] + p["end"]
    return local(x)


def make_loss(layer: Any = block, keep: bool = False) -> Any:
    body = gathered(layer, as_dtensor=True, reshard_after_forward=not keep)
    head = gathered(
        lambda p, x: local((like(x, p["norm"]) * p["norm"]) @ p["down"]).square().mean(),
        as_dtensor=True,
        reshard_after_forward=not keep,
    )
    return lambda params, x: head(params["head"], fold(body, params["layers"], x))


def close(a: Any, b: Any) -> None:
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def equals_one_process(shape: tuple[int, int]) -> None:
    mesh, full = mesh_of(shape), full_params()
    params = shard(full, mesh, SPECS, units=["layers.*"])
    want_loss, want = value_and_grad(make_loss())(full, batch())

    def recomputed(p: Any, x: Tensor) -> Tensor:
        return checkpoint(block, p, x, use_reentrant=False)  # type: ignore[no-any-return]

    kept, again = make_loss(keep=True), make_loss(recomputed)  # neither asks for the shape of the mesh
    for loss in (make_loss(), kept, again) if shape == MESHES[0] else (make_loss(),):
        f = value_and_grad(loss)
        for _ in range(2):
            value, grads = f(params, batch(mesh))
            close(value, want_loss)
            assert type(grads.tensors[0]) is Tensor
            close(unshard(grads), want)  # of the norms and of the matrices, on every mesh: nothing is divided by "tp"
    with torch.no_grad():
        close(make_loss()(params, batch()), want_loss)
    close(unshard(params), full)


@pytest.mark.parametrize("shape", MESHES)
def test_losses_and_gradients_equal_one_process(run: Any, shape: tuple[int, int]) -> None:
    run(4, equals_one_process, shape, timeout=180)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, H)
        self.down = nn.Linear(H, D)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return out


def parallelized(shape: tuple[int, int]) -> None:
    """The module's own parameters give way to ours; the plan's hooks stay."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    module = Model()
    full = {name: x.detach().clone() for name, x in module.named_parameters()}
    want_loss, want = value_and_grad(lambda p, x: functional_call(module, p, (x,)).square().mean())(full, batch())
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mine = {"**.up.*": ROWS, "**.down.weight": COLUMNS, "**": WHOLE}
    params = shard({"model": full}, mesh, rules(mine))

    @gathered(as_dtensor=True)
    def loss(p: Any, x: Tensor) -> Tensor:
        own = {name: value for name, value in p["model"].items() if name.startswith(("up", "down"))}
        norm = {name: p["model"][name].to_local() for name in ("norm.weight", "norm.bias")}  # not in the plan
        return functional_call(module, own | norm, (x,)).square().mean()  # type: ignore[no-any-return]

    f = value_and_grad(loss)
    for _ in range(2):
        value, grads = f(params, batch(mesh))
        close(value, want_loss)
        close(unshard(grads)["model"], want)
    with torch.no_grad():
        close(loss(params, batch()), want_loss)


@pytest.mark.parametrize("shape", MESHES)
def test_parallelize_module(run: Any, shape: tuple[int, int]) -> None:
    run(4, parallelized, shape)


def handed() -> None:
    """What fn gets: placements, views of one storage per bucket, autograd's own tensors outside of even axes."""
    mesh = make_mesh((1, 2, 2), ("fsdp", "a", "b"), device_type="cpu")
    full = {
        "x": {"w": torch.arange(32.0).view(8, 4), "v": torch.ones(4, 4), "s": torch.tensor(2.0), "e": torch.ones(0, 4)}
    }
    spec = {"x": {"w": P(("a", "b"), ragged="fsdp"), "v": P(None, "b", ragged="fsdp"), "s": None, "e": P("b")}}
    params = shard(full, mesh, spec)

    def look(p: Any, plain: Tensor) -> Tensor:
        assert plain.tolist() == [1.0]
        x = p["x"]
        assert all(isinstance(leaf, DTensor) for leaf in x.values())
        assert all(leaf.device_mesh == mesh["a", "b"] for leaf in x.values())
        assert {name: leaf.placements for name, leaf in x.items()} == {
            "w": (Shard(0), Shard(0)), "v": (Replicate(), Shard(1)), "s": (Replicate(), Replicate()),
            "e": (Replicate(), Shard(0)),
        }  # fmt: skip
        assert torch.equal(x["w"].full_tensor(), full["x"]["w"])
        assert x["s"].item() == 2
        assert x["e"].shape == (0, 4)
        return local(x["w"].sum() * x["s"] + x["v"].sum())

    f = value_and_grad(gathered(look, as_dtensor=True))
    for _ in range(2):
        value, grads = f(params, torch.ones(1))
        assert value.item() == 2 * 496 + 16
        got = unshard(grads)["x"]
        assert got["s"].item() == 496
        assert got["w"].unique().tolist() == [2.0]
        assert got["v"].unique().tolist() == [1.0]
    with torch.no_grad():
        assert gathered(look, as_dtensor=True)(params, torch.ones(1)).item() == 2 * 496 + 16
    plain = shard(full, mesh, P(ragged=("a", "b")))  # no axis cuts evenly, so there is nothing to be DTensor over
    assert gathered(lambda p: type(p["x"]["w"]) is Tensor, as_dtensor=True)(plain)


def test_what_the_function_gets(run: Any) -> None:
    run(4, handed)


def carried() -> None:
    """DTensors go from one gathered function to the next; the memory of full parameters comes and goes."""
    mesh, full, seen = mesh_of((2, 2)), full_params(), []

    def mlp(p: Any, x: Tensor) -> Tensor:
        x = x if isinstance(x, DTensor) else like(x, p["norm"])
        if isinstance(p["up"], DTensor):
            seen.append(p["up"].to_local().detach())
        return x + torch.tanh((x * p["norm"]) @ p["up"] + p["bias"]) @ p["down"]

    def head(p: Any, x: Tensor) -> Tensor:
        assert all(x.untyped_storage().nbytes() == 0 for x in seen[:-1])
        return local((x * p["norm"]) @ p["down"]).square().mean()

    def loss(params: Any, x: Tensor) -> Any:
        body = gathered(mlp, as_dtensor=True)
        return gathered(head, as_dtensor=True)(params["head"], fold(body, params["layers"], x))

    params = shard(full, mesh, SPECS, units=["layers.*"])
    want_loss, want = value_and_grad(loss)(full, batch())
    f = value_and_grad(loss)
    for _ in range(2):
        seen.clear()
        value, grads = f(params, batch(mesh))
        assert len(seen) == LAYERS
        assert all(x.untyped_storage().nbytes() == 0 for x in seen)
        close(value, want_loss)
        close(unshard(grads), want)


def test_dtensors_between_gathered_functions(run: Any) -> None:
    run(4, carried)


def shared_axis() -> None:
    """Dense leaves ragged over the axis that cuts others evenly: they are handed as replicas on it."""
    mesh, full = mesh_of((2, 2)), full_params()
    specs = rules({"**.up": COLUMNS, "**.bias": ROWS, "layers.*.down": ROWS, "**": P(ragged=("fsdp", "tp"))})
    params = shard(full, mesh, specs, units=["layers.*"])
    want_loss, want = value_and_grad(make_loss())(full, batch())
    value, grads = value_and_grad(make_loss(), data_axes="fsdp")(params, batch(mesh))
    close(value, want_loss)
    close(unshard(grads), want)


def test_leaves_that_are_ragged_over_an_even_axis(run: Any) -> None:
    run(4, shared_axis)


def aliasing(case: str) -> None:
    mesh = mesh_of((2, 2))
    params = shard({"w": torch.ones(8, 4)}, mesh, P(None, "tp", ragged="fsdp"))
    if case == "descending":
        mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("fsdp", "tp"))
        params = shard({"w": torch.ones(8, 4)}, mesh, P(None, "tp", ragged="fsdp"))
    if case == "order":
        params = shard({"w": torch.ones(8, 4)}, mesh, P(("tp", "fsdp")))
    returns: Any = {"itself": lambda p: p["w"], "view": lambda p: p["w"].t(), "local": lambda p: p["w"].to_local()}
    f = gathered(returns.get(case, returns["itself"]), as_dtensor=True)
    value_and_grad(lambda p: local(f(p)).sum())(params)


@pytest.mark.parametrize("case", ["itself", "view", "local", "order", "descending"])
def test_refusals(run: Any, case: str) -> None:
    messages = {"order": "in this order", "descending": "don't ascend along axis 'tp'"}
    message = messages.get(case, "a view of its parameters")
    for error in run(4, aliasing, case, expect_error=True):
        assert isinstance(error, ValueError)
        assert message in str(error)

"""`functionalize`: modules as they are, trained sharded, equal to themselves unsharded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import functionalize, value_and_grad
from optim import adamw, make_step
from ragged import P, ShardedTree, collectives, combine, make_mesh, partition, plan, shard, unshard
from ragged import checkpoint as checkpoint_folders


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d, bias=False)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = x + scale * self.down(self.up(self.norm(x)).relu())
        return out


class Net(nn.Module):
    """Tied ends, a block that is called twice under two names, a buffer assigned anew, containers."""

    def __init__(self, d: int = 8, remat: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, d)
        self.layers = nn.ModuleList([Block(d) for _ in range(3)])
        self.layers.append(self.layers[1])
        self.ends = nn.ModuleDict({"norm": nn.LayerNorm(d), "head": nn.Linear(d, 11, bias=False)})
        self.ends["head"].weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.remat = remat

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls = self.calls + 1
        x = self.embedding(tokens)
        for layer in self.layers:
            run = functools.partial(checkpoint, layer, use_reentrant=False) if self.remat else layer
            x = run(x, scale=0.5)
        out: Tensor = self.ends["head"](self.ends["norm"](x))
        return out


def net(**options: Any) -> tuple[nn.Module, Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net(**options), lambda out, tokens: nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())


def llama(tied: bool = False, remat: bool = False) -> tuple[nn.Module, Callable[..., Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=11, num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tied, **sizes
    )
    module = transformers.LlamaForCausalLM(config)
    if remat:
        module.activation_checkpointing_enable()
    return module, lambda out, tokens: nn.functional.cross_entropy(out.logits.flatten(0, 1), tokens.flatten())


MODELS: dict[str, tuple[Callable[..., Any], list[str], dict[str, Any]]] = {
    "net": (net, ["layers.*"], {}),
    "net, units as they come": (net, [], {}),
    "net, every module": (net, ["layers.*.*", "ends.*"], {}),
    "net, remat": (net, ["layers.*"], {"remat": True}),
    "llama": (llama, ["model.layers.*"], {}),
    "llama, tied": (llama, ["model.layers.*"], {"tied": True}),
    "llama, remat": (llama, ["model.layers.*"], {"remat": True}),
}
STEPS, RATE = 10, 1e-2


def tokens(rank: int, ranks: int, step: int) -> Tensor:
    all_of = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
    return all_of.chunk(ranks)[rank]


def straight(name: str) -> tuple[list[float], dict[str, Tensor]]:
    make, _, options = MODELS[name]
    module, loss_of = make(**options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        batch = tokens(0, 1, step)
        optimizer.zero_grad()
        loss = loss_of(module(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def trained(name: str) -> tuple[list[float], dict[str, Tensor]]:
    make, units, options = MODELS[name]
    module, loss_of = make(**options)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    apply, full, buffers = functionalize(module)
    params = shard(full, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=units)

    def loss_fn(params: Any, buffers: Any, batch: Tensor) -> tuple[Tensor, Any]:
        out, buffers = apply(params, buffers, batch)
        return loss_of(out, batch), buffers

    f, tx = value_and_grad(loss_fn, has_aux=True), adamw(RATE, weight_decay=0.1)
    state, step_fn, losses = tx.init(params), make_step(tx), []
    for step in range(STEPS):
        (loss, buffers), grads = f(params, buffers, tokens(dist.get_rank(), dist.get_world_size(), step))
        params, state = step_fn(params, grads, state)
        losses.append(loss.item())
    if "calls" in buffers:
        assert buffers["calls"] == STEPS
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())  # it was not touched
    whole = unshard(params)
    return losses, {path: functools.reduce(lambda t, k: t[k], path.split("."), whole) for path in params.paths}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_modules_train_as_they_do_unsharded(run: Any, name: str, ranks: int) -> None:
    losses, params = straight(name)
    assert losses[-1] < losses[0]
    for got, found in run(ranks, trained, name):
        assert got == pytest.approx(losses, abs=1e-5)
        assert found.keys() == params.keys()
        for path, x in found.items():
            torch.testing.assert_close(x, params[path], rtol=0, atol=1e-5)


def counted(name: str) -> dict[str, int]:
    """Gathers and reduces of a later step."""
    make, units, options = MODELS[name]
    module, loss_of = make(**options)
    apply, full, buffers = functionalize(module)
    params = shard(full, make_mesh((-1,), ("fsdp",), device_type="cpu"), P(ragged="fsdp"), units=units)
    f = value_and_grad(lambda params, batch: loss_of(apply(params, buffers, batch)[0], batch))
    for step in range(2):
        f(params, tokens(dist.get_rank(), dist.get_world_size(), step))
    with collectives.record() as events:
        f(params, tokens(dist.get_rank(), dist.get_world_size(), 2))
    kinds = [event.kind for event in events]
    return {kind: kinds.count(kind) for kind in ("all_gather", "reduce_scatter")}


def test_a_unit_is_gathered_twice_and_reduced_once(run: Any) -> None:
    """Llama: 4 layers, the ends and the head; the ends stay, as they are used around all that runs inside."""
    for name in ("llama", "llama, remat"):
        for counts in run(2, counted, name):
            assert counts["reduce_scatter"] == 6
            assert counts["all_gather"] <= 2 * 6


def loaded(folder: str) -> None:
    """From a folder that transformers wrote into shards; the module never has values here."""
    want, _ = llama()
    with torch.device("meta"):
        module, _ = llama()
    apply, full, _ = functionalize(module)
    _, _, buffers = functionalize(want)  # computed, not saved
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    layout = plan(full, mesh, P(ragged="fsdp"), units=["model.layers.*"])
    found = checkpoint_folders.load(folder, {"params": layout}, rename=lambda name: name.removeprefix("params."))
    batch = tokens(0, 1, 0)
    with torch.no_grad():
        got, _ = apply(found["params"], buffers, batch)
        assert torch.equal(got.logits, want(batch).logits)


def test_weights_that_transformers_wrote(run: Any, tmp_path: Path) -> None:
    module, _ = llama()
    module.save_pretrained(tmp_path / "whole")
    module.save_pretrained(tmp_path / "parts", max_shard_size="8KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    for name in ("whole", "parts"):
        run(2, loaded, str(tmp_path / name))


def partly_trained() -> None:
    """Low-rank adapters beside frozen matrices: gradients and state for the adapters alone."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(4), requires_grad=False)
            self.a, self.b = nn.Parameter(torch.ones(4, 1)), nn.Parameter(torch.zeros(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w + self.a @ self.b)

    module = nn.Sequential(Lora(), nn.Tanh(), Lora())
    apply, full, buffers = functionalize(module)

    def frozen(path: str, leaf: Any) -> bool:
        return path.endswith("w")

    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    params = shard(full, plan(full, mesh, P(ragged="fsdp"), units=["*"], frozen=frozen))
    cold, warm = partition(params, frozen)

    def loss_fn(warm: Any, cold: Any, x: Tensor) -> Tensor:
        out, _ = apply((warm, cold), buffers, x)
        return (out - 1).square().mean()

    x = torch.arange(8.0).view(2, 4)
    loss, grads = value_and_grad(loss_fn)(warm, cold, x)
    module_loss = (module(x) - 1).square().mean()
    module_loss.backward()
    assert loss.item() == pytest.approx(module_loss.item())
    got = unshard(grads)
    for i in ("0", "2"):
        assert got[i]["w"] is None
        for name in ("a", "b"):
            torch.testing.assert_close(got[i][name], module.get_parameter(f"{i}.{name}").grad)
    assert isinstance(combine(cold, warm), ShardedTree)


def test_frozen_parameters_and_adapters(run: Any) -> None:
    run(2, partly_trained)


def test_modes_buffers_and_plain_trees() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    apply, params, buffers = functionalize(module)
    x = torch.randn(8, 4)
    calm = apply.eval()
    (a, same), (b, _) = calm(params, buffers, x), calm(params, buffers, x)
    assert torch.equal(a, b)
    assert torch.equal(a, module.eval()(x))
    assert same["1"]["num_batches_tracked"] == 0
    torch.manual_seed(0)
    out, after = apply(params, buffers, x)
    torch.manual_seed(0)
    assert torch.equal(out, module.train()(x))
    assert after["1"]["num_batches_tracked"] == 1
    assert buffers["1"]["num_batches_tracked"] == 1  # the module's own, which has run by now
    torch.testing.assert_close(after["1"]["running_mean"], module[1].running_mean)
    loss, grads = value_and_grad(lambda p: apply(p, buffers, x)[0].sum())(params)
    assert grads["0"]["weight"].shape == (4, 4)


def test_another_run_before_backward() -> None:
    """A reference model without gradients, between a forward with checkpoints and its backward."""
    module, loss_of = net(remat=True)
    apply, params, buffers = functionalize(module)
    other = {k: v for k, v in functionalize(Net())[1].items()}
    batch = tokens(0, 1, 0)
    before = value_and_grad(lambda p: loss_of(apply(p, buffers, batch)[0], batch))(params)

    def loss_fn(p: Any) -> Tensor:
        loss = loss_of(apply(p, buffers, batch)[0], batch)
        with torch.no_grad():
            apply(other, buffers, batch)
        return loss

    after = value_and_grad(loss_fn)(params)
    assert optree.tree_all(optree.tree_map(torch.equal, before, after))


def test_names_that_do_not_fit() -> None:
    apply, params, buffers = functionalize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the module needs 'bias'"):
        apply({"weight": params["weight"]}, buffers, torch.ones(1, 2))
    with pytest.raises(ValueError, match="nothing called 'scale'"):
        apply({**params, "scale": torch.ones(1)}, buffers, torch.ones(1, 2))


def test_modules_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Linear(64, 64)
    apply, params, buffers = functionalize(module)
    assert params["weight"].is_meta
    values = {"weight": torch.eye(64), "bias": torch.zeros(64)}
    assert torch.equal(apply(values, buffers, torch.ones(1, 64))[0], torch.ones(1, 64))

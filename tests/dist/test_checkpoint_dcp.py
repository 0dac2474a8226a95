"""Checkpoints of torch.distributed.checkpoint: what FSDP2 wrote into any layout, and any layout into what it reads."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import optim
from ragged import ELEMENT, TENSOR, P, make_mesh, plan, rules, shard
from ragged.checkpoint import export_dcp, import_dcp

Full = dict[str, Tensor]

COLUMNS = rules({"up.weight": P(None, "tp", ragged="fsdp"), "**": P(ragged=("tp", "fsdp"), block=ELEMENT)})
EVEN = rules({"up.weight": P(None, "fsdp"), "down.weight": P(("tp", "fsdp")), "**": None})
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Any]] = {
    "rows": ((-1,), ("fsdp",), P(ragged="fsdp")),
    "elements": ((-1,), ("fsdp",), P(ragged="fsdp", block=ELEMENT)),
    "whole": ((-1,), ("fsdp",), P(ragged="fsdp", block=TENSOR)),
    "replicated": ((-1,), ("fsdp",), None),
    "hybrid": ((2, -1), ("replica", "fsdp"), P(ragged="fsdp")),
    "columns": ((-1, 2), ("fsdp", "tp"), COLUMNS),
    "even": ((-1, 2), ("fsdp", "tp"), EVEN),
}


def layouts() -> list[str]:
    return list(LAYOUTS) if dist.get_world_size() % 2 == 0 else [n for n in LAYOUTS if len(LAYOUTS[n][0]) == 1]


def mesh_of(layout: str) -> DeviceMesh:
    return make_mesh(*LAYOUTS[layout][:2], device_type="cpu")


class Net(nn.Module):
    """Odd sizes, a leaf with fewer rows than ranks, and one without dims."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 5))
        with torch.no_grad():
            for k, x in enumerate(self.parameters()):
                x.copy_(values(x.shape, k))


def values(shape: Any, k: int) -> Tensor:
    return (torch.arange(math.prod(shape)) * (k + 2) % 13 / 16 - 0.3).float().reshape(shape)


def full(tree: Any) -> Any:
    """DTensors as full tensors."""
    return optree.tree_map(lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x, tree)


def fsdp2(hidden: int, tensor_parallel: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = Net(hidden)
    mesh = make_mesh((-1, 2) if tensor_parallel else (-1,), ("dp", "tp")[: 1 + tensor_parallel], device_type="cpu")
    if tensor_parallel:
        parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net.up, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def written(folder: str, hidden: int, tensor_parallel: bool) -> Any:
    """One step of FSDP2, saved in the way that torch's tutorials show; and the same as full tensors."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    net, tx = fsdp2(hidden, tensor_parallel)
    for x in net.parameters():
        x.grad = x.detach().cos()
    tx.step()
    model, opt = get_state_dict(net, tx)
    dcp.save({"model": model, "optim": opt, "step": 3, "name": "a"}, checkpoint_id=folder)
    return optree.tree_map(lambda x: x.detach().clone(), (full(model), full(opt["state"])))


def like_of(layout: str, net: Full) -> dict[str, Any]:
    """Zeros in the form of what was written, without the values of `param_groups`."""
    zeros = {name: torch.zeros_like(x) for name, x in net.items()}
    tree = shard(zeros, plan(zeros, mesh_of(layout), LAYOUTS[layout][2], units=["up.*"], align=1))
    return {
        "model": tree,
        "optim": {"mu": tree, "nu": optree.tree_map(torch.clone, tree)},
        "step": 0,
        "name": "",
        "rate": 0.0,
    }


def names(name: str) -> str:
    tree, *path = name.split(".")
    if tree == "rate":
        return "optim.param_groups.0.lr"
    if tree != "optim":
        return name
    return ".".join(["optim.state", *path[1:], {"mu": "exp_avg", "nu": "exp_avg_sq"}[path[0]]])


def read(folders: list[str], wants: Any) -> None:
    for folder, (net, moments) in zip(folders, wants, strict=True):
        for layout in layouts():
            like = like_of(layout, net)
            with pytest.warns(UserWarning, match="load skipped") as caught:
                got = import_dcp(folder, like, strict=False, rename=names)
            skipped = str(caught[0].message)
            assert "'optim.param_groups.0.betas' is unexpected" in skipped
            assert "missing" not in skipped
            assert (got["step"], got["name"], got["rate"]) == (3, "a", 0.1)
            for tree, key in (
                (got["model"], None),
                (got["optim"]["mu"], "exp_avg"),
                (got["optim"]["nu"], "exp_avg_sq"),
            ):
                want = {n: x if key is None else moments[n][key] for n, x in net.items()}
                sharded = shard(want, tree.plan)
                assert all(torch.equal(a, b) for a, b in zip(tree.tensors, sharded.tensors, strict=True)), layout
            assert not any(x.any() for x in like["model"].tensors)
        steps = {n: torch.ones(()).double() * 9 for n in net}
        plain = {n: torch.zeros_like(x).double() for n, x in net.items()}
        with pytest.warns(UserWarning, match="load skipped"):
            found = import_dcp(
                folder,
                {"model": plain, "steps": steps},
                strict=False,
                rename=lambda n: n if n.startswith("model") else f"optim.state.{n.removeprefix('steps.')}.step",
            )
        assert all(torch.equal(found["model"][n], x.double()) for n, x in net.items())
        assert all(x == 1 for x in found["steps"].values())


def test_what_fsdp2_wrote_into_any_layout(run: Any, tmp_path: Path) -> None:
    wrote = [(2, 13, False), (4, 13, False), (4, 12, True), (4, 10, True)]
    folders = [str(tmp_path / f"{i}") for i in range(len(wrote))]
    wants = [run(n, written, folder, h, tp)[0] for (n, h, tp), folder in zip(wrote, folders, strict=True)]
    for n, which in ((1, (0,)), (2, (1, 2)), (3, (0, 3)), (4, (0, 1, 2, 3))):
        run(n, read, [folders[i] for i in which], [wants[i] for i in which])


def extra() -> Full:
    """Leaves without elements, without dims, and with fewer rows (or indices at all) than ranks."""
    return {
        "none": torch.zeros(0, 3),
        "dot": torch.tensor(2.0),
        "row": values((1, 9), 5),
        "few": values((2, 1), 6),
    }


def exported(folder: str, net: Full) -> None:
    whole = {**net, **extra()}
    for layout in layouts():
        tree = shard(whole, plan(whole, mesh_of(layout), LAYOUTS[layout][2], units=["up.*"], align=1))
        half = optree.tree_map(torch.Tensor.bfloat16, tree)
        trees = {"model": tree, "half": half, "opt": optim.adamw(0.1).init(tree), "rate": 0.1, "name": "a"}
        export_dcp(f"{folder}/{layout}", trees)
        zeros = optree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else type(x)(), trees)
        back = import_dcp(f"{folder}/{layout}", zeros)
        assert optree.tree_structure(back) == optree.tree_structure(trees)
        assert optree.tree_all(
            optree.tree_map(lambda a, b: torch.equal(a, b) if isinstance(a, Tensor) else a == b, back, trees)
        )
    reordered = DeviceMesh("cpu", list(reversed(range(dist.get_world_size()))), mesh_dim_names=("fsdp",))
    export_dcp(
        f"{folder}/reordered",
        {"model": shard(whole, plan(whole, reordered, P(ragged="fsdp"), align=1)), "rate": 0.1, "name": "a"},
    )
    if dist.get_rank() < 2:
        some = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",), _init_backend=False)
        export_dcp(f"{folder}/some", {"model": shard(whole, some, P(ragged="fsdp")), "rate": 0.1, "name": "a"})
    with pytest.raises(ValueError, match="holds a checkpoint"):
        export_dcp(f"{folder}/rows", {"model": tree})
    with pytest.raises(ValueError, match=r"'rate'.* rank 0 has 0, rank 1 has 1|rank 0 has 1, rank 1 has 0"):
        export_dcp(f"{folder}/odd", {"rate": dist.get_rank() % 2})
    with pytest.raises(ValueError, match=r"rank . failed: .*(NotADirectory|FileExists)"):
        export_dcp(__file__ + "/no", {"model": tree})


def into_fsdp2(folders: list[str], want: Full) -> None:
    net, _ = fsdp2(13, False)
    for folder in folders:
        with torch.no_grad():
            for x in net.parameters():
                x.zero_()
        state = {"model": net.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        assert all(torch.equal(x, want[name]) for name, x in full(state["model"]).items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch says so when it reads without a group
def test_any_layout_into_what_torch_reads(run: Any, tmp_path: Path) -> None:
    net = dict(Net(13).state_dict())
    even = dict(Net(12).state_dict())
    run(3, exported, str(tmp_path / "3"), net)
    run(4, exported, str(tmp_path / "4"), even)
    run(2, into_fsdp2, [str(tmp_path / "3" / name) for name in ("rows", "elements")], net)
    folders = sorted((*(tmp_path / "3").iterdir(), *(tmp_path / "4").iterdir()))
    assert len(folders) == 4 + 7 + 2 * 2
    for folder in folders:
        want = {**(net if folder.parent.name == "3" else even), **extra()}
        model = {name: torch.full_like(x, 9) for name, x in want.items()}
        state = {"model": model, "rate": 0.0, "name": ""}
        dcp.load(state, checkpoint_id=folder)
        assert (state["rate"], state["name"]) == (0.1, "a")
        assert all(torch.equal(model[name], x) for name, x in want.items()), folder
        if (folder / "__1_0.distcp").exists() and folder.name in ("rows", "elements"):  # everyone writes about as much
            sizes = [file.stat().st_size for file in folder.glob("*.distcp")]
            assert max(sizes) < 2 * min(sizes)

"""Functions over sharded trees: what they may return, what stays zero, what is refused."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as torch_pytree

from ragged import (
    ELEMENT,
    P,
    ShardedTree,
    combine,
    from_local,
    init,
    make_mesh,
    map_leaves,
    partition,
    plan,
    random,
    reduce_scatter,
    rules,
    shard,
    tree_map,
    typeof,
    unshard,
)

TREE = {"b": torch.arange(5.0), "layers": [{"w": torch.arange(12.0).view(3, 4)}, None], "s": torch.tensor(2.0)}


def sharded(**options: Any) -> ShardedTree:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    return shard(TREE, plan(TREE, mesh, P(ragged="fsdp"), **options))


def same(a: Any, b: Any) -> None:
    assert optree.tree_structure(a) == optree.tree_structure(b)
    assert optree.tree_all(optree.tree_map(lambda x, y: x.dtype == y.dtype and torch.equal(x, y), a, b))


def padding(tree: ShardedTree) -> int:
    """Elements that are padding; all of them zero."""
    count = 0
    for piece, tensor in zip(tree.selection.pieces, tree.tensors, strict=True):
        rank = tree.plan.bound().rank(piece.bucket.ragged)
        for a, b in piece.bucket.local_gaps(rank, piece.start, piece.stop):
            assert not tensor[a:b].any()
            count += b - a
    return count


def maps() -> int:
    tree, ones = sharded(), optree.tree_map(torch.ones_like, TREE)
    functions = [
        lambda x: x + 1,
        lambda x: torch.exp(x),
        lambda x: x == 0,
        lambda x: (x + 1).to(torch.bfloat16),
        lambda x: torch.ones(()).expand(x.shape),
        lambda x: torch.ones(2 * len(x))[::2],
        lambda x: x.clone().add_(1),
        lambda x: torch.nn.Parameter(x.detach() + 1),
    ]
    for f in functions:
        got = tree_map(f, tree)
        padding(got)
        elementwise = optree.tree_map(lambda x, f=f: f(x.reshape(-1)).reshape(x.shape).detach(), TREE)
        same(unshard(got), elementwise)
    same(unshard(tree_map(lambda x, y: x + 2 * y, tree, tree)), optree.tree_map(lambda x: 3 * x, TREE))
    same(unshard(tree), TREE)
    for module in (optree, torch_pytree):
        same(unshard(module.tree_map(torch.clone, tree)), TREE)
    assert optree.tree_leaves(tree) == list(tree.tensors) == torch_pytree.tree_leaves(tree)
    sums = tree_map(lambda x: x.sum(), tree)  # no buffers any more, and no padding to clear
    assert [x.shape for x in sums.tensors] == [()] * len(tree.tensors)
    leaves = map_leaves(lambda x, info: torch.full_like(x, len(info.shape)), tree, with_info=True)
    padding(leaves)
    same(unshard(leaves), optree.tree_map(lambda x: torch.full_like(x, x.ndim), TREE))
    same(unshard(tree_map(lambda x, y: x + y, leaves, tree_map(torch.ones_like, tree)))["s"], ones["s"])
    return padding(tree)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_maps(run: Any, n: int) -> None:
    assert sum(run(n, maps)) > 0  # there was padding that a function could have spoiled


def gradients_flow_through_padding() -> None:
    tree = tree_map(lambda x: x.clone().requires_grad_(), sharded())
    out = tree_map(lambda x: x * x + 1, tree)
    padding(out)
    sum(x.sum() for x in out.tensors).backward()
    for x in tree.tensors:
        assert x.is_leaf
        assert torch.equal(x.grad, 2 * x)


def test_autograd_goes_through_maps(run: Any) -> None:
    run(2, gradients_flow_through_padding)


class Box:
    """A container that is callable too: google-deepmind/optax labels, patrick-kidger/equinox#193."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("a tree is not called")


optree.register_pytree_node(
    Box,
    lambda box: (list(box.entries.values()), tuple(box.entries), tuple(box.entries)),
    lambda names, children: Box(**dict(zip(names, children, strict=True))),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def callable_containers() -> None:
    mesh = make_mesh((-1,), ("fsdp",), device_type="cpu")
    full = Box(a=torch.arange(6.0), b=Box(c=torch.ones(3, 2)))
    specs = Box(a=P(ragged="fsdp", block=ELEMENT), b=P(ragged="fsdp"))
    tree = shard(full, mesh, specs)
    back = unshard(tree)
    assert isinstance(back, Box)
    assert torch.equal(back.entries["a"], full.entries["a"])
    assert torch.equal(back.entries["b"].entries["c"], full.entries["b"].entries["c"])
    one, two = partition(tree, Box(a=True, b=Box(c=False)))
    assert (one.paths, two.paths) == (("a",), ("b.c",))
    made = unshard(init(plan(full, mesh, specs), Box(a=random.ones, b=random.zeros), seed=0))
    assert made.entries["a"].sum() == 6
    assert made.entries["b"].entries["c"].sum() == 0


def test_containers_that_are_callable_are_containers(run: Any) -> None:
    run(2, callable_containers)


def refusals(case: str) -> str:
    rank, tree = dist.get_rank(), sharded()
    mesh, p = tree.plan.mesh, tree.plan
    full = optree.tree_map(torch.clone, TREE)
    first = p.leaves["b"]
    runs = {path: tree.leaf(path) for path in p.leaves}
    match case:
        case "contribution missing" if rank == 1:
            del full["b"]
        case "contribution shape" if rank == 1:
            full["b"] = torch.ones(4)
        case "contribution dtype" if rank == 1:
            full["b"] = torch.ones(5, dtype=torch.float64)
        case "contribution no tensor" if rank == 1:
            full["b"] = (first.shape, first.dtype)
        case "run missing" if rank == 1:
            del runs["b"]
        case "run size" if rank == 1:
            runs["b"] = torch.ones(17)
        case "run dtype" if rank == 1:
            runs["b"] = runs["b"].double()
        case "run meta" if rank == 1:
            runs["b"] = runs["b"].to("meta")
        case "run no tensor" if rank == 1:
            runs["b"] = runs["b"].tolist()
    with pytest.raises(ValueError, match=r".") as caught:
        match case.split()[0]:
            case "contribution":
                reduce_scatter(full, p)
            case "run":
                from_local(runs, p)
            case "op":
                reduce_scatter(full, p, "sum" if rank else "mean")
            case "unknown":
                reduce_scatter(full, p, "average")
            case "integers":
                reduce_scatter({"x": torch.ones(3).int()}, plan({"x": torch.ones(3).int()}, mesh, P(ragged="fsdp")))
            case "dst":
                unshard(tree, dst=7 if rank == 1 else 0)
            case "mask":
                partition(tree, {"b": True})
            case "flag":
                partition(tree, lambda path, _: 1)
            case "rule":
                partition(tree, rules({"b": True, "w": False, "**": False}))
            case "twice":
                combine(tree, tree["b"])
            case "plans":
                combine(tree, sharded(align=1))
            case "sizes":
                map_leaves(lambda x: x[:0] if len(x) else torch.ones(1), tree)
            case "mixed":
                one = shard({"u": {"a": TREE["b"], "b": TREE["s"]}}, mesh, P(ragged="fsdp"))
                map_leaves(lambda x, info: x.double() if info.path == "u.b" else x, one, with_info=True)
            case "buffers":
                one = shard({"u": {"a": TREE["b"], "b": TREE["s"]}}, mesh, P(ragged="fsdp"))["u"]["a"]
                _ = one.buffers
            case "typeof":
                typeof(3)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("contribution missing", ["'b'"]),
        ("contribution shape", ["'b'", "(4,)", "(5,)"]),
        ("contribution dtype", ["'b'", "float64", "float32", "rank 1"]),
        ("contribution no tensor", ["'b'", "no tensor"]),
        ("run missing", ["'b'", "no run"]),
        ("run size", ["'b'", "17", "rank 1"]),
        ("run dtype", ["'b'", "float64"]),
        ("run meta", ["'b'", "meta"]),
        ("run no tensor", ["'b'", "no tensor"]),
        ("op", ["op", "mean", "sum"]),
        ("unknown", ["'average'", '"mean"']),
        ("integers", ["'x'", "int32", "sum"]),
        ("dst", ["7"]),
        ("mask", ["no mask for leaf", "'layers.0.w'"]),
        ("flag", ["'b'", "expected True or False"]),
        ("rule", ["'w'", "matches no leaf"]),
        ("twice", ["both trees have leaf 'b'"]),
        ("plans", ["different plans"]),
        ("sizes", ["returned"]),
        ("mixed", ["float64", "float32", "bucket"]),
        ("buffers", ["whole units", "'u.b'", "units=['u.a']"]),
        ("typeof", ["int"]),
    ],
)
def test_all_ranks_refuse(run: Any, case: str, words: list[str]) -> None:
    for text in run(2, refusals, case, timeout=10):
        assert len(text) < 500
        for word in words:
            assert word in text, text

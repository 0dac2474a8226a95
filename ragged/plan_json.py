"""Plans as JSON: what a checkpoint keeps of the layout it was written from."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ragged.layout import Bounds, Bucket, LeafInfo, Request, Unit
from ragged.paths import first_difference, flatten, shaped
from ragged.plans import Plan
from ragged.spec import ELEMENT, ROW, TENSOR, Block, Granularity, P

__all__ = ["from_json", "to_json"]

_VERSION = 3
_NAMED = {g.name: g for g in (ELEMENT, ROW, TENSOR)}


def _spec_out(spec: P) -> dict[str, Any]:
    block = spec.block.name if isinstance(spec.block, Granularity) else spec.block
    return {"dims": spec.dims, "ragged": spec.ragged, "block": block, "shares": spec.shares}


def _spec_in(d: dict[str, Any]) -> P:
    raw = d["block"]
    block: Block = _NAMED[raw] if isinstance(raw, str) else tuple(raw) if isinstance(raw, list) else raw
    return P(*map(tuple, d["dims"]), ragged=tuple(d["ragged"]), block=block, shares=d["shares"])


def to_json(plan: Plan) -> str:
    """The whole layout; plans of equal layout, dtypes and price give equal texts."""
    layout = _layout(plan)
    return json.dumps({"version": _VERSION, "digest": _digest(layout), **layout}, indent=1)


def _digest(layout: Any) -> str:
    return hashlib.sha256(json.dumps(layout, sort_keys=True).encode()).hexdigest()


def _layout(plan: Plan) -> dict[str, Any]:
    return {
        "axes": list(plan.axes.items()),
        "align": plan.align,
        "price": plan.price,
        "units": [
            {
                "name": unit.name,
                "buckets": [
                    {
                        "name": b.name,
                        "dtype": str(b.dtype).removeprefix("torch."),
                        "ragged": b.ragged,
                        "even": b.even,
                        "ranks": b.bounds.ranks,
                        "shard": b.bounds.shard,
                        "bounds": b.bounds.explicit,
                        "frozen": b.frozen,
                        "leaves": [
                            {
                                "path": f.path,
                                "shape": f.shape,
                                "local_shape": f.local_shape,
                                "spec": _spec_out(f.spec),
                                "block": f.block,
                                "offset": f.offset,
                                "requests": f.requests,
                                "label": f.label,
                            }
                            for f in b.leaves
                        ],
                    }
                    for b in unit.buckets
                ],
            }
            for unit in plan.units
        ],
    }


def from_json(text: str, like: Any) -> Plan:
    """The plan, with the structure of `like` and unbound.

    The digest stands for the whole layout: a text that was cut short or changed is refused before it is read.
    """
    try:
        parsed = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no plan, but text that is not JSON: {error}") from None
    if not isinstance(parsed, dict) or not {"version", "digest", "units"} <= parsed.keys():
        raise ValueError("no plan: expected the JSON text of Plan.to_json, with a version, a digest and units")
    if parsed["version"] != _VERSION:
        raise ValueError(f"plan format version {parsed['version']!r}, this library reads {_VERSION}")
    data = {key: value for key, value in parsed.items() if key not in ("version", "digest")}
    if _digest(data) != parsed["digest"]:
        raise ValueError("the text of this plan was changed after it was written; make the plan anew, or use a copy")
    paths, leaves, structure = flatten(like)
    given = {p: shaped(p, x) for p, x in zip(paths, leaves, strict=True)}
    units: list[Unit] = []
    placed: dict[str, LeafInfo] = {}
    index = 0
    for u in data["units"]:
        buckets = []
        for b in u["buckets"]:
            bounds = Bounds(b["ranks"], b["shard"], tuple(b["bounds"]) if b["bounds"] else None)
            dtype = getattr(torch, b["dtype"])
            infos = tuple(
                LeafInfo(
                    f["path"],
                    tuple(f["shape"]),
                    tuple(f["local_shape"]),
                    dtype,
                    _spec_in(f["spec"]),
                    f["block"],
                    u["name"],
                    index,
                    f["offset"],
                    bounds,
                    tuple(Request(*request) for request in f["requests"]),
                    f["label"],
                )
                for f in b["leaves"]
            )
            placed |= {f.path: f for f in infos}
            ragged, even = tuple(b["ragged"]), tuple(b["even"])
            buckets.append(Bucket(index, b["name"], u["name"], dtype, ragged, even, bounds, infos, b["frozen"]))
            index += 1
        units.append(Unit(u["name"], tuple(buckets)))
    if path := first_difference(given, placed):
        raise ValueError(f"plan and tree differ at {path!r}: only {'tree' if path in given else 'plan'} has it")
    for path, leaf in placed.items():
        if given[path] != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"leaf {path!r} is {given[path].shape} {given[path].dtype}, the plan has {leaf.shape} {leaf.dtype}"
            )
    axes = dict(data["axes"])
    return Plan(axes, {p: placed[p] for p in paths}, tuple(units), data["align"], structure, price=data["price"])

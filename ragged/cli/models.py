"""MODEL on the command line: a built-in name, a config file, or safetensors files."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ragged.cli.builtin import BUILT_IN
from ragged.cli.families import Shapes, family
from ragged.cli.headers import Tensors, parse_json, read_header, read_index

__all__ = ["load_model", "parse_dtype"]

_DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "f16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "f32": torch.float32, "float32": torch.float32,
    "fp64": torch.float64, "f64": torch.float64, "float64": torch.float64,
}  # fmt: skip


def parse_dtype(text: str) -> torch.dtype:
    """A floating-point dtype by one of its usual names.

    Raises:
      ValueError: another name.

    Example:
      >>> parse_dtype("bf16")
      torch.bfloat16
    """
    if text.lower() not in _DTYPES:
        raise ValueError(f"unknown dtype {text!r}; known are {', '.join(_DTYPES)}")
    return _DTYPES[text.lower()]


def load_model(model: str, dtype: torch.dtype | None = None) -> Tensors:
    """Shape and dtype of each parameter of a model; weights are never read.

    Args:
      model: a built-in name, or the path of a `config.json`, a `*.safetensors` file or a
        `model.safetensors.index.json`.
      dtype: in place of the floating-point dtypes that a file gives; without it and without a file, bfloat16.

    Raises:
      ValueError: neither a name nor a file, or a file that describes no model, saying why.

    Example:
      >>> len(load_model("llama3-8b")), load_model("gpt2", torch.float32)["transformer.wpe.weight"]
      (291, ((1024, 768), torch.float32))
    """
    if model in BUILT_IN:
        return _uniform(BUILT_IN[model].shapes(), dtype or torch.bfloat16)
    path = Path(model)
    if path.is_dir():
        raise ValueError(f"{model} is a folder; give the config.json, *.safetensors or *.index.json file in it")
    if not path.is_file():
        raise ValueError(f"{model!r} is no file, and no built-in model; built in are {', '.join(sorted(BUILT_IN))}")
    if path.suffix == ".safetensors":
        return _read_tensors(read_header(path), dtype, model)
    try:
        content = parse_json(path.read_bytes(), model)
    except OSError as error:
        raise ValueError(f"cannot read {model}: {error.strerror}") from None
    if "weight_map" in content:
        return _read_tensors(read_index(path, content), dtype, model)
    if "model_type" in content:
        stated = content.get("dtype") or content.get("torch_dtype")
        return _uniform(family(content, model).shapes(), dtype or _stated(stated))
    raise ValueError(
        f"{model} has neither 'model_type', as a config.json, nor 'weight_map', as an index of safetensors"
    )


def _stated(name: object) -> torch.dtype:
    """The dtype of a config file; what training uses is for `--dtype` to say, so an unusual one is no error."""
    return _DTYPES.get(name.removeprefix("torch."), torch.bfloat16) if isinstance(name, str) else torch.bfloat16


def _uniform(shapes: Shapes, dtype: torch.dtype) -> Tensors:
    return {name: (shape, dtype) for name, shape in shapes.items()}


def _read_tensors(tensors: Tensors, dtype: torch.dtype | None, source: str) -> Tensors:
    if not tensors:
        raise ValueError(f"{source} holds no tensors")
    for name in tensors:
        # Such a name would be no path: its components are what patterns match.
        if not re.fullmatch(r"[^.]+(\.[^.]+)*", name):
            raise ValueError(f"{source}: the tensor name {name!r} has an empty component between its dots")
    if dtype is None:
        return tensors
    return {k: (shape, dtype if own.is_floating_point else own) for k, (shape, own) in tensors.items()}

"""Checkpoints: ordinary safetensors files with full tensors, written and read by all ranks, from and into any layout.

    checkpoint.save("runs/a/step-100", {"params": params, "opt": state, "step": 100}, keep=3)
    trees = checkpoint.load(checkpoint.latest("runs/a"), {"params": params, "opt": state, "step": 0})

A folder holds `params.safetensors`, `opt.safetensors`, ... (`<tree>-00001-of-00003.safetensors` and the usual index
where they are large) and `manifest.json` with values, checksums and plans. Nothing in it is code.
"""

from ragged.checkpoint.dcp import export_dcp, import_dcp
from ragged.checkpoint.loading import load
from ragged.checkpoint.manifest import Metadata, latest, metadata
from ragged.checkpoint.saving import Saving, save

__all__ = ["Metadata", "Saving", "export_dcp", "import_dcp", "latest", "load", "metadata", "save"]

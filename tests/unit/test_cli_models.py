"""Built-in models and config files: shapes against known layers, counts against published ones."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ragged.cli.builtin import BUILT_IN
from ragged.cli.families import FAMILIES, Shapes, family
from ragged.cli.models import load_model, parse_dtype

KNOWN = json.loads((Path(__file__).parents[1] / "data" / "planner" / "models.json").read_text())

PUBLISHED = {
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "seed-oss-36b": 36_151_104_512,
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
MOE = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3-8b": LLAMA,
    "mistral-7b": LLAMA | {"model_type": "mistral", "vocab_size": 32000, "head_dim": None},
    "qwen2-7b": LLAMA
    | {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "qwen3-8b": LLAMA
    | {
        "model_type": "qwen3",
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": 151936,
        "head_dim": 128,
        "attention_bias": False,
    },
    "seed-oss-36b": LLAMA
    | {
        "model_type": "seed_oss",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "vocab_size": 155136,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
    },
    "qwen3-30b-a3b": LLAMA
    | {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 32000},
    "gpt-oss-20b": LLAMA
    | {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "head_dim": 64,
        "attention_bias": True,
        "vocab_size": 201088,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_inner": None,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
}


def within(shapes: Shapes, prefix: str) -> Counter[tuple[int, ...]]:
    return Counter(shape for name, shape in shapes.items() if name.startswith(prefix))


def known(model: str, unit: str) -> Counter[tuple[int, ...]]:
    return Counter(tuple(shape) for _, shape in KNOWN[model][unit]["leaves"])


@pytest.mark.parametrize("name", BUILT_IN)
def test_published_counts(name: str) -> None:
    assert sum(map(math.prod, BUILT_IN[name].shapes().values())) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "model", "layers"),
    [
        ("llama3-70b", "llama3_70b", {"layer": range(80)}),
        ("seed-oss-36b", "seedoss_36b", {"layer": range(64)}),
        ("gpt-oss-120b", "gptoss_120b", {"layer_hf": range(36)}),
        ("qwen3-30b-a3b", "qwen3_30b_a3b", {"moe": range(48)}),
        ("deepseek-v3", "dsv3_671b", {"dense": range(3), "moe": range(3, 61)}),
    ],
)
def test_shapes_of_known_layers(name: str, model: str, layers: dict[str, range]) -> None:
    shapes = BUILT_IN[name].shapes()
    for unit, numbers in layers.items():
        assert len(numbers) == KNOWN[model][unit]["count"]
        for i in (numbers[0], numbers[-1]):
            assert within(shapes, f"model.layers.{i}.") == known(model, unit)
    assert within(shapes, "model.embed_tokens.") == known(model, "embed")
    assert within(shapes, "model.norm.") + within(shapes, "lm_head.") == known(model, "head")


@pytest.mark.parametrize("name", CONFIGS)
def test_config_files_give_the_built_in_models(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert load_model(str(path), torch.bfloat16) == load_model(name)


def test_every_family_has_a_config_here() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


def test_dtypes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for entry, dtype in (("float16", torch.float16), ("float8", torch.bfloat16), (None, torch.bfloat16)):
        path.write_text(json.dumps(LLAMA | {"torch_dtype": entry}))
        assert {found for _, found in load_model(str(path)).values()} == {dtype}
    assert {found for _, found in load_model(str(path), parse_dtype("FP32")).values()} == {torch.float32}
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        parse_dtype("int8")


def test_variants_of_the_families() -> None:
    tied = family(LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}).shapes()
    assert "lm_head.weight" not in tied
    assert tied["model.layers.0.self_attn.o_proj.bias"] == (4096,)
    assert tied["model.layers.0.mlp.up_proj.bias"] == (14336,)
    alone = family({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).shapes()
    assert alone["model.layers.0.self_attn.k_proj.weight"] == (4096, 4096)
    untied = family(CONFIGS["gpt2"] | {"tie_word_embeddings": False}).shapes()
    assert untied["lm_head.weight"] == (50257, 768)
    full_queries = family(CONFIGS["deepseek-v3"] | {"q_lora_rank": None, "n_shared_experts": None}).shapes()
    assert full_queries["model.layers.0.self_attn.q_proj.weight"] == (24576, 7168)
    assert not any("q_a_" in name or "shared" in name for name in full_queries)


def test_some_layers_of_a_routed_model_are_dense() -> None:
    sizes = {"num_experts": 2, "moe_intermediate_size": 8, "intermediate_size": 32, "head_dim": 16}
    config = {"model_type": "qwen3_moe", **MOE, **sizes, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    routed = {name.split(".")[2] for name in family(config).shapes() if "experts" in name}
    assert routed == {"1"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "'bert' is not one of deepseek_v3, gpt2, .*safetensors"),
        ({"model_type": None}, "None is not one of"),
        ({"hidden_size": None}, "has no 'hidden_size', which its 'model_type' needs"),
        ({"hidden_size": "4096"}, "'hidden_size' is '4096', expected a whole number of at least 1"),
        ({"hidden_size": 0}, "'hidden_size' is 0"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"num_attention_heads": 33}, "33 does not divide 'hidden_size' = 4096"),
        ({"num_hidden_layers": 10**9}, "more than 1,000,000 parts"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1, expected true or false"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family(LLAMA | change)


def test_neither_name_nor_file(tmp_path: Path) -> None:
    for name, content, message in [
        ("nothing", None, "no file, and no built-in model; built in are deepseek-v3, "),
        ("config.json", b"{", "is no JSON"),
        ("list.json", b"[]", "holds a JSON list, expected an object"),
        ("deep.json", b"[" * 100_000, "is no JSON"),
        ("bytes.json", b"\xff\xfe\x00", "is no JSON"),
        ("other.json", b"{}", "neither 'model_type', as a config.json, nor 'weight_map'"),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_model(str(path))
    with pytest.raises(ValueError, match="is a folder"):
        load_model(str(tmp_path))

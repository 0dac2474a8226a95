"""Well-known models by name: their figures, as published in their config files."""

from __future__ import annotations

from collections.abc import Mapping

from ragged.cli.families import Attention, DeepseekV3, Dense, Family, Gpt2, GptOss, Mixtral, Qwen3Moe

__all__ = ["BUILT_IN"]

BUILT_IN: Mapping[str, Family] = {
    "deepseek-v3": DeepseekV3(
        hidden=7168,
        intermediate=18432,
        expert_intermediate=2048,
        experts=256,
        shared_experts=1,
        layers=61,
        dense_layers=3,
        heads=128,
        q_rank=1536,
        kv_rank=512,
        rope_dim=64,
        nope_dim=128,
        v_dim=128,
        vocab=129280,
    ),
    "gpt-oss-20b": GptOss(Attention(2880, 64, 8, 64, True, True), 2880, experts=32, layers=24, vocab=201088),
    "gpt-oss-120b": GptOss(Attention(2880, 64, 8, 64, True, True), 2880, experts=128, layers=36, vocab=201088),
    "gpt2": Gpt2(768, 3072, layers=12, vocab=50257, positions=1024),
    "gpt2-xl": Gpt2(1600, 6400, layers=48, vocab=50257, positions=1024),
    "llama3-8b": Dense(Attention(4096, 32, 8, 128), 14336, layers=32, vocab=128256),
    "llama3-70b": Dense(Attention(8192, 64, 8, 128), 28672, layers=80, vocab=128256),
    "llama3-405b": Dense(Attention(16384, 128, 8, 128), 53248, layers=126, vocab=128256),
    "mistral-7b": Dense(Attention(4096, 32, 8, 128), 14336, layers=32, vocab=32000),
    "mixtral-8x7b": Mixtral(Attention(4096, 32, 8, 128), 14336, experts=8, layers=32, vocab=32000),
    "qwen2-7b": Dense(Attention(3584, 28, 4, 128, qkv_bias=True), 18944, layers=28, vocab=152064),
    "qwen3-8b": Dense(Attention(4096, 32, 8, 128, qk_norm=True), 12288, layers=36, vocab=151936),
    "qwen3-30b-a3b": Qwen3Moe(
        Attention(2048, 32, 4, 128, qk_norm=True), 6144, 768, experts=128, layers=48, vocab=151936
    ),
    "seed-oss-36b": Dense(Attention(5120, 80, 8, 128, qkv_bias=True), 27648, layers=64, vocab=155136),
}

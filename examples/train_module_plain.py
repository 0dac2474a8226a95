"""Train Hugging Face's Llama on the source text of Python's standard library, in one process and plain torch.

    python examples/train_module_plain.py

`train_module.py` is the same script for any number of processes: compare them.
"""

from __future__ import annotations

import argparse

import torch
from train_gpt import batch, read_text
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (%(default)s)")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.context,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)

    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    text, losses = read_text(), []
    for step in range(args.steps):
        tokens = batch(text, (0, "train"), step, args.batch, args.context + 1, (0, 1))
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step:5}  loss {losses[-1]:.4f}  norm {norm:.3f}", flush=True)

    torch.save(model.state_dict(), "train_module.pt")
    return losses


if __name__ == "__main__":
    main()

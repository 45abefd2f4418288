"""Fine-tuning of a small GPT-2 of Hugging Face's transformers. It begins with random weights, so nothing is downloaded.

    python examples/finetune.py                                     one process
    easymp launch --processes 2 examples/finetune.py                two
    EASYMP_STRATEGY=fsdp easymp launch --processes 2 examples/finetune.py

`GPT2LMHeadModel.from_pretrained(folder)` in place of `GPT2LMHeadModel(config)` begins from weights that are on disk.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from easymp import Accelerator

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--folder", help="for checkpoints, and the model as from_pretrained reads it")
    args = parser.parse_args()

    acc = Accelerator(seed=0, project_dir=args.folder, log_with="jsonl" if args.folder else "none")
    text = Path(torch.__file__).read_text(encoding="utf-8")  # Python source that lies on every machine
    tokens = torch.tensor([min(ord(letter), 127) for letter in text])
    sequences = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    config = GPT2Config(vocab_size=128, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(sequences, batch_size=16, shuffle=True)
    model, optimizer, loader = acc.prepare(model, optimizer, loader)
    acc.print(acc)
    if args.folder:
        acc.print("resumed from", acc.resume())

    for _ in acc.epochs(1 + args.updates // len(loader)):
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            acc.log({"loss": loss})
            if acc.updates % 20 == 0:
                acc.print(f"update {acc.updates}: loss {acc.mean(loss.detach()).item():.3f}")
                if args.folder:
                    acc.save_state()
            if acc.updates >= args.updates:
                break
    if args.folder:
        weights = f"{args.folder}/weights"
        acc.save_model(model, weights)
        if acc.is_main_process:
            config.save_pretrained(weights)
    acc.end_training()


if __name__ == "__main__":
    main()

"""Pretrain from raw text: JSON lines become rows of one length, tokenized on the workers, without a pass before the first step."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import feedline.torch as fl
from small_data import folder, json_lines, model, sums

texts = [" ".join(message["content"] for message in row["messages"]) for row in sums(2000)]
DATA = json_lines([{"text": text} for text in texts])  # yours: corpus-*.jsonl, .jsonl.zst or Parquet with `text`
FOLDER = model(texts)  # yours: a model's folder, or its tokenizer.json
PLACE, LENGTH = folder(), 256  # yours: a folder on a local disk, 4096

# Which texts share a row is planned by their bytes: `estimated`. Tokens past the end of a row are cut.
packed = {"tokens": LENGTH, "bins": PLACE / "corpus.bins", "longer": "cut", "estimated": True}
settings = {"tokenizer": FOLDER, "max_length": LENGTH, "truncation": "right", "batch_size": 8, "shuffle": 42}
loader = fl.jsonl(DATA, packed=packed, **settings)

config = LlamaConfig(vocab_size=400, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(1)
network = LlamaForCausalLM(config).to(loader.device)
optimizer = torch.optim.AdamW(network.parameters(), 3e-3)

losses, tokens = [], 0
for batch in loader:
    ids, positions = batch["input_ids"].long(), batch["positions"]  # [8, 256]; a text begins at position 0
    labels = torch.where(positions > 0, ids, -100)  # no target crosses a text, none is padding
    loss = network(input_ids=ids, position_ids=positions.long(), labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    tokens += (batch["documents"] >= 0).sum().item()  # -1 is padding
places = len(loader) * 8 * LENGTH
print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after; {tokens} tokens, rows are {tokens / places:.1%} full")
assert losses[-1] < 0.7 * losses[0] and tokens > 0.8 * places

# Exact rows need the lengths in tokens: one pass over the texts, kept in a file.
exact = fl.jsonl(DATA, packed={"tokens": LENGTH, "bins": PLACE / "exact.bins"}, lengths_file=PLACE / "corpus.lengths", **settings)
whole = sum((batch["documents"] >= 0).sum().item() for batch in exact)
assert whole >= tokens

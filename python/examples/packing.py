"""Pack whole documents into rows of one length for pretraining, by best fit, without a token lost."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import feedline.torch as fl
from small_data import folder

PLACE, LENGTH, END = folder(), 256, 50256  # yours: a folder on a local disk, 4096, your tokenizer's end of text

# Yours: `ids = [tokenizer.encode(text) + [END] for text in texts]`.
draw = np.random.default_rng(1)
ids = [[*draw.integers(0, 50000, draw.integers(5, 400)).tolist(), END] for _ in range(500)]
pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.int32()))}), PLACE / "corpus.parquet")

packed = {
    "tokens": LENGTH,
    "bins": PLACE / "corpus.bins",  # the plan: which documents share a row; it is made once
    "copy": PLACE / "corpus.copy",  # the tokens, side by side; made once, before a job of many ranks
    "longer": "split",  # documents that are longer than a row
}
loader = fl.parquet(PLACE / "corpus.parquet", packed=packed, batch_size=8, shuffle=42)

tokens = documents = 0
for batch in loader:
    row, positions = batch["ids"].long(), batch["positions"]  # [8, 256]; a document begins at position 0
    labels = torch.where(positions > 0, row, -100)  # for models that shift them: no target crosses a document
    ends = fl.cu_seqlens(batch)  # for varlen attention: no token sees another document
    assert labels.shape == row.shape and ends[-1] == row.numel()
    tokens += (batch["documents"] >= 0).sum().item()  # -1 is padding
    documents += (row == END).sum().item()

places = len(loader) * 8 * LENGTH
print(f"{tokens} tokens of {documents} documents, rows are {tokens / places:.1%} full")
assert tokens >= sum(map(len, ids)) and documents >= len(ids) and tokens > 0.9 * places

"""Train a classifier on embeddings in Parquet: columns of numbers and lists, shuffled by row groups."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import feedline.torch as fl
from small_data import folder

ROWS, WIDTH, CLASSES = 4096, 64, 4
DATA = folder() / "embeddings.parquet"  # yours: "s3://bucket/part-*.parquet"

# Yours: leave this out. Rows of four clusters.
draw = np.random.default_rng(1)
label = draw.integers(0, CLASSES, ROWS)
points = (draw.normal(size=(CLASSES, WIDTH))[label] + draw.normal(size=(ROWS, WIDTH))).astype(np.float32)
embedding = pa.FixedSizeListArray.from_arrays(points.ravel(), WIDTH)
pq.write_table(pa.table({"embedding": embedding, "label": label}), DATA, row_group_size=512)

# Shuffles the rows of 4 row groups at a time.
loader = fl.parquet(DATA, columns=["embedding", "label"], batch_size=128, shuffle=42, window=4)

model = torch.nn.Linear(WIDTH, CLASSES).to(loader.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for epoch in range(3):
    right = rows = 0
    for embeddings, labels in loader:  # f32 [128, 64] and i64 [128], in the order of `columns`
        logits = model(embeddings)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        right += (logits.argmax(1) == labels).sum().item()
        rows += len(labels)
    print(f"epoch {epoch}: {right / rows:.1%} right")

assert rows == ROWS and right > 0.95 * rows

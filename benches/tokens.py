"""Tokenizing while loading: feedline against `tokenizers` in a DataLoader with 2 workers, and against `datasets.map(num_proc=2)`.

    pip install ./python torch tokenizers datasets
    python benches/tokens.py TOKENIZER.json LINES.jsonl [--pairs 7]

LINES has an object with "text" a line. All three hand out padded `input_ids`, from the page cache, on 2 cores (taskset -c 0,1). The programs run in
turn; a figure is millions of tokens a second, each run in a process of its own with its imports; then the median of the ratios of pairs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

MAX, ROWS = 1024, 64


def feedline_rows(tokenizer, path):
    import feedline.torch as fl

    loader = fl.jsonl(path, tokenizer=tokenizer, max_length=MAX, truncation="right", batch_size=ROWS, workers=2, device="cpu", shard=None)
    for batch in loader:
        yield int(batch["input_ids.lens"].sum())


def dataloader_rows(tokenizer, path):
    import torch
    from tokenizers import Tokenizer
    from torch.utils.data import DataLoader, Dataset

    class Lines(Dataset):
        """Lines by their starts, as torchtitan and others index them."""

        def __init__(self):
            with open(path, "rb") as file:
                lens = [len(line) for line in file]
            self.starts = [0]
            for length in lens:
                self.starts.append(self.starts[-1] + length)
            self.file = None

        def __len__(self):
            return len(self.starts) - 1

        def __getitem__(self, index):
            if self.file is None:
                self.file = open(path, "rb")
                self.tokenizer = Tokenizer.from_file(tokenizer)
                self.tokenizer.enable_truncation(MAX)
            self.file.seek(self.starts[index])
            text = json.loads(self.file.read(self.starts[index + 1] - self.starts[index]))["text"]
            return torch.tensor(self.tokenizer.encode(text).ids, dtype=torch.int32)

    def collate(rows):
        lens = torch.tensor([len(row) for row in rows])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), lens

    for _, lens in DataLoader(Lines(), batch_size=ROWS, num_workers=2, collate_fn=collate):
        yield int(lens.sum())


def datasets_rows(tokenizer, path):
    """The pass that writes ids, and the reading of them."""
    import torch
    from datasets import load_dataset
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(tokenizer)
    own.enable_truncation(MAX)

    def encode(batch):
        return {"input_ids": [row.ids for row in own.encode_batch(batch["text"])]}

    with tempfile.TemporaryDirectory() as cache:
        rows = load_dataset("json", data_files=path, split="train", cache_dir=cache)
        rows = rows.map(encode, batched=True, num_proc=2, remove_columns=rows.column_names).with_format("torch")
        for batch in rows.iter(ROWS):
            padded = torch.nn.utils.rnn.pad_sequence(list(batch["input_ids"]), batch_first=True)
            yield sum(len(row) for row in batch["input_ids"]) + 0 * len(padded)


WAYS = {"feedline": feedline_rows, "DataLoader": dataloader_rows, "datasets.map": datasets_rows}


def one(way, tokenizer, path):
    """Tokens and seconds of a pass, imports and opening included."""
    started = time.perf_counter()
    tokens = sum(WAYS[way](tokenizer, path))
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - started}))


def main():
    given = argparse.ArgumentParser()
    given.add_argument("tokenizer")
    given.add_argument("lines")
    given.add_argument("--pairs", type=int, default=7)
    given.add_argument("--way", choices=WAYS)
    given = given.parse_args()
    if given.way:
        return one(given.way, given.tokenizer, given.lines)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rates = {way: [] for way in WAYS}
    for _ in range(given.pairs):
        tokens = set()
        for way in WAYS:
            run = [sys.executable, __file__, given.tokenizer, given.lines, "--way", way]
            found = json.loads(subprocess.run(run, capture_output=True, check=True).stdout.splitlines()[-1])
            tokens.add(found["tokens"])
            rates[way].append(found["tokens"] / found["seconds"] / 1e6)
        assert len(tokens) == 1, f"the ways differ in tokens: {tokens}"
    for way, all in rates.items():
        ratio = statistics.median(ours / other for ours, other in zip(rates["feedline"], all))
        print(f"{way}: {statistics.median(all):.2f} million tokens/s; feedline is {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()

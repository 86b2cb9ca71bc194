"""Compares `prepare tokens` with Megatron's preprocess_data.py: the bytes of both files, and the time.

    cargo build --release --features tokenizers --example prepare
    python benches/token_files.py target/release/examples/prepare tokenizer.json corpus.jsonl --pairs 5

Megatron's way is that of its tools/preprocess_data.py, which the wheel lacks: `json.loads`, a tokenizer in a pool of processes,
`imap` by 32 lines, `IndexedDatasetBuilder`. Two tokenizers: transformers' as Megatron wraps it (`--way megatron`), and the crate
tokenizers by its Python package, which is faster (`--way tokenizers`). Needs megatron-core, transformers, tokenizers.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
TOKENIZE = None


def begin(way: str, path: str) -> None:
    global TOKENIZE
    if way == "tokenizers":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
        TOKENIZE = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    else:
        from transformers import PreTrainedTokenizerFast

        # As HuggingFaceTokenizer.text_to_ids of megatron.core.
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
        TOKENIZE = lambda text: tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))


def encode(line: str) -> list[int]:
    return TOKENIZE(json.loads(line)["text"])


def preprocess(way: str, workers: int, tokenizer: str, corpus: str, end: int, size: int, to: pathlib.Path) -> None:
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(to / "tokens.bin"), dtype=DType.optimal_dtype(size))
    with open(corpus, encoding="utf-8") as lines, multiprocessing.Pool(workers, begin, (way, tokenizer)) as pool:
        for ids in pool.imap(encode, lines, 32):
            if ids:
                ids.append(end)
            builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(str(to / "tokens.idx"))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program")
    arguments.add_argument("tokenizer")
    arguments.add_argument("corpus")
    arguments.add_argument("--end", default="<|endoftext|>")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--way", choices=["megatron", "tokenizers"], default="megatron")
    arguments.add_argument("--pairs", type=int, default=1)
    arguments.add_argument("--tasks", type=int, help="also by a plan of so many tasks")
    args = arguments.parse_args()
    from megatron.core.datasets import indexed_dataset  # noqa: F401  before the clock runs
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(args.tokenizer)
    end, size = tokenizer.token_to_id(args.end), tokenizer.get_vocab_size(with_added_tokens=True)
    ratios = []
    for pair in range(args.pairs):
        folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))
        ours, theirs = folder / "ours", folder / "theirs"
        theirs.mkdir()
        begun = time.perf_counter()
        command = [args.program, "tokens", args.corpus, str(ours), "--tokenizer", args.tokenizer, "--append-eod", args.end]
        subprocess.run([*command, "--workers", str(args.workers)], check=True, stdout=subprocess.DEVNULL)
        own = time.perf_counter() - begun
        begun = time.perf_counter()
        preprocess(args.way, args.workers, args.tokenizer, args.corpus, end, size, theirs)
        other = time.perf_counter() - begun
        written = [ours]
        if args.tasks:
            plan = folder / "plan"
            planned = [str(plan) if word == str(ours) else word for word in command]
            subprocess.run([*planned, "--tasks", str(args.tasks)], check=True, stdout=subprocess.DEVNULL)
            for verb in (["run", str(plan), "--part", "1/2", "--workers", "1"], ["run", str(plan)], ["finish", str(plan)]):
                subprocess.run([args.program, *verb], check=True, stdout=subprocess.DEVNULL)
            written.append(plan)
        for name in ("tokens.bin", "tokens.idx"):
            right = (theirs / name).read_bytes()
            for folder_of in written:
                assert (folder_of / name).read_bytes() == right, f"{folder_of / name} differs from Megatron's"
        ratios.append(other / own)
        print(f"pair {pair}: prepare {own:.2f} s, Megatron's way {other:.2f} s, {other / own:.2f} x; same bytes", flush=True)
        shutil.rmtree(folder)
    print(f"median {statistics.median(ratios):.2f} x of {args.pairs}")


if __name__ == "__main__":
    main()

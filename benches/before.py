"""`profile --before` against the run that follows: the rate and the limit of both, in situations of format, storage and step.

    cargo build --release --features parquet,remote --example profile
    python benches/before.py FOLDER [--only WORD]

FOLDER gets some 600 MB of data. Run it on an idle machine.
"""

import argparse
import json
import pathlib
import subprocess

from store import served
from verdicts import FED, PROFILE, make_texts


def situations(folder, slow, narrow):
    """Name and arguments."""
    made = lambda source, *more: ["--source", source, "--generate", f"{folder}/{source}", "--generate-mib", "192", *more]
    images = made("images", "--batch", "16")
    record = ["--record-bytes", "150528", "--batch", "16"]
    records = made("records", *record)
    disk = [*records, "--direct", "on", "--cold"]
    far = lambda store: ["--source", "records", "--path", f"{store}/records/data/{{00000000..00000001}}.bin", *record]
    texts = ["--source", "tar", "--path", f"{folder}/texts.tar", "--columns", "json,txt", "--batch", "64", "--workers", "1"]
    return [
        ("pictures, 1 worker", [*images, "--workers", "1"]),
        ("pictures, 2 workers", [*images, "--workers", "2"]),
        ("pictures, step of 4 ms", [*images, "--step-ms", "4"]),
        ("pictures, step of 100 ms", [*images, "--step-ms", "100"]),
        ("pictures from the disk, shuffled", [*images, "--cold", "--shuffle", "1"]),
        ("records in memory", [*records, "--in-memory"]),
        ("records from the page cache", records),
        ("records from the page cache, step of 20 ms", [*records, "--step-ms", "20"]),
        ("records from the disk", disk),
        ("records from the disk, step of 3 ms", [*disk, "--step-ms", "3"]),
        ("records from the disk, 1 read at a time", [*disk, "--depth", "1"]),
        ("records from the disk, pread", [*disk, "--reader", "pread"]),
        ("tokens, shuffled", made("tokens", "--batch", "64", "--shuffle", "1")),
        ("tar, 1 worker", made("tar", "--batch", "16", "--workers", "1")),
        ("tar, 2 workers, step of 10 ms", made("tar", "--batch", "16", "--step-ms", "10")),
        ("TFRecord", made("tfrecord", "--batch", "16")),
        ("Parquet", made("parquet", "--batch", "256")),
        ("texts of tar members, 1 worker", texts),
        ("a store, 20 ms for each answer", far(slow)),
        ("a store, 40 MB/s", far(narrow)),
        ("a store, 40 MB/s, step of 150 ms", [*far(narrow), "--step-ms", "150"]),
    ]


def asked(*words):
    return json.loads(subprocess.run([PROFILE, *words, "--json"], stdout=subprocess.PIPE, check=True).stdout)


def same(estimated, answer):
    causes = {answer["cause"], answer["also"]}
    return estimated in causes or (estimated in FED and bool(causes & FED))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_texts(args.folder / "texts.tar")
    close = right = count = 0
    with served(args.folder, ms=20) as slow, served(args.folder, mb_per_s=40) as narrow:
        for name, words in situations(args.folder, slow, narrow):
            if args.only not in name:
                continue
            if "--generate" in words:
                asked(*words, "--epochs", "1")
            estimate, answer = asked(*words, "--before"), asked(*words, "--seconds", "8")
            ratio = estimate["items_per_s"] / answer["items_per_s"]
            count, close = count + 1, close + (0.8 <= ratio <= 1.2)
            right += same(estimate["bound_by"], answer)
            rates = f"{estimate['items_per_s']:.0f} of {answer['items_per_s']:.0f} samples/s, {ratio:.2f}"
            print(f"{name}: {rates}; {estimate['bound_by']}, then {answer['cause']} {answer['also'] or ''}", flush=True)
    print(f"{count} situations: the rate within 20 % in {close}, the limit right in {right}")


if __name__ == "__main__":
    main()

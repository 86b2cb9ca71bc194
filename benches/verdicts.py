"""The verdict of `profile` on real runs whose limit is known: how often it names it, and says nothing absurd beside it.

    cargo build --release --features parquet --example profile
    python benches/verdicts.py FOLDER [--runs 20] [--only WORD]

FOLDER gets some 400 MB of data. Programs that burn cores run beside some of the situations. A CPU quota needs a control
group, so root; without it that situation is left out by name. On a busy machine other programs are the right answer
everywhere, so run it on an idle one.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile

PROFILE = pathlib.Path(__file__).parent.parent / "target/release/examples/profile"
GROUP = pathlib.Path("/sys/fs/cgroup/cpu/feedline-verdicts")
# The limits of a loop without work of its own, where bytes come from memory.
LOADER = {"decode", "page_cache", "order", "hand_over", "memory_budget"}
FED = {"not_starved", "consumer"}
CROWDED = {"other_programs", "local_ranks"}


def situations(folder):
    """Name, arguments, programs beside it, what may be the cause."""
    made = lambda source, *more: ["--source", source, "--generate", f"{folder}/{source}", "--generate-mib", "96", *more]
    images = made("images", "--batch", "16")
    records = made("records", "--record-bytes", "150528", "--batch", "16")
    tokens = made("tokens", "--batch", "8", "--shuffle", "1")
    texts = ["--source", "tar", "--path", f"{folder}/texts.tar", "--columns", "json,txt", "--batch", "64", "--workers", "1"]
    return [
        ("pictures, no step", [*images, "--step-ms", "0"], 0, {"decode"}),
        ("pictures, step of 2 ms", [*images, "--step-ms", "2"], 0, {"decode"}),
        ("pictures, step of 200 ms", [*images, "--step-ms", "200"], 0, FED),
        ("records in memory, no step", [*records, "--step-ms", "0", "--in-memory"], 0, LOADER),
        ("records by pread from the page cache, no step", [*records, "--step-ms", "0", "--reader", "pread", "--direct", "off"], 0, LOADER),
        ("records from the disk, no step", [*records, "--step-ms", "0", "--direct", "on", "--cold"], 0, {"storage"}),
        ("tokens, no step", [*tokens, "--step-ms", "0"], 0, LOADER),
        ("Parquet, no step", [*made("parquet"), "--step-ms", "0"], 0, LOADER),
        ("texts of tar members, one worker, no step", [*texts, "--step-ms", "0"], 0, LOADER),
        ("pictures, step of 10 ms, four programs", [*images, "--step-ms", "10"], 4, CROWDED),
        ("records, step of 0.2 ms, four programs", [*records, "--step-ms", "0.2"], 4, CROWDED),
        ("tokens, no step, four programs", [*tokens, "--step-ms", "0"], 4, CROWDED),
        ("pictures, step of 2 ms, half a core of quota", [*images, "--step-ms", "2"], 0, {"cpu_quota"}),
    ]


def make_texts(path):
    with tarfile.open(path, "w") as tar:
        for i in range(20_000):
            for ending, content in (("json", b'{"a": %d}' % i), ("txt", b"hello world %d" % i)):
                member = tarfile.TarInfo(f"{i:06}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@contextlib.contextmanager
def beside(count, code="while True: pass"):
    programs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def join_group():
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def absurd(name, answer):
    """Words that this situation refutes."""
    advice = " ".join(advice["text"] for advice in answer["advice"])
    found = ["advice on pictures"] * ("pictures" not in name and "pictures" in advice)
    found += ["cores needed without a step"] * ("no step" in name and re.search(r"needs [\d.]+ cores", advice) is not None)
    found += ["slots for a lack of cores"] * ("programs" in name and "slots" in advice)
    return found + ["memory called storage"] * ("disk" not in name and answer["cause"] == "storage")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_texts(args.folder / "texts.tar")
    for name, words, programs, causes in situations(args.folder):
        group = join_group if "quota" in name else None
        if args.only not in name:
            continue
        if group:
            try:
                GROUP.mkdir(exist_ok=True)
                (GROUP / "cpu.cfs_period_us").write_text("100000")
                (GROUP / "cpu.cfs_quota_us").write_text("50000")
            except OSError as error:
                print(f"{name}: left out: {error}")
                continue
        answers = []
        with beside(programs):
            for _ in range(args.runs):
                command = [PROFILE, *words, "--seconds", "1.5", "--json"]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, preexec_fn=group)
                answers.append(json.loads(done.stdout))
        right = sum(answer["cause"] in causes for answer in answers)
        wrong = sorted({answer["cause"] for answer in answers} - causes)
        silly = sorted({word for answer in answers for word in absurd(name, answer)})
        print(f"{name}: {right} of {args.runs} right {' '.join(wrong)} {'; '.join(silly)}".rstrip(), flush=True)


if __name__ == "__main__":
    main()

"""The first advice of a verdict, followed: rates before and after it, in situations of which each lacks something.

    cargo build --release --features parquet,remote --example profile
    python benches/advice.py FOLDER [--only WORD]

FOLDER gets some 600 MB of data. Run it on an idle machine, as root where disk and quota are to be limited (control groups of
version 1), and with the Python package of this tree for `map_batch` and ranks; a situation without its means is left out by name.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

from store import served
from verdicts import PROFILE, beside

HERE = pathlib.Path(__file__).parent
GROUPS = pathlib.Path("/sys/fs/cgroup")
RANKS = HERE.parent / "python/tests/loops/across.py"
LOOP = '''
import json, sys, time
import numpy, feedline.numpy as fl
def work(batch):
    {body}
loader = fl.records(sys.argv[1], record_bytes=4096, batch_size=64, workers={workers}, map_batch=work)
ends = time.monotonic() + 4
done = 0
while time.monotonic() < ends:
    for batch in loader:
        done += 64
        if time.monotonic() > ends: break
print(json.dumps({{"items_per_s": done / 4, **{{k: loader.verdict()[k] for k in ("cause", "advice")}}}}))
'''


@contextlib.contextmanager
def group(controller, name, value):
    """What joins a control group with this limit."""
    place = GROUPS / controller / "feedline-advice"
    place.mkdir(exist_ok=True)
    (place / name).write_text(value)
    try:
        yield lambda: (place / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        place.rmdir()


def asked(*words, seconds="4", **more):
    command = [PROFILE, *map(str, words), "--seconds", seconds, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, **more).stdout)


def looped(file, body, workers):
    code = LOOP.format(body=body, workers=workers)
    return json.loads(subprocess.run([sys.executable, "-c", code, file], stdout=subprocess.PIPE, check=True).stdout)


def given(words, advice):
    """The words with the setting of an advice."""
    assert advice["setting"] and advice["value"] is not None, advice
    words, name = list(words), advice["setting"]
    if name in words:
        place = words.index(name)
        del words[place : place + 2]
    return [*words, name, str(advice["value"])]


class Situations:
    """Each method gives the answer before, and a function of the first advice that gives the one after it."""

    def __init__(self, folder):
        self.folder = folder
        made = lambda source, *more: ["--source", source, "--generate", f"{folder}/{source}", "--generate-mib", "192", *more]
        self.images = made("images", "--batch", "16")
        self.records = made("records", "--record-bytes", "150528", "--batch", "16")
        for words in (self.images, self.records):
            asked(*words, seconds="0.1")
        self.file = str(folder / "tiny.bin")
        (folder / "tiny.bin").write_bytes(os.urandom(64 << 20))

    def disk_with_10_mb_per_s(self):
        number = os.stat(self.folder).st_dev
        limit = f"{os.major(number)}:{os.minor(number)} 10000000"
        with group("blkio", "blkio.throttle.read_bps_device", limit) as join:
            words = [*self.records, "--direct", "on", "--cold"]
            return asked(*words, preexec_fn=join), "storage", lambda _: asked(*words)

    def cold_page_cache(self):
        words = [*self.records, "--direct", "off", "--batches", "80"]
        run = lambda *more: json.loads(subprocess.run([PROFILE, *words, *more, "--json"], stdout=subprocess.PIPE, check=True).stdout)
        # The page cache, or a setting for the cold one.
        after = lambda advice: run() if advice["value"] is None else run(*given(["--cold"], advice))
        return run("--cold"), ("storage", "depth", "slots"), after

    def one_worker(self):
        words = [*self.images, "--workers", "1"]
        return asked(*words), "workers", lambda advice: asked(*given(words, advice))

    def a_store_20_ms_away(self):
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        with served(self.folder, ms=20, mb_per_s=60) as store:
            words = ["--source", "records", "--path", f"{store}/records/data/{{00000000..00000001}}.bin", *self.records[6:]]
            before = asked(*words)

            def after(_):
                with served(self.folder, ms=20, mb_per_s=60) as store:
                    cached = [*words, "--cache", self.folder / "cache"]
                    cached[3] = cached[3].replace(words[3].split("/")[2], store.split("/")[2])
                    asked(*cached)
                    return asked(*cached)

            return before, "cache", after

    def small_files(self):
        source = self.folder / "small"
        if not source.exists():
            (source / "a").mkdir(parents=True)
            for number in range(20_000):
                (source / f"a/{number:06}.bin").write_bytes(os.urandom(2048))
        words = ["--batch", "256", "--workers", "2", "--cold"]
        files = ["--source", "records", "--path", source / "a", "--record-bytes", "2048", "--direct", "on"]

        def after(_):
            packed = self.folder / "packed.bin"
            packed.write_bytes(b"".join(path.read_bytes() for path in sorted((source / "a").iterdir())))
            return asked("--source", "records", "--path", packed, "--record-bytes", "2048", "--direct", "on", *words)

        return asked(*files, *words), ("pack", "storage"), after

    def a_small_memory_budget(self):
        words = [*self.records, "--slots", "1", "--direct", "on", "--cold"]
        return asked(*words), ("slots", "memory_budget"), lambda advice: asked(*given(words, advice))

    def consumer_of_50_ms(self):
        return asked(*self.images, "--step-ms", "50"), "consumer", lambda _: asked(*self.images, "--step-ms", "25")

    def four_programs_beside(self):
        with beside(4):
            before = asked(*self.images, "--step-ms", "10")
        return before, "other_programs", lambda _: asked(*self.images, "--step-ms", "10")

    def half_a_core_of_quota(self):
        with group("cpu", "cpu.cfs_quota_us", "50000") as join:
            before = asked(*self.images, "--step-ms", "2", preexec_fn=join)
        return before, "cpu_quota", lambda _: asked(*self.images, "--step-ms", "2")

    def tiny_records(self):
        words = lambda size, batch: ["--source", "records", "--path", self.file, "--record-bytes", size, "--batch", batch, "--in-memory"]
        tiny = words(64, 4096)

        def after(advice):
            if advice["value"] is not None:
                return asked(*given(tiny, advice))
            larger = asked(*words(1024, 256))
            return {**larger, "items_per_s": 16 * larger["items_per_s"]}

        return asked(*tiny), ("pack", "batch_size", "slots"), after

    def map_batch_that_holds_pythons_lock(self):
        slow, fast = "sum(x * x for x in range(20_000))", "numpy.square(numpy.arange(20_000)).sum()"
        return looped(self.file, slow, 2), "less_work", lambda _: looped(self.file, fast, 2)

    def map_batch_that_sleeps(self):
        body = "time.sleep(0.02)"
        return looped(self.file, body, 1), "workers", lambda advice: looped(self.file, body, advice["value"])

    def one_slow_rank_of_four(self):
        def ranks(kind):
            home = self.folder / "ranks"
            home.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", RANKS, home, kind, "1", "80"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env=environment).stdout
            view = json.loads(out)
            advice = view["late"] and [{"remedy": view["late"]["cause"], "text": view["text"].splitlines()[-1], "prediction": None}]
            return {"items_per_s": view["rate"], "advice": advice or []}

        return ranks("map_batch"), "map_batch", lambda _: ranks("nothing")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    situations = Situations(args.folder)
    for name in [name for name in vars(Situations) if not name.startswith("_") and args.only in name]:
        try:
            before, remedies, follow = getattr(situations, name)()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: left out: {error}")
            continue
        first = (before["advice"] or [{"remedy": None, "text": "no advice", "prediction": None}])[0]
        remedies = (remedies,) if isinstance(remedies, str) else remedies
        if first["remedy"] not in remedies:
            print(f"{name}: {first['remedy']}, wanted {' or '.join(remedies)}: {first['text']}", flush=True)
            continue
        rates = [answer["items_per_s"] for answer in (before, follow(first))]
        promised = first["prediction"] and first["prediction"]["items_per_s"] / rates[0]
        promise = f", promised {promised:.2f} ×" if promised else ""
        print(f"{name}: {first['remedy']}: {rates[0]:.0f} to {rates[1]:.0f} samples/s, {rates[1] / rates[0]:.2f} ×{promise}", flush=True)


if __name__ == "__main__":
    main()

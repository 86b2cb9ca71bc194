"""Runs other loaders on the damaged copies of `torture --keep DIR`, and compares their results.

    cargo run --release --example torture -- --source images --keep /tmp/damaged/images
    cargo run --release --example torture -- --source tar --keep /tmp/damaged/tar
    cargo run --release --example torture -- --source mds --keep /tmp/damaged/mds
    pip install torch webdataset mosaicml-streaming grain litdata pillow
    python examples/torture/peers.py images /tmp/damaged/images
    python examples/torture/peers.py tar /tmp/damaged/tar
    python examples/torture/peers.py mds /tmp/damaged/mds

Each loader reads each copy from the start in its own process with a time limit. It has the defaults of its documentation, two
workers, and no handler. A hash of the pixels and the label of every sample is compared with the hash for the intact copy. Loaders
that are not installed are skipped.

    exact             every sample, with its bytes
    k fewer           samples missing silently (a warning on standard error is reported)
    k WRONG           samples with other pixels or labels, silently
    error, named      an exception that names the damaged file
    error             any other exception
    HANG, CRASH       no end within the limit; ended by a signal
"""

import argparse
import collections
import hashlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import tempfile

# Seconds; --limit. Streaming's own timeout for a shard is equal.
LIMIT = 60
NAMES = re.compile(r"[\w.-]+\.(?:jpg|tar|mds|json)\b")


def digest(pixels, label):
    return hashlib.blake2b(bytes(pixels) + b"|" + str(label).encode(), digest_size=8).hexdigest()


def pixels_of(image):
    return image.convert("RGB").tobytes()


# One function per loader: yields a hash per sample.


def torch_folder(path):
    """torchvision's ImageFolder, whose loading this repeats (PIL, convert to RGB), below torch's DataLoader."""
    import os

    import torch.utils.data
    from PIL import Image

    class Folder(torch.utils.data.Dataset):
        def __init__(self, root):
            classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
            self.samples = []
            for label, name in enumerate(classes):
                for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):
                    for file in sorted(files):
                        if file.lower().endswith((".jpg", ".jpeg", ".png")):
                            self.samples.append((os.path.join(folder, file), label))

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            path, label = self.samples[index]
            with open(path, "rb") as file:
                image = Image.open(file)
                return digest(pixels_of(image), label)

    for batch in torch.utils.data.DataLoader(Folder(path), batch_size=8, shuffle=True, num_workers=2):
        yield from batch


def grain_folder(path):
    """Grain's DataLoader over a random-access source of the same files."""
    import glob

    import grain.python as grain
    from PIL import Image

    files = sorted(glob.glob(f"{path}/*/*.jpg"))

    class Source:
        def __len__(self):
            return len(files)

        def __getitem__(self, index):
            with open(files[index], "rb") as file:
                return digest(pixels_of(Image.open(file)), files[index].split("/")[-2])

    sampler = grain.IndexSampler(len(files), shuffle=True, seed=1, num_epochs=1)
    yield from grain.DataLoader(data_source=Source(), sampler=sampler, worker_count=2)


def webdataset_tar(path):
    """WebDataset as in its README, with the default handlers, which raise."""
    import glob

    import torch.utils.data
    import webdataset as wds

    shards = sorted(glob.glob(f"{path}/*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=False).decode("pilrgb").to_tuple("jpg", "cls")
    dataset = dataset.map(lambda pair: digest(pixels_of(pair[0]), pair[1]))
    for item in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2):
        yield item


def webdataset_tar_warn(path):
    """WebDataset with its documented handler for damage: warn_and_continue."""
    import glob

    import torch.utils.data
    import webdataset as wds

    shards = sorted(glob.glob(f"{path}/*.tar"))
    handler = wds.warn_and_continue
    dataset = wds.WebDataset(shards, shardshuffle=False, handler=handler).decode("pilrgb", handler=handler)
    dataset = dataset.to_tuple("jpg", "cls", handler=handler).map(lambda pair: digest(pixels_of(pair[0]), pair[1]))
    for item in torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2):
        yield item


def streaming_mds(path):
    """StreamingDataset on local shards, below torch's DataLoader."""
    import torch.utils.data
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()

    class Pictures(StreamingDataset):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return digest(pixels_of(sample["image"]), sample["label"])

    dataset = Pictures(local=path, shuffle=False, batch_size=8)
    for batch in torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2):
        yield from batch


LOADERS = {
    "images": [("PyTorch, ImageFolder", torch_folder, "torch"), ("Grain", grain_folder, "grain")],
    "tar": [
        ("WebDataset", webdataset_tar, "webdataset"),
        ("WebDataset, warn_and_continue", webdataset_tar_warn, "webdataset"),
    ],
    "mds": [("MosaicML Streaming", streaming_mds, "streaming")],
}

# Scenarios that damage no file, or repeat the damage of others: they act on the process, or after indexing.
LEFT_OUT = re.compile(r"-indexed$|^(stopped|killed|stuck|held|dropped|descriptors|pread|again|full-|removed-state)")
KEPT = ["replaced-indexed"]


def child(function, path, out):
    hashes = []
    for value in globals()[function](path):
        hashes.append(value)
    pathlib.Path(out).write_text(json.dumps(hashes))


def run(function, path):
    """Returns hashes or None, the text on standard error, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        out, stderr = pathlib.Path(folder, "out"), pathlib.Path(folder, "stderr")
        command = [sys.executable, __file__, "--child", function.__name__, str(path), str(out)]
        with open(stderr, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = "HANG"
            finally:
                subprocess.run(["kill", "-9", "--", f"-{process.pid}"], check=False, stderr=subprocess.DEVNULL)
                process.wait()
        hashes = json.loads(out.read_text()) if out.exists() else None
        return hashes, stderr.read_text(errors="replace"), code


def judge(intact, before, hashes, stderr, code, damaged):
    """Summarises a result. `intact` and `before` are hashes and standard error for the intact copy."""
    if code == "HANG":
        return f"HANG (over {LIMIT} s)"
    named = sorted(set(NAMES.findall(stderr)) & damaged)
    if hashes is None:
        error = [line for line in stderr.splitlines() if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        text = error[-1][:70] if error else stderr.strip().splitlines()[-1][:70] if stderr.strip() else ""
        if isinstance(code, int) and code < 0:
            return f"CRASH (signal {-code}): {text}"
        return f"error, {'names ' + named[0] if named else 'file NOT named'}: {text}"
    right, after = collections.Counter(intact), collections.Counter(hashes)
    wrong, gone = sum((after - right).values()), sum((right - after).values())
    said = f", warned of {named[0]}" if named else ", warned" if "warn" in stderr.lower() and "warn" not in before.lower() else ""
    parts = []
    if wrong:
        parts.append(f"{wrong} WRONG")
    if gone - wrong > 0:
        parts.append(f"{gone - wrong} fewer")
    if wrong > gone:
        parts.append(f"{wrong - gone} more")
    return (", ".join(parts) or f"exact ({len(hashes)})") + (said or (", silently" if parts else ""))


def changed(intact, folder):
    """Names of the files that differ from the intact copy."""
    names = set()
    for path in intact.rglob("*"):
        if path.is_file():
            other = folder / path.relative_to(intact)
            if not other.is_file() or other.read_bytes() != path.read_bytes():
                names.add(path.name)
    return names


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=LOADERS)
    parser.add_argument("folder", type=pathlib.Path, help="what --keep left")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds after which a loader hangs")
    parser.add_argument("--only", help="only this copy")
    args = parser.parse_args()
    globals()["LIMIT"] = args.limit
    intact = args.folder / "intact"
    folders = sorted(path for path in args.folder.iterdir() if path.is_dir())
    folders = [path for path in folders if path.name in KEPT or not LEFT_OUT.search(path.name)]
    folders = [path for path in folders if args.only in (None, path.name)]
    print("| damage | loader | what came out |\n|---|---|---|")
    for name, function, module in LOADERS[args.format]:
        if importlib.util.find_spec(module) is None:
            print(f"| – | {name} | not installed |")
            continue
        expected, stderr, _ = run(function, intact)
        if not expected:
            print(f"| intact | {name} | cannot be read: {stderr.strip().splitlines()[-1:]} |")
            continue
        for folder in folders:
            result = judge(expected, stderr, *run(function, folder), changed(intact, folder))
            print(f"| {folder.name} | {name} | {result} |".replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()

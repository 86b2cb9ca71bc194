"""What PyTorch sees of feedline's batches: `look.py WHEEL RECORDS RECORD_BYTES FOLDER`.

Prints a line per thing that was looked at: its name, a tab, `ok` or what is wrong.
"""

import pathlib
import sys
import threading
import traceback
import zipfile

import torch


def imported(wheel, folder):
    """The package of a wheel."""
    place = folder / "package"
    zipfile.ZipFile(wheel).extractall(place)
    sys.path.insert(0, str(place))
    import feedline

    return feedline


def rows_of(package, path, record, **settings):
    return package.Loader("records", str(path), record_bytes=record, shuffle=3, ids=True, device="auto", **settings)


def right(data, batch):
    """The rows that a batch should hold, on the host."""
    ids = torch.from_dlpack(batch["ids"]).view(torch.int64)
    return data[ids]


def every_row(package, path, record, data):
    loader = rows_of(package, path, record, batch_size=7)
    where, rows = set(), 0
    for batch in loader.epoch(0):
        expected = right(data, batch)
        seen = torch.from_dlpack(batch["record"])
        where.add(str(seen.device))
        assert torch.equal(seen.cpu(), expected), f"rows {rows} and on differ"
        rows += len(expected)
    assert rows == len(data), f"{rows} rows, not {len(data)}"
    assert all(place.startswith("cuda") for place in where), f"the tensors are on {where}: {loader.report()}"
    return f"{rows} rows on {', '.join(sorted(where))}"


def side_stream(package, path, record, data):
    """Tensors that are dropped while their stream still has long work before it reads them."""
    big = torch.rand(8192, 8192, device="cuda")
    stream = torch.cuda.Stream()
    kept = []
    for batch in rows_of(package, path, record, batch_size=25).epoch(1):
        expected = right(data, batch)
        with torch.cuda.stream(stream):
            seen = torch.from_dlpack(batch["record"])
            big = (big @ big).clamp_(0, 1)
            kept.append((seen.clone(), expected))
        del seen, batch
    torch.cuda.synchronize()
    wrong = sum(not torch.equal(seen.cpu(), expected) for seen, expected in kept)
    assert wrong == 0, f"{wrong} of {len(kept)} batches were overwritten"
    return f"{len(kept)} batches"


def written(package, path, record, data):
    """What is written in place is seen in no later batch."""
    for batch in rows_of(package, path, record, batch_size=10).epoch(2):
        expected = right(data, batch)
        seen = torch.from_dlpack(batch["record"])
        assert torch.equal(seen.cpu(), expected), "a batch holds what was written into another"
        seen.fill_(0xAA)
    return ""


def other_thread(package, path, record, data):
    """The last reference goes on a thread that never used CUDA."""
    for batch in rows_of(package, path, record, batch_size=50).epoch(3):
        expected = right(data, batch)
        kept = [torch.from_dlpack(batch["record"])]
        assert torch.equal(kept[0].cpu(), expected)
        del batch
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
    return ""


def main():
    wheel, path, record, folder = sys.argv[1:]
    path, record, folder = pathlib.Path(path), int(record), pathlib.Path(folder)
    package = imported(pathlib.Path(wheel), folder)
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(-1, record)
    for look in (every_row, side_stream, written, other_thread):
        try:
            found = f"ok {look(package, path, record, data)}"
        except Exception as error:  # Whatever it is, the other looks are made.
            traceback.print_exc()
            found = f"{type(error).__name__}: {error}".replace("\n", " ").replace("\t", " ")
        print(f"{look.__name__.replace('_', ' ')}\t{found}", flush=True)


main()

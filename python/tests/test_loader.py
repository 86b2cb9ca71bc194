"""What Python sees of feedline, on the host. Needs numpy; what needs torch is skipped without it.

    pytest python/tests
"""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

import feedline
from feedline import IMAGENET, to_numpy

try:
    import torch
except ImportError as error:
    torch, without_torch = None, str(error)
else:
    without_torch = ""

import demo

needs_torch = pytest.mark.skipif(torch is None, reason=f"torch is missing: {without_torch}")

RECORD = 48
COUNT = 100

# A shell that starts tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def Loader(source, path, **settings):
    """On the host, also where there is a GPU."""
    return feedline.Loader(source, path, **{"device": "cpu", **settings})


@pytest.fixture
def records(tmp_path):
    """A file of records, and the bytes as an array [COUNT, RECORD]."""
    data = np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8)
    path = tmp_path / "records.bin"
    data.tofile(path)
    return path, data


def open_records(path, **settings):
    return Loader("records", path, record_bytes=RECORD, **settings)


# Bytes


def test_records_are_the_bytes_of_the_file_in_order(records):
    path, data = records
    loader = open_records(path, batch_size=16)
    rows = [to_numpy(batch)["record"] for batch in loader.epoch(0)]
    assert [len(part) for part in rows] == [16] * 6 + [4] and len(loader) == 7
    assert np.array_equal(np.concatenate(rows), data)
    assert loader.spec() == [("record", "u8", (RECORD,))]


def test_shuffled_rows_belong_to_their_ids_and_ranks_share_them_out(records):
    path, data = records
    seen = []
    for rank in range(3):
        loader = open_records(path, batch_size=7, shuffle=3, shard=(rank, 3), ids=True)
        for batch in map(to_numpy, loader.epoch(4)):
            assert batch["ids"].dtype == np.uint64 and batch["status"].dtype == np.uint8
            for row, number, status in zip(batch["record"], batch["ids"], batch["status"]):
                if status == 0:
                    assert np.array_equal(row, data[number])
                    seen.append(int(number))
    assert sorted(seen) == list(range(COUNT)) and seen != sorted(seen)


@pytest.mark.parametrize("name, kind", [("u16", np.uint16), ("u32", np.uint32), ("i32", np.int32), ("i64", np.int64)])
def test_tokens_are_windows_of_the_file(tmp_path, name, kind):
    tokens = np.random.default_rng(2).integers(0, 30000, 10 * 64 + 5).astype(kind)
    tokens.tofile(tmp_path / "train.bin")
    loader = Loader("tokens", tmp_path / "train.bin", token=name, seq_len=64, batch_size=4)
    rows = np.concatenate([to_numpy(batch)["tokens"] for batch in loader.epoch(0)])
    assert rows.dtype == kind and np.array_equal(rows, tokens[: 10 * 64].reshape(10, 64))


@pytest.fixture
def pictures(tmp_path):
    """Three classes of two pictures of 16 x 16, and their pixels."""
    pixels = np.random.default_rng(3).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        place = tmp_path / "pictures" / f"class{number // 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(demo.png(picture.tobytes(), 16, 16))
    return tmp_path / "pictures", pixels


def test_pictures_are_decoded_with_their_class_as_label(pictures):
    path, pixels = pictures
    loader = Loader("images", path, batch_size=6, size=14)
    (batch,) = map(to_numpy, loader.epoch(0))
    # The shorter side becomes 16, which it is, and the middle 14 are taken.
    assert np.array_equal(batch["image"], pixels[:, 1:15, 1:15])
    assert batch["label"].tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("normalize", [None, IMAGENET, ([0.5], [0.25]), [[0.1, 0.2, 0.3], [1.0]]])
def test_pictures_as_floats_are_normalised_in_either_layout(pictures, normalize, first):
    path, pixels = pictures
    settings = {"dtype": "f32", "normalize": normalize, "layout": "nchw" if first else "nhwc"}
    loader = Loader("images", path, batch_size=6, size=14, **settings)
    assert loader.spec()[0] == ("image", "f32", (3, 14, 14) if first else (14, 14, 3))
    (batch,) = map(to_numpy, loader.epoch(0))
    mean, deviation = map(np.float32, normalize or ([0.0], [1.0]))
    expected = (pixels[:, 1:15, 1:15] / np.float32(255) - mean) / deviation
    assert batch["image"].dtype == np.float32
    np.testing.assert_allclose(batch["image"], expected.transpose(0, 3, 1, 2) if first else expected, atol=1e-5)


def test_bytes_may_have_their_channels_first_too(pictures):
    path, pixels = pictures
    (batch,) = map(to_numpy, Loader("images", path, batch_size=6, size=14, layout="nchw").epoch(0))
    assert np.array_equal(batch["image"], pixels[:, 1:15, 1:15].transpose(0, 3, 1, 2))


def test_tar_members_of_any_length_come_with_their_lengths(tmp_path, pictures):
    _, pixels = pictures
    texts = [b"", b"one", b"two words", b"x" * 40, b"yes", b"no"]
    with tarfile.open(tmp_path / "shard-0.tar", "w") as tar:
        for number, (picture, text) in enumerate(zip(pixels, texts)):
            members = {"png": demo.png(picture.tobytes(), 16, 16), "cls": str(number * 3).encode(), "txt": text}
            for ending, data in members.items():
                member = tarfile.TarInfo(f"{number:04}.{ending}")
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
    settings = {"image": "jpg;png", "columns": ["cls", "txt"], "size": 14}
    loader = Loader("tar", tmp_path / "shard-{0..0}.tar", batch_size=6, **settings)
    (batch,) = map(to_numpy, loader.epoch(0))
    assert np.array_equal(batch["image"], pixels[:, 1:15, 1:15])
    assert batch["label"].tolist() == [0, 3, 6, 9, 12, 15]
    lengths = batch["txt.lens"].tolist()
    assert [bytes(row[:length]) for row, length in zip(batch["txt"], lengths)] == texts
    assert all(not row[length:].any() for row, length in zip(batch["txt"], lengths))


# Memory


def test_arrays_outlive_their_loader(records):
    path, data = records
    loader = open_records(path, batch_size=50)
    epoch = loader.epoch(0)
    arrays = [to_numpy(batch)["record"] for batch in epoch]
    never = list(loader.epoch(1))
    del loader, epoch
    gc.collect()
    assert np.array_equal(np.concatenate(arrays), data)
    assert np.array_equal(np.from_dlpack(never[0]["record"]), data[:50])


def test_what_is_kept_stays_as_it_is_while_other_batches_come_and_are_written_to(records):
    path, data = records
    loader = open_records(path, batch_size=10, slots=3)
    kept = None
    for number in range(5):
        for index, batch in enumerate(loader.epoch(number)):
            array = np.from_dlpack(batch["record"])
            assert np.array_equal(array, data[index * 10 : index * 10 + 10])
            if kept is None:
                kept = array
            else:
                array[:] = 0xAA
            del array, batch
    assert np.array_equal(kept, data[:10])


def test_a_view_keeps_the_batch(records):
    path, data = records
    loader = open_records(path, batch_size=10, slots=2)
    views = None
    for batch in loader.epoch(0):
        views = views if views is not None else np.from_dlpack(batch["record"])[3:5, 7]
        del batch
    gc.collect()
    assert views.tolist() == data[3:5, 7].tolist()


@pytest.mark.parametrize("use", ["nothing", "capsules", "arrays", "half"])
def test_batches_come_back_however_far_they_were_taken(records, use):
    path, _ = records
    loader = open_records(path, batch_size=10, slots=2, ids=True)
    for number in range(20):
        for batch in loader.epoch(number):
            if use == "capsules":
                taken = [tensor.__dlpack__(max_version=(1, 0)) for tensor in batch.values()]
                taken[0], batch["status"] = None, None
            elif use == "arrays":
                taken = to_numpy(batch)
            elif use == "half":
                taken = [batch["ids"].__dlpack__(), np.from_dlpack(batch["record"])]
            taken = batch = None
    assert number == 19


def test_holding_every_batch_is_an_error_that_passes(records):
    path, data = records
    loader = open_records(path, batch_size=10, slots=2, held_deadline=0.2)
    epoch = loader.epoch(0)
    held = [to_numpy(next(epoch)), to_numpy(next(epoch))]
    with pytest.raises(RuntimeError, match="holds all 2 batches") as raised:
        next(epoch)
    assert raised.value.kind == "every batch is held"
    held.pop(0)
    assert np.array_equal(np.from_dlpack(next(epoch)["record"]), data[20:30])


def test_a_picture_that_cannot_be_decoded_is_an_error_or_gets_a_substitute_that_is_named(tmp_path):
    for number in range(6):
        place = tmp_path / "pictures" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.png").write_bytes(demo.png(bytes([number]) * (8 * 8 * 3), 8, 8))
    bad = tmp_path / "pictures" / "class1" / "3.png"
    bad.write_bytes(bad.read_bytes()[:40])
    path = tmp_path / "pictures"
    with pytest.raises(ValueError, match="3.png"):
        list(feedline.Loader("images", path, device="cpu", size=8, batch_size=6).epoch(0))
    ledger = tmp_path / "bad.jsonl"
    settings = {"device": "cpu", "size": 8, "batch_size": 6, "ids": True}
    loader = feedline.Loader("images", path, substitute=1, ledger=ledger, **settings)
    for epoch in range(2):
        (batch,) = loader.epoch(epoch)
        arrays = to_numpy(batch)
        status, ids = arrays["status"], arrays["ids"]
        (row,) = np.flatnonzero(status == 2)
        (entry,) = loader.bad_samples()
        assert entry["path"] == str(bad) or entry["path"] == bad
        assert entry["sample"] == row and ids[row] != row and entry["times"] == epoch + 1
        assert (entry["epoch"], entry["batch"]) == (0, 0) and entry["substitute"] != row
    assert len(ledger.read_text().splitlines()) == 2


def test_waiting_leaves_the_gil_to_the_thread_that_drops_the_batch(records):
    path, data = records
    loader = open_records(path, batch_size=10, slots=2, held_deadline=600)
    epoch = loader.epoch(0)
    held = [to_numpy(next(epoch)), to_numpy(next(epoch))]
    waits = threading.Event()

    def drop():
        waits.wait()
        time.sleep(0.2)
        held.pop(0)

    thread = threading.Thread(target=drop)
    thread.start()
    waits.set()
    # Were the GIL held, the thread could never drop what this waits for.
    assert np.array_equal(np.from_dlpack(next(epoch)["record"]), data[20:30])
    thread.join()


def test_threads_may_share_an_epoch_and_drop_each_others_batches(records):
    path, data = records
    loader = open_records(path, batch_size=5, slots=5, ids=True)
    # Each of four threads holds its last batch while it waits for the next.
    epoch, seen, lock = loader.epoch(0), [], threading.Lock()

    def consume():
        for batch in map(to_numpy, epoch):
            assert np.array_equal(batch["record"], data[batch["ids"].astype(np.int64)])
            with lock:
                seen.extend(batch["ids"].tolist())

    threads = [threading.Thread(target=consume) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(seen) == list(range(COUNT))


# Interruptions


def interrupted(call, waits=lambda: time.sleep(0.2)):
    """Ctrl-C while `call` waits."""
    begun = threading.Event()

    def press():
        begun.wait()
        waits()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        begun.set()
        call()
    thread.join()


def test_ctrl_c_ends_an_opening_that_waits_for_a_store():
    answered = []
    with socket.create_server(("127.0.0.1", 0)) as store:
        url = f"http://127.0.0.1:{store.getsockname()[1]}/records.bin"
        interrupted(lambda: feedline.Loader("records", url, record_bytes=8, batch_size=8),
                    lambda: answered.append(store.accept()))


def test_ctrl_c_ends_a_wait_and_no_batch_is_lost_by_it(records):
    path, data = records
    epoch = open_records(path, batch_size=10, slots=2, held_deadline=600).epoch(0)
    held = [to_numpy(next(epoch)), to_numpy(next(epoch))]
    for _ in range(2):
        # Nothing can come while every batch is held.
        interrupted(lambda: next(epoch))
    held.clear()
    rest = [to_numpy(batch)["record"].copy() for batch in epoch]
    assert np.array_equal(np.concatenate(rest), data[20:])


def test_ctrl_c_ends_the_wait_for_a_thread_that_waits(records):
    path, data = records
    epoch = open_records(path, batch_size=10, slots=2, held_deadline=600).epoch(0)
    held, got = [to_numpy(next(epoch)), to_numpy(next(epoch))], []
    thread = threading.Thread(target=lambda: got.append(to_numpy(next(epoch))["record"].copy()))
    thread.start()
    interrupted(lambda: next(epoch))
    held.clear()
    thread.join()
    assert np.array_equal(got[0], data[20:30]) and len(epoch) == 7


def test_an_epoch_can_be_closed_while_another_thread_waits_for_it(records):
    path, _ = records
    loader = open_records(path, batch_size=10, slots=2, held_deadline=600)
    epoch = loader.epoch(0)
    held, got = [next(epoch), next(epoch)], []
    thread = threading.Thread(target=lambda: got.extend(epoch))
    thread.start()
    time.sleep(0.1)
    epoch.close()
    thread.join()
    assert got == [] and len(held) == 2
    held.clear()
    assert sum(1 for _ in loader.epoch(1)) == 10


# The protocol


def first(records, **settings):
    return next(open_records(records[0], batch_size=10, **settings).epoch(0))["record"]


def test_capsules_are_named_by_version_and_taken_once(records):
    assert first(records).__dlpack_device__() == (1, 0)
    legacy, old, new = first(records).__dlpack__(), first(records).__dlpack__(max_version=(0, 8)), first(records)
    assert '"dltensor"' in repr(legacy) and '"dltensor"' in repr(old)
    assert (new.shape, new.dtype, repr(new)) == ((10, RECORD), "u8", "Tensor(u8 [10, 48])")
    assert '"dltensor_versioned"' in repr(new.__dlpack__(max_version=(1, 1)))
    with pytest.raises(BufferError, match="handed over before"):
        np.from_dlpack(new)
    assert repr(new) == "Tensor(u8 [10, 48], taken)"


def test_what_cannot_be_done_is_refused_and_takes_nothing(records):
    tensor = first(records)
    for settings, words in [
        ({"stream": 2}, "no stream"),
        ({"dl_device": (2, 0)}, r"lies on \(1, 0\)"),
        ({"copy": True}, "clone"),
        ({"stream": -1}, "no stream"),
    ]:
        with pytest.raises(BufferError, match=words):
            tensor.__dlpack__(max_version=(1, 0), **settings)
    tensor.__dlpack__(max_version=(1, 0), stream=None, dl_device=(1, 0), copy=False)


class Legacy:
    """A producer of the time before versions."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def test_numpy_may_write_to_versioned_tensors_and_takes_legacy_ones(records):
    _, data = records
    array = np.from_dlpack(first(records))
    assert array.flags.writeable
    array += 1
    assert np.array_equal(array, data[:10] + 1)
    assert np.array_equal(np.from_dlpack(Legacy(first(records))), data[:10])


def test_binding_streams_means_nothing_on_the_host(records):
    loader = open_records(records[0], batch_size=10, streams=[0, 7], ids=True)
    batch = next(loader.epoch(0))
    batch.bind(12345)
    assert isinstance(batch, dict) and list(batch) == ["record", "ids", "status"]
    to_numpy(batch)
    with pytest.raises(BufferError, match="before the last one goes"):
        batch.bind(0)
    for wrong, error in [(-1, ValueError), ("1", TypeError), (None, TypeError)]:
        with pytest.raises(error):
            next(loader.epoch(1)).bind(wrong)


# Settings, errors, places


def test_a_run_goes_on_from_its_state_with_another_number_of_workers(records):
    path, _ = records

    def ids(epoch):
        return [to_numpy(batch)["ids"].tolist() for batch in epoch]

    settings = {"batch_size": 8, "shuffle": 5, "ids": True}
    whole = open_records(path, workers=1, **settings)
    expected = ids(whole.epoch(0)) + ids(whole.epoch(1))
    interrupted = open_records(path, workers=2, **settings)
    with interrupted.epoch() as epoch:
        seen = [to_numpy(next(epoch))["ids"].tolist() for _ in range(4)]
        state = interrupted.state()
    assert isinstance(state, bytes) and len(state) < 1024
    resumed = open_records(path, workers=3, **settings)
    resumed.resume(state)
    assert resumed.next_epoch == 0
    seen += ids(resumed.epoch())
    assert resumed.next_epoch == 1
    assert seen + ids(resumed.epoch()) == expected
    with pytest.raises(ValueError, match="state not usable"):
        resumed.resume(state[:-1])
    with pytest.raises(ValueError, match="the seed of the order is 5 in the state, 6 in the loader"):
        open_records(path, **{**settings, "shuffle": 6}).resume(state)


def test_one_epoch_at_a_time_which_ends_by_close_with_or_its_last_reference(records):
    loader = open_records(records[0], batch_size=10)
    epoch = loader.epoch(0)
    assert len(epoch) == 10
    next(epoch)
    with pytest.raises(RuntimeError, match="another epoch is alive"):
        loader.epoch(0)
    epoch.close()
    assert len(epoch) == 0 and list(epoch) == []
    with loader.epoch(1) as epoch:
        next(epoch)
    for _ in loader.epoch(2):
        break
    del epoch
    assert len(list(loader.epoch(3))) == 10


@pytest.mark.parametrize(
    "source, settings, error, words",
    [
        ("records", {"record_bytes": RECORD, "path": "gone.bin"}, FileNotFoundError, "gone.bin"),
        ("records", {}, ValueError, "needs record_bytes"),
        ("records", {"record_bytes": RECORD + 1}, OSError, "47 left over: path=.*records.bin"),
        ("records", {"record_bytes": RECORD, "seq_len": 4}, ValueError, 'seq_len is for source tokens, megatron'),
        ("records", {"record_bytes": RECORD, "device": "tpu"}, ValueError, 'no device is called "tpu"'),
        ("records", {"record_bytes": RECORD, "device": "cuda:999"}, RuntimeError, "(?i)cuda|driver"),
        ("records", {"record_bytes": RECORD, "device_batches": 1}, ValueError, "`device_batches` is"),
        ("records", {"record_bytes": RECORD, "gds": "on"}, ValueError, '"on"; use auto, require or off'),
        ("records", {"record_bytes": RECORD, "size": 8}, ValueError, "size is for pictures"),
        ("records", {"record_bytes": RECORD, "augment": False}, ValueError, "augment is for pictures"),
        ("records", {"record_bytes": RECORD, "dtype": "f32"}, ValueError, "dtype is for pictures"),
        ("records", {"record_bytes": RECORD, "normalize": IMAGENET}, ValueError, "normalize is for pictures"),
        ("records", {"record_bytes": RECORD, "layout": "nchw"}, ValueError, "layout is for pictures"),
        ("records", {"record_bytes": RECORD, "shard": "mpi"}, ValueError, 'shard "mpi"'),
        ("records", {"record_bytes": RECORD, "shard": (2, 2)}, ValueError, "bad configuration"),
        ("records", {"record_bytes": RECORD, "last_batch": "half"}, ValueError, 'last_batch "half"'),
        ("records", {"record_bytes": RECORD, "batch_size": 0}, ValueError, "bad configuration"),
        ("records", {"record_bytes": RECORD, "memory_budget": 1}, ValueError, "memory budget too small"),
        (
            "records",
            {"record_bytes": RECORD, "memory_budget": 1, "in_memory": True},
            feedline.errors.BudgetError,
            "`memory_budget` is 0.0 MiB: without `in_memory` they are read from storage",
        ),
        ("records", {"record_bytes": RECORD, "held_deadline": -1}, ValueError, "held_deadline"),
        ("tokens", {"token": "f32", "seq_len": 4}, ValueError, "f32"),
        ("films", {}, ValueError, "there are images, records, tokens, megatron"),
    ],
)
def test_errors_are_pythons_and_say_everything(records, source, settings, error, words):
    settings = {"path": records[0], **settings}
    with pytest.raises(error, match=words):
        Loader(source, **settings)


def test_a_file_cut_after_it_was_opened_is_named_with_the_sample(records):
    path, _ = records
    loader = open_records(path, batch_size=10)
    os.truncate(path, RECORD * COUNT // 2)
    with pytest.raises(OSError, match="records.bin.* sample=[0-9]+ batch=[0-9]+"):
        list(loader.epoch(0))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "size .* missing"),
        ({"size": 14, "normalize": IMAGENET}, "normalize makes floats"),
        ({"size": 14, "dtype": "i32"}, "i32; use f32, f16 or bf16"),
        ({"size": 14, "dtype": "f8"}, 'element type "f8"'),
        ({"size": 14, "dtype": "f32", "normalize": ([0, 0], [1, 1])}, "2 values of mean"),
        ({"size": 14, "dtype": "f32", "normalize": ([0], [0])}, "std 0"),
    ],
)
def test_settings_of_pictures_are_checked(pictures, settings, words):
    with pytest.raises(ValueError, match=words):
        Loader("images", pictures[0], **settings)


def test_the_device_has_pytorchs_name_and_auto_is_always_one(records):
    path, _ = records
    assert {open_records(path, device=words).device for words in ["cpu", "host"]} == {"cpu"}
    # In a process of its own: a GPU stays open in the process that looked for one.
    program = "import sys; from feedline import Loader; print(Loader('records', sys.argv[1], record_bytes=48).device)"
    run = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert re.fullmatch(r"cpu|cuda:\d+", run.stdout.strip()), run.stderr


def test_the_launchers_variables_say_the_rank(records):
    program = (
        "import sys; from feedline import Loader; loader = Loader('records', sys.argv[1], record_bytes=48, shard='env',"
        "device='cpu');"
        "print(loader)"
    )
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    run = subprocess.run([sys.executable, "-c", program, records[0]], env=env, capture_output=True, text=True)
    assert "rank 1 of 4" in run.stdout, run.stderr


def test_the_report_and_the_loader_describe_themselves(records):
    loader = open_records(records[0], batch_size=10)
    list(loader.epoch(0))
    assert "100 samples" in loader.report()
    assert "records.bin" in repr(loader)


# torch


@needs_torch
def test_torch_takes_tensors_without_a_copy_and_may_write(records):
    path, data = records
    loader = open_records(path, batch_size=10, slots=2, ids=True)
    batches = 0
    for index, batch in enumerate(loader.epoch(0)):
        tensors = feedline.to_torch(batch)
        record = tensors["record"]
        assert record.dtype == torch.uint8 and record.data_ptr() % 256 == 0
        assert np.array_equal(record.numpy(), data[index * 10 : index * 10 + 10])
        assert tensors["ids"].view(torch.int64).tolist() == list(range(index * 10, index * 10 + 10))
        record.add_(1)
        assert np.array_equal(record.numpy(), data[index * 10 : index * 10 + 10] + 1)
        del batch, tensors, record
        batches += 1
    assert batches == 10


@needs_torch
def test_torch_takes_legacy_capsules_and_storage_outlives_the_loader(records):
    _, data = records
    tensor = torch.from_dlpack(Legacy(first(records)))
    capsule = torch.utils.dlpack.from_dlpack(first(records).__dlpack__())
    gc.collect()
    assert np.array_equal(tensor.numpy(), data[:10]) and torch.equal(tensor, capsule)


@needs_torch
def test_torch_names_of_devices_are_taken(records):
    assert open_records(records[0], device=torch.device("cpu")).device == "cpu"


@needs_torch
@pytest.mark.parametrize("name", ["u8", "f32", "f16", "bf16"])
def test_torch_takes_every_dtype_of_pictures(pictures, name):
    path, pixels = pictures
    floats = {} if name == "u8" else {"dtype": name, "normalize": IMAGENET}
    loader = Loader("images", path, batch_size=6, size=14, **floats)
    (batch,) = loader.epoch(0)
    image = torch.from_dlpack(batch["image"])
    kinds = {"u8": torch.uint8, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    assert image.dtype == kinds[name] and image.shape == (6, 14, 14, 3)
    expected = torch.from_numpy(pixels[:, 1:15, 1:15].copy()).float()
    if name != "u8":
        expected = (expected / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(image.float(), expected, atol=0.02)


@needs_torch
def test_the_training_loop_learns_and_goes_on_where_it_was_stopped(tmp_path):
    demo.write(tmp_path / "data", per_class=24)

    def train(*more):
        settings = ["--data", tmp_path / "data", "--device", "cpu", "--epochs", "4", "--batch-size", "16"]
        command = [sys.executable, Path(demo.__file__).with_name("train.py"), *settings, *more]
        run = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr
        return [re.sub(r" \(\d+ images/s\)$", "", line) for line in run.stdout.splitlines()]

    whole = train()
    checkpoint = ["--checkpoint", tmp_path / "run.pt"]
    assert train(*checkpoint, "--steps", "9") == [whole[0], "stopped in epoch 1 after 9 steps"]
    rest = train(*checkpoint, "--workers", "1")
    assert rest[0] == "goes on in epoch 1"
    assert rest[1:4] == whole[1:4]
    assert whole[3].startswith("epoch 3: ") and float(whole[3].split()[-1]) > 0.9

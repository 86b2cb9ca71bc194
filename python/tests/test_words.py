"""No message names an item of Rust, and each says what to give."""

import os
import re
import tarfile

import numpy as np
import pytest

import feedline
import feedline.numpy as fl

RUST = re.compile(r"\w::\w|`\.\w|`\w+\(|\bSome\(|\bu64::|extract enum|LastBatch|Launcher|Order::|Nulls|ShardArg|NumaArg")
COUNT, RECORD = 40, 16
STATE = {"shuffle": 5, "batch_size": 8}


@pytest.fixture
def data(tmp_path):
    np.arange(COUNT * RECORD, dtype=np.uint32).astype(np.uint8).tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


def records(data, **settings):
    return fl.records(data, record_bytes=RECORD, **settings)


def said(call, kind=Exception):
    """The message of the error of a call."""
    with pytest.raises(kind) as raised:
        call()
    assert not RUST.search(str(raised.value)), str(raised.value)
    return str(raised.value)


WRONG = [
    {"batch_size": 0},
    {"global_batch": 0},
    {"workers": 0},
    {"workers": 1 << 20},
    {"slots": 0},
    {"slots": 1 << 30},
    {"device_batches": 1},
    {"depth": 0},
    {"depth": 1 << 20},
    {"memory_budget": 1},
    {"reader": "floppy"},
    {"reader": "mmap", "direct": "on"},
    {"direct": "maybe"},
    {"device": "tpu"},
    {"gds": "perhaps"},
    {"numa": "near"},
    {"numa": 999},
    {"numa": 0.5},
    {"stall_deadline": 0.0},
    {"stall_deadline": -1.0},
    {"held_deadline": -1.0},
    {"last_batch": "Keep"},
    {"last_batch": "mask"},
    {"last_batch": "keep", "shard": (0, 2)},
    {"shard": (2, 2)},
    {"shard": (0, 0)},
    {"shard": "slurm"},
    {"shard": 0},
    {"shard": [0, 1, 2]},
    {"global_batch": 2, "shard": (0, 4)},
    {"keep": ["nothing"]},
    {"keep": ["record", "record"]},
    {"keep": []},
    {"ledger": "bad.jsonl"},
    {"window": 4},
    {"lanes": 2, "shuffle": 1},
    {"lanes": 0},
    {"indices": [COUNT]},
    {"indices": []},
    {"subset": [COUNT]},
    {"subset": "all"},
    {"take": 0.5},
    {"take": (2.0, 1)},
    {"weights": [1.0]},
    {"batch_size": 100, "last_batch": "drop"},
    {"cache_bytes": 5},
    {"adds": {"sum": ("i64", "x")}},
    {"adds": {"sum": ("i64", ())}},
    {"map_batch": 5},
    {"size": 224},
    {"columns": ["a"]},
    {"streams": "none"},
    {"path": 5},
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_a_wrong_setting_is_told_in_words_of_python(data, settings):
    settings = dict(settings)
    path = settings.pop("path", data)
    said(lambda: next(iter(records(path, **settings))))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"batch_size": 32.0}, "batch_size=32.0: give a whole number"),
        ({"memory_budget": "1GB"}, "memory_budget='1GB': give a whole number"),
        ({"held_deadline": "soon"}, "held_deadline='soon': give a number"),
        ({"ids": 1}, "ids=1: give True or False"),
        ({"reader": 5}, "reader=5: give a name"),
        ({"ledger": 5}, "ledger=5: give a path"),
        ({"take": [0.5, 3.0]}, "give (fraction, key), the key a whole number"),
        ({"adds": {"sum": "i64"}, "map_batch": print}, "adds={'sum': 'i64'}: give a dict from field to (element type, shape)"),
        ({"adds": ["sum"], "map_batch": print}, "adds=['sum']: give a dict"),
        ({"decoders": {"record": len}}, "give a dict from field to (function, element type, shape or most elements)"),
        ({"decoders": {"record": ("len", "i64", ())}}, "'record' has 'len': give a function"),
    ],
)
def test_a_value_of_another_type_is_told_with_what_to_give(data, settings, words):
    assert words in said(lambda: records(data, **settings), TypeError)


def test_sources_that_need_more_say_so_in_words_of_python(tmp_path):
    for name, sizes in (("a", (3, 4)), ("b", (5, 4)), ("c", (5, 7))):
        np.save(tmp_path / f"{name}.npy", np.zeros(sizes, dtype=np.float32))
    assert "`up_to`" in said(lambda: fl.npy([str(tmp_path / "[ab].npy")]))
    said(lambda: fl.npy(str(tmp_path / "[ac].npy")))
    said(lambda: fl.npy(str(tmp_path / "a.npy"), rows=True, up_to=4))
    said(lambda: fl.npz(str(tmp_path / "a.npy")))
    assert "`rows=True` makes each of its 3 rows a sample" in fl.npy(str(tmp_path / "a.npy")).report()
    assert "rows=True" not in fl.npy(str(tmp_path / "a.npy"), rows=True).report()
    assert "at least one" in said(lambda: fl.npy([]), ValueError)
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        for name in ("1.png", "1.jpg"):
            (tmp_path / name).write_bytes(b"x")
            tar.add(tmp_path / name, name)
    assert "`columns`" in said(lambda: fl.webdataset(tmp_path / "one.tar", size=8))
    advice = 'name their column by image="jpg", and leave it out of columns'
    assert advice in said(lambda: fl.webdataset(tmp_path / "one.tar", columns=["jpg"], size=8))
    (tmp_path / "tokens.bin").write_bytes(b"\0" * 64)
    assert "`seq_len`" in said(lambda: fl.tokens(tmp_path / "tokens.bin", seq_len=0))
    said(lambda: fl.tokens(tmp_path / "tokens.bin", seq_len=8, token="f32"))
    for source in ("images", "megatron", "parquet", "tfrecord", "mds", "safetensors"):
        said(lambda source=source: getattr(fl, source)(tmp_path / "tokens.bin"))
        said(lambda source=source: getattr(fl, source)(tmp_path / "absent"))


def test_parquet_names_its_settings(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"tok": [[1, 2], [3]], "nul": pa.array([1, None], pa.int64()), "text": ["a", "b"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert "`up_to`" in said(lambda: fl.parquet(tmp_path / "t.parquet", columns=["tok"]))
    assert "`null_zero=True`" in said(lambda: list(fl.parquet(tmp_path / "t.parquet", columns=["nul"])))
    said(lambda: fl.parquet(tmp_path / "t.parquet", stack="x", columns=["nul", "text"]))


@pytest.mark.parametrize(
    "other, words",
    [
        ({"batch_size": 4}, "set `global_batch=8`"),
        ({"last_batch": "drop"}, 'the last batch is keep in the state, drop in the loader: set `last_batch="keep"`'),
        ({"shuffle": 6}, "the seed of the order is 5 in the state, 6 in the loader"),
        ({"shuffle": None}, "the order is"),
        ({"seed": 9}, "seed of transforms"),
        ({"indices": list(range(COUNT))}, "the order is"),
        ({"subset": [1, 2]}, "samples"),
    ],
)
def test_a_state_of_other_settings_is_told_in_words_of_python(data, other, words):
    state = records(data, **STATE).state_dict()
    kind = feedline.errors.FingerprintError if "subset" in other else feedline.errors.StateError
    message = said(lambda: records(data, **STATE | other).load_state_dict(state), kind)
    assert words in message and not message.startswith("build:")
    assert not said(lambda: records(data).load_state_dict({})).startswith("build:")


@pytest.mark.parametrize(
    "other, words",
    [
        ({"budget": 64}, "the budget of the groups is 128 in the state, 64 in the loader: set `budget=128`"),
        ({"multiple_of": 4}, "are a multiple of 2 in the state, 4 in the loader: set `multiple_of=2`"),
        ({"bounds": [8, 16]}, "the groups are 2 up to 9 ("),
        ({"lengths": [9] * COUNT}, "the groups made from lengths, sizes or numbers of the samples have the hash "),
    ],
)
def test_a_state_of_other_groups_is_told_with_both_values(data, other, words):
    settings = {"lengths": [1 + n % 9 for n in range(COUNT)], "bounds": [5, 9], "budget": 128, "multiple_of": 2, "shuffle": 1}
    state = records(data, **settings).state_dict()
    message = said(lambda: records(data, **settings | other).load_state_dict(state, rebatched=True), feedline.errors.StateError)
    assert words in message, message


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"lengths": [1] * 9 + [-5] + [1] * 90}, "lengths[9]=-5: out of range; give a whole number from 0"),
        ({"lengths": [1, 2, 0.5]}, "lengths[2]=0.5: give a list of whole numbers"),
        ({"lengths": [1] * COUNT, "bounds": [1, "x"]}, "bounds[1]='x': give a list, or a number of groups"),
        ({"indices": [0, 1, 2.5]}, "indices[2]=2.5: give a list"),
        ({"lengths": 7}, "lengths=7: give a list of whole numbers"),
    ],
)
def test_a_wrong_entry_of_a_list_is_named_with_its_place(data, setting, words):
    assert words in said(lambda: records(data, **setting))


def test_places_and_epochs_are_told_in_words_of_python(data):
    loader = records(data, **STATE)
    next(iter(loader))
    loader.close()
    loader.load_state_dict(loader.state_dict())
    said(lambda: loader.epoch(2**64 - 1))
    said(lambda: loader.epoch(-1))
    for epoch in ("1", 1.5, None, True):
        assert "give a whole number" in said(lambda epoch=epoch: loader.set_epoch(epoch), TypeError)


def test_what_holds_every_batch_is_named_with_the_way_to_copy(data, monkeypatch):
    held = records(data, batch_size=4, slots=2, held_deadline=0.2, ids=True)
    monkeypatch.setattr("sys.last_value", ValueError(), raising=False)
    views = []

    def keep():
        for batch in held:
            views.append(batch["record"][:1])

    words = said(keep, feedline.errors.BatchesHeldError)
    assert "Alive, also by views: 'record' of 2. Keep .copy() in their place. sys.last_value may keep" in words
    views.clear()
    monkeypatch.delattr("sys.last_value")
    words = said(lambda: list(held), feedline.errors.BatchesHeldError)
    assert "last_value" not in words and words.index("copy the data") < words.index("`slots`")


@pytest.mark.parametrize(
    "variables",
    [
        "RANK=1",
        "WORLD_SIZE=4",
        "RANK=x WORLD_SIZE=4",
        "LOCAL_RANK=3",
        "JOB_COMPLETION_INDEX=1",
        "RANK=1 WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=5",
        "SLURM_JOB_ID=7 SLURM_NTASKS=8",
        "SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2",
    ],
)
def test_variables_of_launchers_are_told_in_words_of_python(data, monkeypatch, variables):
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "PMI")) or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("=", 1))
    loader = records(data)
    said(lambda: len(loader), feedline.errors.ConfigError)


def test_the_report_is_in_words_of_python(data):
    loader = records(data, batch_size=2, slots=2, reader="pread", direct="off")
    for _ in range(3):
        assert sum(1 for _ in loader) == COUNT // 2
    text = "\n".join([loader.report(), repr(loader), str(loader.what_if(slots=8, workers=64, depth=999))])
    assert not RUST.search(text), text


@pytest.mark.parametrize(
    "name, words",
    [
        ("num_workers", "`workers`"),
        ("drop_last", 'last_batch="drop"'),
        ("pin_memory", "pinned"),
        ("collate_fn", "`map_batch`"),
        ("timeout", "`stall_deadline`"),
        ("rank", "shard=(rank, world)"),
        ("batchsize", "did you mean batch_size?"),
        ("shufle", "did you mean shuffle?"),
        ("record_byte", "did you mean record_bytes?"),
    ],
)
def test_a_wrong_name_gets_the_right_one(data, name, words):
    message = said(lambda: records(data, **{name: 1}), TypeError)
    assert message.startswith(f"there is no setting '{name}'") and words in message


def test_the_names_of_pytorch_lead_to_settings_that_there_are():
    from feedline._loader import Pictures, Settings, Source
    from feedline._settings import ELSEWHERE

    own = {*Settings.__annotations__, *Pictures.__annotations__, *Source.__annotations__}
    told = {name for words in ELSEWHERE.values() for name in re.findall(r"`(\w+)`|(\w+)=", words) for name in name if name}
    assert told <= own and not set(ELSEWHERE) & own


@pytest.mark.parametrize("name", ["batch_size", "workers", "slots", "depth", "memory_budget", "global_batch", "substitute"])
def test_numbers_are_whole_and_not_negative(data, name):
    message = said(lambda: records(data, **{name: -1}), ValueError)
    assert f"{name}=-1" in message and "whole number from 0" in message
    assert f"{name}=True" in said(lambda: records(data, **{name: True}), TypeError)
    said(lambda: records(data, **{name: 1.5}), TypeError)


def test_lists_of_numbers_may_be_tensors(data):
    torch = pytest.importorskip("torch")
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))
    for name in ("indices", "subset"):
        given = [order, order.numpy(), order.tolist()]
        first, *rest = [[batch["record"].tolist() for batch in records(data, **{name: ids})] for ids in given]
        assert all(other == first for other in rest)
    said(lambda: records(data, indices=torch.rand(3)), TypeError)
    weights = torch.tensor([0.25, 0.75])
    assert len(fl.records([data, data], record_bytes=RECORD, weights=weights, shuffle=1)) > 0


@pytest.mark.parametrize("name", ["indices", "subset"])
def test_a_mask_chooses_the_samples_where_it_is_true(data, name):
    mask = np.arange(COUNT) >= 30
    given = [mask, mask.tolist(), tuple(mask), list(mask)]
    for module, make in (("torch", "as_tensor"), ("pandas", "Series"), ("pyarrow", "array"), ("jax.numpy", "asarray")):
        try:
            given.append(getattr(__import__(module, fromlist=[make]), make)(mask))
        except ImportError:
            pass
    rows = np.fromfile(data, np.uint8).reshape(COUNT, RECORD)[mask]
    for value in given:
        got = np.concatenate([batch["record"].copy() for batch in records(data, **{name: value})])
        assert np.array_equal(got, rows), type(value)
    message = said(lambda: records(data, **{name: mask[1:]}), feedline.errors.ConfigError)
    assert f"{name}: a mask of {COUNT - 1} for {COUNT} samples" in message
    assert "or a mask" in said(lambda: records(data, **{name: [True, 3]}), TypeError)
    assert "or a mask" in said(lambda: records(data, **{name: mask.reshape(2, -1)}), TypeError)


@pytest.mark.parametrize("true", [True, np.True_, np.array(True)], ids=repr)
def test_true_and_false_are_no_numbers(data, true):
    ones = {"lengths": [true] * COUNT, "weights": [true, 1], "shard": (true, 2), "take": (0.5, true), "bounds": [true, 5]}
    for name, value in {**ones, "seed": true, "slots": true, "record_bytes": true, "epoch_len": true, "window": true}.items():
        assert "True" in said(lambda: fl.records(data, **{"record_bytes": RECORD, name: value}), TypeError), name
    assert records(data, shuffle=true).state_dict() == records(data, shuffle=0).state_dict()
    assert len(records(data, in_memory=true)) == 2
    loader = records(data)
    for call in (loader.set_epoch, loader.epoch, loader.estimate, lambda epoch: loader.skip(range(1), epoch)):
        said(lambda: call(true), TypeError)
    said(lambda: feedline.ramp(true, 5, [1], [1]), TypeError)
    said(lambda: feedline.ramp(0, 5, [true], [1]), TypeError)
    drawn = records(data, sample_weights=[1] * COUNT, shuffle=1)
    assert "weights=" in said(lambda: drawn.set_sample_weights([true] * COUNT), TypeError)


def test_values_of_other_libraries_are_taken_for_tuples_and_dicts(data, tmp_path):
    from collections import UserDict, UserList

    image = pytest.importorskip("PIL.Image")
    (tmp_path / "p").mkdir()
    image.new("RGB", (120, 90)).save(tmp_path / "p" / "0.png")
    (tmp_path / "t.bin").write_bytes(bytes(400))
    two = [data, data]

    def images(**settings):
        return next(iter(fl.images(tmp_path / "p", dtype="f32", **settings)))["image"].shape

    for kind in (list, UserList, np.array):
        assert images(size=kind([32, 48])) == (1, 32, 48, 3)
        assert len(records(data, shard=kind([0, 2]))) == 1
        assert images(size=32, normalize=kind([0.5, 0.5])) == (1, 32, 32, 3)
        assert len(records(data, lengths=[1] * COUNT, bounds=kind([5])))
    for kind in (list, UserList):
        assert records(data, take=kind([0.5, 3])).samples_per_epoch < COUNT
        assert len(records(two, shuffle=1, schedule=kind([kind([0, kind([1, 3])])])))
    for shape in ([], UserList(), np.zeros(0, int)):
        loader = records(data, adds={"sum": ("i64", shape)}, map_batch=lambda batch: None)
        assert next(iter(loader))["sum"].shape == (32,)
    assert "tokens is missing" in said(lambda: records(data, packed=UserDict(bins="b.bins")), TypeError)
    loader = records(data)
    loader.set_epoch(np.array(3))
    assert loader.next_epoch == 3
    state = loader.state_dict()
    loader.load_state_dict(UserDict({name: np.array(value) for name, value in state.items()}))
    assert loader.state_dict() == state
    assert "from 0 to 2**64 - 1" in said(lambda: records(data, shuffle=2**64), ValueError)
    assert "from 0 to 2**32 - 1" in said(lambda: records(data, lanes=2**32), ValueError)


class Growing:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return np.float32(index)


@pytest.mark.filterwarnings("ignore::feedline.PythonCostWarning")
@pytest.mark.parametrize("then", [4, 12])
def test_a_dataset_that_grew_or_shrank_ends_the_run(then):
    dataset = Growing(8)
    loader = fl.dataset(dataset, batch_size=4)
    assert len(list(loader)) == 2
    dataset.count = then
    message = said(lambda: list(loader), feedline.errors.ChangedError)
    assert f"has {then} samples, 8 when the loader was built" in message


@pytest.mark.filterwarnings("ignore::feedline.PythonCostWarning")
def test_a_dataset_that_is_none_is_refused_in_words():
    class Stream:
        def __iter__(self):
            return iter(range(3))

    assert "map-style" in said(lambda: fl.dataset(Stream()), TypeError)
    assert "'0' of a sample" in said(lambda: fl.dataset([(((1, 2), (3,)), 4)]), TypeError)

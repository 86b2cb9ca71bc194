"""Ranks that show up after the loader was built, and what frameworks ask of a loader.

    pytest python/tests/test_ranks.py
"""

import json
import warnings
from itertools import islice

import numpy as np
import pytest

import feedline
import feedline.numpy

COUNT, BATCH = 101, 16


@pytest.fixture
def data(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "records.bin"
    np.arange(COUNT, dtype=np.int64).tofile(path)
    return path


def loader(path, **settings):
    return feedline.numpy.records(path, record_bytes=8, **{"batch_size": BATCH, **settings})


def rows(batches):
    return [batch["record"].view(np.int64)[:, 0].tolist() for batch in batches]


@pytest.fixture
def group(monkeypatch):
    """Gives this process a rank, as torch.distributed does; None ends the group."""

    def be(ranks):
        monkeypatch.setattr(feedline.numpy.Loader, "_ranks", classmethod(lambda _: ranks))

    return be


USES = {
    "len": len,
    "state_dict": lambda loader: loader.state_dict(),
    "batch_size": lambda loader: loader.batch_size,
    "dataset": lambda loader: len(loader.dataset),
    "sampler": lambda loader: len(loader.sampler),
    "shard": lambda loader: loader.shard,
    "device": lambda loader: loader.device,
    "a batch": lambda loader: next(iter(loader)),
}


@pytest.mark.parametrize("use", USES)
def test_a_world_that_differs_from_the_one_that_was_told_is_an_error_on_every_rank(data, group, use):
    for rank in range(2):
        group(None)
        early = loader(data)
        USES[use](early)
        group((rank, 2))
        for later in USES.values():
            with pytest.raises(feedline.errors.ConfigError, match=rf"as rank 0 of 1; now this process is rank {rank} of 2.*shard="):
                later(early)


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_have_equally_many_rows(data, world):
    fl = pytest.importorskip("feedline.torch")

    lengths = np.random.default_rng(0).integers(1, 30, COUNT)

    def sizes(**settings):
        ranks = [fl.records(data, record_bytes=8, shard=(rank, world), device="cpu", **settings) for rank in range(world)]
        return {tuple(len(batch) for batch in loader) for loader in ranks}

    budget = {"lengths": lengths, "bounds": 6, "budget": 256}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of a process that has used Accelerate.
        warnings.filterwarnings("ignore", "the last batch of groups is filled up")
        assert len(sizes(**budget)) == len(sizes(**budget, multiple_of=6)) == len(sizes(global_batch=6)) == 1
    for settings, words in (({"global_batch": 11}, "global_batch="), ({**budget, "multiple_of": 1}, f"a multiple of {world}")):
        with pytest.warns(UserWarning, match=f"some have a row more than others.*give {words}"):
            assert len(sizes(**settings)) > 1


def test_ranks_are_asked_for_when_they_are_needed(data, group):
    ranks = []
    for rank in range(2):
        group(None)
        late = loader(data, memory_budget=1 << 20)
        late.spec(), late.report(), repr(late), late.set_epoch(0)
        group((rank, 2))
        assert late.shard == (rank, 2) and len(late) == 4
        ranks.append(rows(late))
        # A group that ended says nothing of the ranks.
        group(None)
        assert len(late) == 4 and len(rows(late)) == 4
    gathered = [id for pair in zip(*ranks) for part in pair for id in part]
    assert gathered[:COUNT] == list(range(COUNT))


def test_a_given_rank_is_not_asked_for(data, group):
    given, alone = loader(data, shard=(1, 3)), loader(data, shard=None)
    group((0, 2))
    assert given.shard == (1, 3) and alone.shard == (0, 1) and len(rows(alone)) == 7


def test_variables_that_contradict_each_other_count_when_a_rank_is_needed(data, group, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    early, late = loader(data), loader(data)
    with pytest.raises(feedline.errors.ConfigError, match="RANK=1 is set but WORLD_SIZE is not"):
        len(early)
    group((1, 2))
    assert late.shard == (1, 2)


def test_a_loader_that_does_not_fit_its_ranks_says_so_each_time(data, group):
    late = loader(data, last_batch="mask", ids=True, batch_size=None, global_batch=2)
    group((1, 3))
    for _ in range(2):
        with pytest.raises(feedline.errors.ConfigError, match="a global batch of 2 for 3 ranks"):
            next(iter(late))
    group((1, 2))
    assert late.shard == (1, 2)


def test_it_has_what_frameworks_ask_of_a_dataloader(data):
    run = loader(data, shuffle=3)
    assert (run.batch_size, run.drop_last, len(run.dataset), len(run.sampler), run.num_workers) == (16, False, 101, 101, 0)
    assert loader(data, last_batch="drop").drop_last and len(loader(data, shard=(0, 2), global_batch=30).batch_sampler) == 4
    whole = [id for batch in rows(run) for id in batch]
    again = loader(data, shuffle=3)
    assert list(again.sampler) == whole and whole != sorted(whole)
    with pytest.raises(TypeError, match="feedline reads whole batches"):
        run.dataset[3]
    assert feedline.numpy.Loader.dataset is not run.dataset


def test_batches_are_skipped_without_reading_them(data):
    want = [rows(loader(data, shuffle=3).epoch(epoch)) for epoch in range(2)]
    for skipped in (0, 1, 4, 6):
        run = loader(data, shuffle=3)
        for epoch in range(2):
            items = islice(run.batch_sampler, skipped, None)
            assert rows(run.collate_fn(run.dataset.__getitems__(item)) for item in items) == want[epoch][skipped:]
            run.set_epoch(epoch + 1)
    run = loader(data, shuffle=3)
    run.load_state_dict(loader_at(data, 3))
    with pytest.raises(RuntimeError, match="batch 2 of epoch 0 is behind the loaded state, which is at batch 3"):
        run.dataset.__getitems__(next(islice(run.batch_sampler, 2, None)))
    assert rows(run.dataset.__getitems__(next(islice(run.batch_sampler, 4, None)))) == [want[0][4]]
    for item in ([4], next(iter(run.batch_sampler)) + [1], list(run.batch_sampler)[0]):
        with pytest.raises(TypeError, match="feedline reads whole batches"):
            run.dataset.__getitems__(item)
    # As what deals out every second batch to a rank.
    with pytest.raises(TypeError, match="batch 1 was passed over: loop over the loader as it is"):
        for number, item in enumerate(run.batch_sampler):
            if number % 2 == 0:
                run.dataset.__getitems__(item)


def loader_at(data, batch):
    run = loader(data, shuffle=3)
    for number, _ in enumerate(run, 1):
        if number == batch:
            return run.state_dict()
    raise AssertionError


def test_an_iterator_that_failed_never_looks_like_one_at_its_end():
    import warnings

    class Bad:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            if index == 25:
                raise KeyError("mine")
            return np.int64(index)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = feedline.numpy.dataset(Bad(), batch_size=10)
    loop = iter(run)
    next(loop), next(loop)
    with pytest.raises(feedline.errors.UserCodeError):
        next(loop)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this epoch was ended by an error .*mine.*load_state_dict"):
            next(loop)
    state = run.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 2)
    run.load_state_dict(state)
    with pytest.raises(feedline.errors.UserCodeError):
        next(iter(run))


def test_a_place_at_the_end_of_an_epoch_outlives_choices_that_are_taken_back(data):
    want = [rows(loader(data, shuffle=3).epoch(epoch)) for epoch in range(3)]
    end = loader_at(data, 7)
    run = loader(data, shuffle=3)
    run.load_state_dict(end)
    run.set_epoch(2), run.set_epoch(0)
    assert run.state_dict() == end and run.next_epoch == 0
    run.set_epoch(1)
    assert run.state_dict()["epoch"] == 1 and rows(run) == want[1]
    # Skipping begins with the next epoch, since nothing is left of this one.
    run.load_state_dict(end)
    assert rows(run.dataset.__getitems__(item)[0] for item in run.batch_sampler) == want[1]
    with pytest.raises(TypeError, match="a state is a dict, not NoneType"):
        run.load_state_dict(None)


def test_variables_that_change_once_a_rank_was_told_are_an_error(data, monkeypatch):
    run = loader(data)
    assert len(run) == 7
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(feedline.errors.ConfigError, match="as rank 0 of 1; now this process is rank 1 of 2"):
        next(iter(run))


def test_skipped_batches_are_left_out(data):
    want = [rows(loader(data, shuffle=3).epoch(epoch)) for epoch in range(2)]
    run = loader(data, shuffle=3)
    run.skip(range(2, 4)), run.skip(range(5), epoch=1)
    first = run.epoch(0)
    assert len(run) == 7 and len(first) == 5
    assert rows(next(first) for _ in range(2)) == want[0][:2]
    state = run.state_dict()
    assert state["skip"] == [[1, 0, 5]] and state["batch"] == 4
    run.close()
    run.load_state_dict(state)
    assert (rows(run), rows(run)) == (want[0][4:], want[1][5:])
    for batches, error, words in [
        (range(9, 10), feedline.errors.ConfigError, "batches 9..10 of epoch 2: the epoch ends at 7"),
        (range(5, 3), feedline.errors.ConfigError, "empty or reversed"),
        (range(-3, 2), feedline.errors.ConfigError, r"range\(-3, 2\): batches count from 0"),
        (range(0, 2**70), feedline.errors.ConfigError, r"an epoch has fewer than 2\^64 batches"),
        (range(0, 4, 2), TypeError, r"give a range, as in skip\(range\(100, 120\)\)"),
        (3, TypeError, "batches=3: give a range"),
    ]:
        with pytest.raises(error, match=words):
            run.skip(batches)


class Mesh:
    """As much of a DeviceMesh as is looked at."""

    def __init__(self, **axes):
        self.mesh_dim_names, self.sizes, self.ndim = tuple(axes), tuple(axes.values()), len(axes)

    def size(self, axis):
        return self.sizes[axis]


@pytest.mark.parametrize(
    "axes, shared",
    [
        ({"dp": 4}, False),
        ({"tp": 4}, True),
        ({"anything": 4}, False),
        ({"dp": 2, "tp": 2}, True),
        ({"dp": 4, "tp": 1, "cp": 1}, False),
        ({"dp_replicate": 2, "dp_shard": 2}, False),
        ({"data_parallel": 2, "tensor_parallel": 2}, True),
        ({"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 2, "tp": 2}, True),
        ({"dp": 2, "ep": 2}, False),
        ({"x": 2, "y": 2}, True),
        ({"dptp": 2, "dp": 2}, True),
    ],
)
def test_axes_that_share_data_are_known_by_their_names(axes, shared):
    from feedline import _ranks

    assert _ranks._shares(Mesh(**axes)) is shared


def test_a_folder_carries_the_reports_of_ranks_and_names_missing_ones(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    views = []
    for number in (0, 2):
        monkeypatch.setenv("RANK", str(number))
        own = loader(data)
        rows(own)
        views.append(own.across(tmp_path / "ranks"))
    assert [view["missing"] for view in views] == [[1, 2], [1]]
    assert [rank["rank"] for rank in views[1]["ranks"]] == [0, 2]
    assert "without a report: 1" in views[1]["text"]
    # A process that died long ago left its report.
    old = tmp_path / "ranks/rank-0.json"
    report = json.loads(old.read_text())
    old.write_text(json.dumps({**report, "at": report["at"] - 3600}))
    assert own.across(tmp_path / "ranks")["missing"] == [0, 1]
    # So did a job of another size.
    old.write_text(json.dumps({**report, "report": {**report["report"], "world": 8}}))
    assert own.across(tmp_path / "ranks")["missing"] == [0, 1]
    with pytest.raises(feedline.errors.ConfigError, match="another loader of this process reports in"):
        loader(data).across(tmp_path / "ranks")
    (tmp_path / "other/rank-2.json").mkdir(parents=True)
    for one in (own, loader(data)):
        with pytest.raises(IsADirectoryError):
            one.across(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["rank-2.json"]
    (tmp_path / "ranks/rank-1.json").write_text("{}")
    with pytest.raises(ValueError, match="rank-1.json: no report of a rank"):
        own.across(tmp_path / "ranks")


def test_a_communicator_carries_the_reports(data):
    own, other = loader(data, shard=(0, 2)), loader(data, shard=(1, 2))
    rows(own), rows(other)
    own.arrive()

    class Communicator:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 2

        def allgather(self, report):
            return [report, other._rank_report(1, 2)]

    view = own.across(Communicator())
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1] and view["missing"] == []
    assert own.across()["missing"] == [], "a process alone"
    with pytest.raises(feedline.errors.ConfigError, match="by=3: give a process group, a communicator of mpi4py, or a folder"):
        own.across(3)


def test_an_estimate_tells_the_cost_of_an_epoch(data):
    made = feedline.estimate(loader(data), step_s=2.0)
    assert made["bound_by"] == "consumer" and made["items_per_s"] == pytest.approx(7.2, abs=0.1), "14.4 rows a batch"
    assert made["epoch"]["samples"] == COUNT and made["epoch"]["batches"] == 7 and made["memory_bytes"] > 0
    assert made["text"].startswith("rate ") and "101 samples, 7 batches" in made["text"]
    with pytest.raises(RuntimeError, match="no batch behind the first one of an epoch"):
        loader(data).estimate(1.0)
    with pytest.raises(ValueError, match="step_s=-1: give seconds from 0"):
        feedline.estimate(loader(data), step_s=-1)
    with pytest.raises(ValueError, match="seconds=nan"):
        feedline.estimate(loader(data), step_s=1, seconds=float("nan"))

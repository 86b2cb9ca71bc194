"""hf:// URLs against a scripted Hub, which Hugging Face's own client reads, too. The real Hub is not asked.

    pytest python/tests/test_hub.py
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import feedline.numpy as fl
from feedline import errors
from hub import Hub, oid

RANKS = 64
USERS = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ASSETS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"]
FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
ODD = "data/a b%20 ü+[1]&=.bin"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub, and an environment without tokens of the user."""
    hub = Hub()
    for name in USERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    # A process keeps the commit of a name, so each test has a repository of its own.
    hub.name = f"org/{tmp_path.name}"
    hub.repo = f"datasets/{hub.name}"
    yield hub
    hub.close()


def numbers(count, start=0):
    return np.arange(start, start + count, dtype=np.int64).tobytes()


def read(url, **settings):
    """All records of an epoch."""
    loader = fl.records(url, record_bytes=8, **{"batch_size": 16, "shard": None, **settings})
    return [x for batch in loader for x in batch["record"].view(np.int64)[:, 0].tolist()]


def process(code, **variables):
    """Runs a program of its own; returns what it prints."""
    code = "import json, os, sys\nimport numpy as np\nimport feedline, feedline.numpy as fl\n" + textwrap.dedent(code)
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_own_client_of_hugging_face_reads_the_scripted_hub(hub, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    files = {"data/train-0.bin": numbers(500), ODD: numbers(100), "README.md": b"small"}
    commit = hub.commit(hub.repo, files)
    hub.page, hub.token = 2, "hf_right"
    api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=hub.token)
    assert api.repo_info(hub.name, repo_type="dataset").sha == commit
    listed = api.list_repo_tree(hub.name, repo_type="dataset", recursive=True)
    sizes = {path: len(data) for path, data in files.items()}
    assert {entry.path: entry.size for entry in listed if hasattr(entry, "size")} == sizes
    system = huggingface_hub.HfFileSystem(endpoint=hub.endpoint, token=hub.token, skip_instance_cache=True)
    for path, data in files.items():
        kept = api.hf_hub_download(hub.name, path, repo_type="dataset", cache_dir=tmp_path)
        assert Path(kept).read_bytes() == data
        assert system.cat_file(f"{hub.repo}/{path}") == data
        with system.open(f"{hub.repo}/{path}", block_size=64) as file:
            file.seek(2)
            assert file.read(3) == data[2:5]
    for name, path, error in [
        (hub.name, "none.bin", huggingface_hub.errors.EntryNotFoundError),
        (hub.name + "x", "a", huggingface_hub.errors.RepositoryNotFoundError),
    ]:
        with pytest.raises(error):
            api.hf_hub_download(name, path, repo_type="dataset", cache_dir=tmp_path)
    assert not [entry for entry in hub.asked("", "cdn") if entry["token"]]


@pytest.mark.parametrize("kind", ["datasets", "models", "spaces"])
def test_every_kind_of_name_finds_its_files(hub, kind):
    repo = f"{kind}/{hub.name}"
    files = {ODD: numbers(100), "data/b.bin": numbers(100, 100), "data/sub/c.bin": numbers(10, 200)}
    files["d.bin"] = numbers(9, 300)
    commit = hub.commit(repo, files)
    hub.refs[repo, "refs/convert/parquet"] = hub.refs[repo, "a/b"] = commit
    hub.page = 2
    url = "hf://" + (hub.name if kind == "models" else repo)
    for place, right in [
        ("/data/*.bin", [*range(200)]),
        ("@main/data/b.bin", [*range(100, 200)]),
        ("/data/{b,sub/c}.bin", [*range(100, 210)]),
        ("@refs/convert/parquet/data/sub/", [*range(200, 210)]),
        ("@~parquet/d.bin", [*range(300, 309)]),
        ("@a%2Fb/data/**", [*range(210)]),
        (f"@{commit}/**/*.bin", [*range(210), *range(300, 309)]),
    ]:
        assert sorted(read(url + place)) == right, place
    assert read(f"{url}/{ODD.replace('[', '[[]')}") == [*range(100)]


FORMATS = [
    ("npy", "npy/same-?.npy", {}),
    ("npz", "npy/table.npz", {"rows": True}),
    ("safetensors", "safetensors/torch-{0,1}.safetensors", {"columns": ["half", "label"]}),
    ("tokens", "tokens/flat.bin", {"token": "u16", "seq_len": 8}),
    ("megatron", "tokens/megatron-u16", {"seq_len": 8}),
    ("mds", "mds/fixed", {}),
    ("parquet", "parquet/plain.parquet", {"columns": ["f3"]}),
    ("images", "jpeg/", {"size": 32}),
    ("jsonl", "jsonl/small.jsonl", {"up_to": 4096}),
    ("jsonl", "jsonl/small.jsonl.gz", {"up_to": 4096}),
    ("webdataset", "tar/webdataset.tar", {"columns": ["cls"]}),
    ("tfrecord", "tfrecord/plain.tfrecord", {"up_to": 4096}),
]


@pytest.mark.parametrize(("source", "place", "settings"), FORMATS, ids=[place for _, place, _ in FORMATS])
def test_every_format_is_the_same_from_the_hub(hub, tmp_path, source, place, settings):
    folder = shutil.copytree(FIXTURES / place.split("/")[0], tmp_path / "files" / place.split("/")[0])
    found = [path for path in folder.rglob("*") if path.is_file()]
    hub.commit(hub.repo, {str(path.relative_to(tmp_path / "files")): path.read_bytes() for path in found})

    def batches(start):
        loader = getattr(fl, source)(f"{start}/{place}", batch_size=2, shard=None, **settings)
        opened = len(hub.asked("", "cdn"))
        return opened, [{name: value.tolist() for name, value in batch.items()} for batch in loader]

    _, right = batches(tmp_path / "files")
    assert batches(f"hf://{hub.repo}")[1] == right
    before = len(hub.asked("", "cdn"))
    opened, again = batches(f"hf://{hub.repo}@main")
    assert again == right
    assert opened == before, "headers, footers and indexes are shared"


def test_the_ranks_of_a_node_ask_once_for_each_thing_and_wait_together(hub, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = {}
    for number in range(4):
        table = pa.table({"x": np.arange(number * 4000, number * 4000 + 4000)})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=500)
        files[f"data/train-{number}.parquet"] = (tmp_path / "a.parquet").read_bytes()
    hub.commit(hub.repo, files)
    hub.page = 3
    hub.limit("api", 3, 2)
    hub.limit("resolvers", 6, 1)
    found = process(f"""
        import multiprocessing
        def work(rank):
            loader = fl.parquet("hf://{hub.repo}@main/data/train-*.parquet", columns=["x"], batch_size=25, shard=(rank, {RANKS}),
                                cache={str(tmp_path / "cache")!r}, workers=1, memory_budget=64 << 20)
            return [int(x) for batch in loader for x in batch["x"]]
        context = multiprocessing.get_context("fork")
        with context.Pool({RANKS}) as pool:
            print(json.dumps(pool.map(work, range({RANKS}), 1)))
    """)
    assert sorted(x for rank in found for x in rank) == [*range(16000)]
    once = {"/revision/": 1, "/tree/": 2}
    assert {part: len(hub.asked(part)) for part in once} == once
    for data in files.values():
        ranges = [entry["range"] for entry in hub.asked(oid(data), "cdn")]
        assert len(ranges) == len(set(ranges)), "a range twice"
        assert ranges.count(f"bytes=0-{len(data) - 1}") == 1, ranges
    refused = [entry for entry in hub.asked("/resolve/") if entry["refused"]]
    assert len(refused) < RANKS, "each rank ran into the limit by itself"


def test_a_storm_of_429_slows_and_does_not_fail(hub):
    hub.commit(hub.repo, {f"{number:02}.bin": numbers(100, number * 100) for number in range(12)})
    hub.limit("api", 1, 1)
    hub.limit("resolvers", 4, 1)
    began = time.monotonic()
    assert sorted(read(f"hf://{hub.repo}/*.bin", shuffle=7, stall_deadline=20)) == [*range(1200)]
    assert time.monotonic() - began > 2
    refused = len(hub.asked("")) - len(hub.asked("/revision/")) - len(hub.asked("/tree/")) - 12
    assert refused < 40, "asked again and again"


def test_signed_urls_that_expire_and_hosts_that_change_go_unnoticed(hub):
    hub.commit(hub.repo, {f"{number}.bin": numbers(1000, number * 1000) for number in range(3)})
    hub.uses, hub.cdn_hosts = 20, ["localhost", "127.0.0.1"]
    found = read(f"hf://{hub.repo}/*.bin", shuffle=3, batch_size=100)
    assert sorted(found) == [*range(3000)]
    assert len(hub.asked("/resolve/")) > 3
    assert {entry["name"].split(":")[0] for entry in hub.asked("", "cdn")} == {"localhost", "127.0.0.1"}


RESUME = """
    loader = fl.records("hf://{url}/*.bin", record_bytes=8, batch_size=10, shard=None, shuffle=1)
    state = os.environ.get("STATE")
    try:
        if state:
            loader.load_state_dict(json.loads(state))
        batches = iter(loader)
        rows = [batch["record"].view(np.int64)[:, 0].tolist() for _, batch in zip(range(100 if state else 4), batches)]
        print(json.dumps({{"rows": rows, "state": loader.state_dict()}}, default=lambda b: b.decode()))
    except feedline.errors.Error as error:
        print(json.dumps({{"error": str(error)}}))
"""


def test_a_moved_branch_is_named_with_both_commits_when_a_run_resumes(hub, monkeypatch, tmp_path):
    def run(url, **variables):
        return process(RESUME.format(url=url), **variables)

    files = {"a.bin": numbers(200), "b.bin": numbers(200, 200)}
    first = hub.commit(hub.repo, files)
    began = run(hub.repo)
    state = json.dumps(began["state"])
    monkeypatch.setenv("HF_HOME", str(tmp_path / "another machine"))
    # The same files in another commit are the same dataset.
    hub.commit(hub.repo, {**files, "README.md": b"news"})
    whole = sum(began["rows"] + run(hub.repo, STATE=state)["rows"], [])
    assert sorted(whole) == [*range(400)]
    second = hub.commit(hub.repo, {**files, "b.bin": numbers(200, 900)})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "a third machine"))
    error = run(hub.repo, STATE=state)["error"]
    assert f"hf://{hub.repo}@{first} (commit {second} is open)" in error
    whole = sum(began["rows"] + run(f"{hub.repo}@{first}", STATE=state)["rows"], [])
    assert sorted(whole) == [*range(400)]


def test_a_branch_that_moves_during_a_run_changes_nothing(hub):
    hub.commit(hub.repo, {"a.bin": numbers(300)})
    loader = fl.records(f"hf://{hub.repo}/a.bin", record_bytes=8, batch_size=10, shard=None, shuffle=1)
    for _ in range(2):
        assert sorted(x for batch in loader for x in batch["record"].view(np.int64)[:, 0].tolist()) == [*range(300)]
        hub.commit(hub.repo, {"a.bin": numbers(300, 5000)})
    assert read(f"hf://{hub.repo}@main/a.bin") == [*range(300)]


@pytest.mark.parametrize("place", ["variable", "file", "path"])
def test_a_token_goes_to_the_hub_alone(hub, monkeypatch, tmp_path, place):
    hub.token = "hf_do-not-show-me"
    files = {"HF_HOME": tmp_path / "hf" / "token", "HF_TOKEN_PATH": tmp_path / "secret"}
    if place == "variable":
        monkeypatch.setenv("HF_TOKEN", hub.token)
    else:
        file = files["HF_HOME" if place == "file" else "HF_TOKEN_PATH"]
        file.parent.mkdir(exist_ok=True)
        file.write_text(hub.token + "\n")
        monkeypatch.setenv("HF_TOKEN_PATH", str(file)) if place == "path" else None
    hub.commit(hub.repo, {"a.bin": numbers(100), "b.bin": b"12345678"})
    assert len(read(f"hf://{hub.repo}/*.bin")) == 101
    assert {entry["token"] for entry in hub.asked("")} == {f"Bearer {hub.token}"}
    assert {entry["token"] for entry in hub.asked("", "cdn")} == {None}


ERRORS = [
    # What the Hub has, the URL, the error, its words.
    ({}, "hf://datasets/{name}x/a.bin", errors.AccessError, "there is no datasets/{name}x, or it is private"),
    ({"gated": True}, "hf://{repo}/a.bin", errors.AccessError, "is gated: accept its conditions at {endpoint}/{repo}"),
    ({"token": "hf_a", "given": "hf_b"}, "hf://{repo}/a.bin", errors.AccessError, "Invalid credentials in Authorization header"),
    ({}, "hf://{repo}@v9/a.bin", errors.NotFoundError, "has no branch, tag or commit \"v9\""),
    ({}, "hf://{repo}/b.bin", errors.NotFoundError, "no such file or folder at commit"),
    ({}, "hf://{repo}/none/*.bin", errors.NotFoundError, "no such file or folder at commit"),
    ({}, "hf://buckets/{name}/a.bin", errors.ConfigError, "buckets and kernels of the Hub are not read"),
    ({}, "hf://dataset/{name}/a.bin", errors.ConfigError, "not a repository of the Hub"),
    ({"offline": True}, "hf://{repo}/a.bin", errors.ConfigError, "HF_HUB_OFFLINE is set, and this was not read"),
]


@pytest.mark.parametrize("case", ERRORS, ids=[words[:30] for *_, words in ERRORS])
def test_an_error_says_what_to_do_and_shows_no_token(hub, monkeypatch, case):
    has, url, kind, words = case
    hub.commit(hub.repo, {"a.bin": numbers(100)})
    hub.gated, hub.token = has.get("gated", False), has.get("token")
    if "given" in has:
        monkeypatch.setenv("HF_TOKEN", has["given"])
    if "offline" in has:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names = {"name": hub.name, "repo": hub.repo, "endpoint": hub.endpoint}
    with pytest.raises(kind) as error:
        read(url.format(**names))
    assert words.format(**names) in str(error.value)
    assert "hf_" not in str(error.value)


def test_offline_reads_what_the_machine_has(hub, tmp_path):
    hub.commit(hub.repo, {"a.bin": numbers(300), "b.bin": numbers(300, 300)})
    code = f"""
        loader = fl.records("hf://{hub.repo}/*.bin", record_bytes=8, batch_size=10, shard=None, cache={str(tmp_path / "cache")!r})
        print(json.dumps([int(x) for batch in loader for x in batch["record"].view(np.int64)[:, 0]]))
    """
    assert process(code) == [*range(600)]
    before = len(hub.log)
    assert process(code, HF_HUB_OFFLINE="1") == [*range(600)]
    assert len(hub.log) == before

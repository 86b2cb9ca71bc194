"""The package has what the crate has: builder settings, formats and kinds of errors."""

import importlib.metadata
import re
from pathlib import Path

import feedline
from feedline import errors
from feedline._loader import Pictures, Settings, Texts

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

#: Settings of the crate's builder: those of the package, or the reason why there is none.
BUILDER = {
    "decode": {"size", "buckets", "augment", "decoders"},
    "decode_field": {"size", "augment", "decoders"},
    "map": "decoders and datasets are Python's functions of a sample",
    "map_adding": "as map",
    "map_batch": {"map_batch"},
    "map_batch_adding": {"map_batch", "adds"},
    "map_batch_in_turn": "the package says it of each map_batch",
    "keep": {"keep"},
    "ragged": {"ragged"},
    "finish": {"dtype", "normalize", "layout"},
    "order": {"shuffle", "window", "lanes", "indices", "weights", "schedule", "epoch_len", "lengths", "bounds", "budget",
              "multiple_of", "trim", "sizes", "sample_weights", "weights_of", "draws", "replacement"},
    "seed": {"seed"},
    "batch_size": {"batch_size"},
    "global_batch": {"global_batch"},
    "rank": {"shard"},
    "resume": "load_state_dict",
    "resume_rebatched": "load_state_dict(…, rebatched=True)",
    "stop": {"stop_on_signals"},
    "last_batch": {"last_batch"},
    "last_batch_share": {"last_batch_share"},
    "workers": {"workers"},
    "memory_budget": {"memory_budget"},
    "shared_budget": {"sharding"},
    "cache": {"cache", "cache_bytes"},
    "device": {"device"},
    "stream": {"streams"},
    "stream_as": {"streams"},
    "on_bad_sample": {"substitute"},
    "ledger": {"ledger"},
}
#: The same of its `tuning`.
TUNING = {
    "slots": {"slots"},
    "reader": {"reader"},
    "direct": {"direct"},
    "depth": {"depth"},
    "device_batches": {"device_batches"},
    "gds": {"gds"},
    "cufile_any_route": "for tests of the crate",
    "cufile_at": "for tests of the crate",
    "numa": {"numa"},
    "faulty": "for tests of the crate",
    "unmeasured": "for benches of the crate",
    "held_deadline": {"held_deadline"},
    "stall_deadline": {"stall_deadline"},
}
#: Formats and wrappers of the crate: the function or setting of the package.
DATASETS = {
    "Images": "images",
    "Records": "records",
    "Tokens": "tokens",
    "Megatron": "megatron",
    "Tar": "webdataset",
    "TfRecord": "tfrecord",
    "Jsonl": "jsonl",
    "Arrow": "arrow",
    "Parquet": "parquet",
    "Npy": "npy",
    "Npz": "npz",
    "SafeTensors": "safetensors",
    "Mds": "mds",
}
WRAPPERS = {"split": "take", "subset": "subset", "facts": "lengths_file"}
#: Facts of the crate: the setting of the package.
FACTS = {"checksums": "checked", "lengths": "lengths_file", "seek_points": "seek_points", "picture_sizes": None}
WRAPPERS |= {"in_memory": "in_memory", "in_memory_within": "in_memory", "packed": "packed", "copied": "packed"}
WRAPPERS |= {"join": "join", "tokenized": "tokenizer"}
WRAPPERS |= {"lengths": None, "field_bytes_max": None, "read_sample": None}


def settings():
    return {name for kind in (Settings, Pictures, Texts) for name in kind.__annotations__}


def test_the_version_is_that_of_the_package():
    assert feedline.__version__ == importlib.metadata.version("feedline")


def test_every_setting_of_the_builder_has_one_here_or_a_reason():
    def methods(file):
        text = (SRC / "loader" / file).read_text()
        return set(re.findall(r"^    pub fn (\w+)(?:<[^>]*>)?\(\s*(?:mut )?self", text, re.M))

    assert methods("settings.rs") == set(BUILDER)
    assert methods("tuning.rs") == {"tuning"} | set(TUNING)
    table = BUILDER | TUNING
    named = {name for value in table.values() if isinstance(value, set) for name in value}
    assert named <= settings()


def test_every_format_and_wrapper_has_a_name_here():
    text = (SRC / "dataset" / "mod.rs").read_text()
    exported = {name for line in re.findall(r"pub use [^;]*;", text) for name in re.findall(r"\b[A-Z]\w+", line)}
    assert set(DATASETS) <= exported
    folders = (ROOT / "crates/formats/src", ROOT / "crates/text/src")
    files = [*(file for folder in folders for file in folder.rglob("*.rs")), ROOT / "crates/parquet/src/lib.rs"]
    # What these open is no dataset.
    files = [file for file in files if file.parent not in (ROOT / "crates/text/src/chat", ROOT / "crates/text/src/tokens")]
    names = {"mod": lambda file: file.parent.name, "lib": lambda file: file.parents[1].name}
    openers = {names.get(file.stem, lambda file: file.stem)(file) for file in files if "pub fn open(" in file.read_text()}
    assert openers == {name.lower() for name in DATASETS}
    for name in DATASETS.values():
        assert callable(getattr(feedline.Loader, name))
    extension = (SRC / "dataset" / "ext.rs").read_text().split("pub trait DatasetExt")[1].split("\nimpl")[0]
    assert set(re.findall(r"^    fn (\w+)(?:<[^>]*>)?\(", extension, re.M)) == set(WRAPPERS)
    facts = (SRC / "dataset" / "wrap" / "facts" / "mod.rs").read_text()
    wanted = set(re.findall(r"^    pub fn (\w+)\((?:mut )?self[^)]*\) -> Self", facts, re.M))
    assert wanted == set(FACTS) | {"anew"}
    assert {name for name in (WRAPPERS | FACTS).values() if name} <= settings()


def test_every_kind_of_error_has_a_class_with_its_words():
    text = (ROOT / "crates/base/src/error.rs").read_text()
    kinds = text.split("impl ErrorKind")[1].split("impl ")[0]
    words = set(re.findall(r'Self::\w+ => "([^"]+)"', kinds))
    assert words and words == set(errors.CLASSES)
    assert all(issubclass(value, errors.Error) for value in errors.CLASSES.values())

"""Tokens and chat templates: ids, masks and texts equal to those of the installed `tokenizers` and `transformers`."""

import datetime
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import ConfigError, DecodeError, Error

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

FIXTURES = Path(__file__).parents[2] / "tests/fixtures"
KINDS = ["bpe", "wordpiece", "unigram"]
TEXTS = ["", "Hello, tokens", "Größe <s>🙂 e\u0301", "a  b\0\n\t\x7f", "日本語 мир Ελλάδα नमस्ते مرحبا"]
TEXTS += ["x" * 300, "</s><|im_start|>user\n", "\u200b\u2028ﬁ"]
SETTINGS = {"device": "cpu", "shard": None, "batch_size": 4}
TEMPLATE = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}
{% else %}{{ m.content }}{% if tools %}
{{ tools | tojson }}{% endif %}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}{% if mark is defined %}{{ mark }}{% endif %}"""
LINES = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f" {text}\n"}] * (1 + number % 2)}
    | ({"tools": [{"name": text, "x": [1.0, None]}]} if number % 3 == 0 else {})
    | ({"chat_template_kwargs": {"mark": number}} if number % 4 == 1 else {})
    for number, text in enumerate(TEXTS)
]  # fmt: skip


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(loader, name="input_ids"):
    for batch in loader:
        for row, length in zip(np.asarray(batch[name]), np.asarray(batch[f"{name}.lens"])):
            assert not row[int(length) :].any()
            yield row[: int(length)].tolist()


def model(folder, **config):
    """A model's folder, and its tokenizer by transformers."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((FIXTURES / "tokenizers/bpe.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def opened(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_tokenizers(kind, tmp_path):
    file = FIXTURES / f"tokenizers/{kind}.json"
    path, judge = lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), tokenizers.Tokenizer.from_file(str(file))
    for special in [True, False]:
        loader = fn.jsonl(path, tokenizer=file, max_length=400, special_tokens=special, **SETTINGS)
        assert list(rows_of(loader)) == [judge.encode(text, add_special_tokens=special).ids for text in TEXTS]
    for side in ["right", "left"]:
        judge.enable_truncation(5, direction=side)
        loader = fn.jsonl(path, tokenizer=file, max_length=5, truncation=side, **SETTINGS)
        assert list(rows_of(loader)) == [judge.encode(text).ids for text in TEXTS]
    with pytest.raises(Error, match=r"`input_ids` takes at most 5, the sample has .*a\.jsonl member=line"):
        list(fn.jsonl(path, tokenizer=file, max_length=5, **SETTINGS))


def test_conversations_are_those_of_transformers(tmp_path):
    path = lines(tmp_path / "a.jsonl", LINES)
    folder = model(tmp_path / "model", chat_template=TEMPLATE)
    judge = opened(folder)
    loader = fn.jsonl(path, tokenizer=folder, chat=True, max_length=2000, **SETTINGS)
    expected = [
        judge.apply_chat_template(
            line["messages"], tools=line.get("tools"), return_dict=True, return_assistant_tokens_mask=True,
            **line.get("chat_template_kwargs", {}),
        )
        for line in LINES
    ]  # fmt: skip
    assert list(rows_of(loader)) == [row["input_ids"] for row in expected]
    assert list(rows_of(loader, "loss")) == [row["assistant_masks"] for row in expected]
    assert any(1 in row["assistant_masks"] for row in expected)
    cut = fn.jsonl(path, tokenizer=folder, chat=True, max_length=20, truncation="left", **SETTINGS)
    assert list(rows_of(cut)) == [row["input_ids"][-20:] for row in expected]
    assert list(rows_of(cut, "loss")) == [row["assistant_masks"][-20:] for row in expected]
    both = {"columns": ["messages:json", "x:json"], "missing_zero": True, "up_to": {"x": 9}}
    several = fn.jsonl(path, tokenizer=folder, texts=["messages"], chat=True, max_length=2000, **both, **SETTINGS)
    bare = [judge.apply_chat_template(line["messages"])["input_ids"] for line in LINES]
    assert list(rows_of(several)) == bare


def test_snippets_of_the_fixture_are_those_of_jinja2(monkeypatch):
    utils = transformers.utils.chat_template_utils

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 11, 30)

    monkeypatch.setattr(utils, "datetime", Day)
    table = json.loads((FIXTURES / "chat/snippets.json").read_text())
    line = json.loads(table["line"])
    for source, expected in table["rows"]:
        try:
            (text,), _ = utils.render_jinja_template(
                [line["messages"]], tools=line["tools"], chat_template=source, bos_token="<s>", **line["chat_template_kwargs"]
            )
        except Exception:
            text = None
        assert text == expected, source


def test_a_folder_is_read_as_by_transformers(tmp_path):
    named = [{"name": "default", "template": "d{{ eos_token }}"}, {"name": "rag", "template": "r{{ messages[0].content }}"}]
    token = {"__type": "AddedToken", "content": "<pad>"} | dict.fromkeys(["lstrip", "normalized", "rstrip", "single_word"], False)
    added = {"400": {**token, "content": "tok", "special": True}}
    legacy = {"bos_token": {**token, "content": "<|im_start|>", "special": True}}
    folders = {
        "list": model(tmp_path / "list", chat_template=named, pad_token=token, eos_token={**token, "content": "<|im_end|>"}),
        "added": model(tmp_path / "added", chat_template="{{ messages[0].content }}", added_tokens_decoder=added),
        "more": model(tmp_path / "more", chat_template="{{ messages[0].content }}", extra_special_tokens={"image_token": "tok"}),
        "file": model(tmp_path / "file", chat_template="not this"),
        "files": model(tmp_path / "files"),
        "legacy": model(tmp_path / "legacy", chat_template="{{ bos_token }}{{ eos_token }}"),
    }  # fmt: skip
    (folders["file"] / "chat_template.jinja").write_text("{{ bos_token }}f\n")
    (folders["files"] / "chat_template.jinja").write_text("a")
    (folders["files"] / "additional_chat_templates").mkdir()
    (folders["files"] / "additional_chat_templates/rag.jinja").write_text("b<pad>")
    (folders["legacy"] / "special_tokens_map.json").write_text(json.dumps(legacy))
    conversation = [{"role": "user", "content": "tokens <pad> <s>"}]
    path = lines(tmp_path / "a.jsonl", [{"messages": conversation}])
    for name, folder in folders.items():
        for template in [None, "rag"] if name in ("list", "files") else [None]:
            expected = opened(folder).apply_chat_template(conversation, chat_template=template)["input_ids"]
            (ids,) = rows_of(fn.jsonl(path, tokenizer=folder, chat=template or True, max_length=64, **SETTINGS))
            assert ids == expected, (name, template)
    plain = lines(tmp_path / "b.jsonl", [{"text": "a <pad> tok <s>"}])
    for folder in folders.values():
        (ids,) = rows_of(fn.jsonl(plain, tokenizer=folder, max_length=64, **SETTINGS))
        assert ids == opened(folder)("a <pad> tok <s>")["input_ids"]


def test_what_is_wrong_is_told_with_its_file_and_line(tmp_path):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
    folder = model(tmp_path / "model", chat_template=template)
    user = {"role": "user", "content": "x"}
    for row, message in [
        ({"messages": []}, "the conversation is empty"),
        ({"text": "x"}, "no list of messages"),
        ({"messages": [{"role": "system"}]}, "the chat template raised: no user"),
        ({"messages": [user], "chat_template_kwargs": {"add_generation_prompt": True}}, "`add_generation_prompt` is no variable.*"),
        ({"messages": [user], "chat_template_kwargs": "x"}, "`chat_template_kwargs` is not an object"),
    ]:
        path = lines(tmp_path / "a.jsonl", [{"messages": [user]}, row])
        with pytest.raises(DecodeError, match=rf"{message}: path=.*a\.jsonl member=line 2"):
            list(fn.jsonl(path, tokenizer=folder, chat=True, max_length=8, **SETTINGS))
        loader = fn.jsonl(path, tokenizer=folder, chat=True, max_length=8, substitute=1, **SETTINGS)
        assert len(list(rows_of(loader))) == 2
    two = [{"name": name, "template": "{{ messages[0].content }}"} for name in ["default", "tool_use"]]
    two = model(tmp_path / "two", chat_template=two)
    path = lines(tmp_path / "a.jsonl", [{"messages": [user], "tools": []}])
    with pytest.raises(DecodeError, match="`default` and `tool_use`: name the one to use"):
        list(fn.jsonl(path, tokenizer=two, chat=True, max_length=8, **SETTINGS))
    assert len(list(rows_of(fn.jsonl(path, tokenizer=two, chat="tool_use", max_length=8, **SETTINGS)))) == 1
    splits = model(tmp_path / "splits", split_special_tokens=True)
    (tmp_path / "t.jinja").write_text("{{ x | groupby('a') }}")
    for settings, error, message in [
        ({"tokenizer": folder}, TypeError, "max_length, the most tokens of a row, is missing"),
        ({"tokenizer": folder, "max_length": 8, "texts": []}, ConfigError, "texts is empty"),
        ({"tokenizer": splits, "max_length": 8}, Error, "split_special_tokens"),
        ({"tokenizer": folder, "max_length": 8, "chat": {"variables": {"tools": []}}}, Error, "`tools` is no variable"),
        ({"max_length": 3}, TypeError, "max_length is about tokens: give tokenizer, too"),
        ({"tokenizer": folder, "max_length": 8, "chat": "none"}, ConfigError, r"no chat template is called \"none\""),
        ({"tokenizer": folder, "max_length": 8, "chat": str(tmp_path / "t.jinja")}, ConfigError, "line 1: the filter `groupby`"),
        ({"tokenizer": folder, "max_length": 8, "chat": {"other": 1}}, TypeError, "other"),
        ({"tokenizer": folder, "max_length": 8, "truncation": "up"}, ConfigError, "\"right\" and \"left\""),
        ({"tokenizer": folder, "max_length": 8, "columns": ["a:bytes", "b:bytes"]}, ConfigError, "there are a, b"),
        ({"tokenizer": tmp_path / "nothing", "max_length": 8}, Error, "not found"),
    ]:
        with pytest.raises(error, match=message):
            fn.jsonl(path, **settings, **SETTINGS)
    with pytest.raises(ConfigError, match="tokenizer is for source arrow, jsonl, parquet"):
        fn.tokens(path, seq_len=4, tokenizer=folder, max_length=8, **SETTINGS)


def documents(loader, names):
    """The documents of packed rows: a tuple of lists, one for each name."""
    for batch in loader:
        for row, ends in enumerate(np.asarray(batch["cu_seqlens"])):
            for start, end in zip(ends, ends[1:]):
                if end > start:
                    yield tuple(np.asarray(batch[name])[row, start:end].tolist() for name in names)


@pytest.mark.parametrize("kept", ["lengths", "copy", "compressed", "chat"])
def test_packed_texts_are_those_of_tokenizers(kept, tmp_path):
    folder = model(tmp_path / "model")
    rows, names, settings = [{"text": text} for text in TEXTS * 9], ["input_ids"], {"tokenizer": folder, "max_length": 2000}
    if kept == "chat":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        short = [line for line in LINES if len(line["messages"][0]["content"]) < 300]  # The others are over max_length.
        rows, names, settings = short * 9, ["input_ids", "loss"], settings | {"chat": True}
    path = lines(tmp_path / "a.jsonl", rows)
    right = list(zip(*(rows_of(fn.jsonl(path, **settings, **SETTINGS), name) for name in names)))
    packed = {"tokens": 2000, "bins": tmp_path / "bins", "key": 3}
    if kept == "compressed":
        path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = path.with_suffix(".jsonl.gz")
    if kept in ("copy", "compressed"):
        packed["copy"] = tmp_path / "copy"
    else:
        settings["lengths_file"] = tmp_path / "lengths"
    found = list(documents(fn.jsonl(path, packed=packed, **settings, **SETTINGS), names))
    assert sorted(found) == sorted(row for row in right if row[0])


def test_texts_packed_by_estimated_lengths_lose_only_ends(tmp_path):
    folder = model(tmp_path / "model")
    path = lines(tmp_path / "a.jsonl", [{"text": f"{number} " * (number % 50)} for number in range(600)])
    settings = {"tokenizer": folder, "max_length": 400, **SETTINGS}
    right = sorted(row for row in rows_of(fn.jsonl(path, **settings)) if row)
    packed = {"tokens": 500, "bins": tmp_path / "bins", "longer": "cut", "estimated": True}
    found = sorted(ids for (ids,) in documents(fn.jsonl(path, packed=packed, **settings), ["input_ids"]))
    assert sum(map(len, found)) > 0.9 * sum(map(len, right))
    assert sum(ids in right for ids in found) > 0.9 * len(found)
    with pytest.raises(ConfigError, match="known or estimated"):
        fn.jsonl(path, packed=packed | {"estimated": None, "bins": tmp_path / "other"}, **settings)
    measured = fn.jsonl(path, lengths_file=tmp_path / "lengths", **settings).lengths("input_ids")
    assert sorted(length for length in measured if length) == sorted(map(len, right))

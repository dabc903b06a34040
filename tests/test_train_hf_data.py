"""Data of Hugging Face jobs: records, the answers in rendered conversations, sequences, packing."""

from __future__ import annotations

import json
import random

import pytest
import torch

pytest.importorskip("transformers")

from hf_util import CHATML, conversations, make_tokenizer, write_lines
from jumar.train.errors import JobError
from jumar.train.hf import chat, dataset, records
from jumar.train.hf.chat import IGNORED

NO_CHAT = {"name": [], "author": [], "system": None}

# Earlier answers lose their thoughts, the last one gets empty ones.
THINKING = """
{%- set found = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '' %}
{%- if loop.index0 > found.last %}{{- '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}
{{- m.content.split('</think>')[-1].strip() }}
{%- else %}{{- m.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
# The opening of an answer already begins a thought.
OPENED = THINKING.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
MARKED = """
{%- for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"""
BARE = """
{%- for m in messages %}{% if m.role == 'user' %}{{ '[Q] ' + m.content + ' [A]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content|trim + '<|endoftext|>' }}
{%- else %}{{ raise_exception('no such role here') }}{% endif %}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def _spans(tokenizer, template: str, *turns: str) -> list[str]:
    """The learned pieces of a conversation of user and assistant in turns."""
    tokenizer.chat_template = template
    try:
        messages = tuple(("assistant" if i % 2 else "user", text) for i, text in enumerate(turns))
        ids, labels = chat.encode(records.Record("here", messages), tokenizer)
        asked = [{"role": role, "content": text} for role, text in messages]
        assert ids == tokenizer.apply_chat_template(asked, tokenize=True, return_dict=True)["input_ids"]
    finally:
        tokenizer.chat_template = CHATML
    assert all(label in (token, IGNORED) for token, label in zip(ids, labels, strict=True))
    pieces, current = [], []
    for label in [*labels, IGNORED]:
        if label != IGNORED:
            current.append(label)
        elif current:
            pieces.append(tokenizer.decode(current))
            current = []
    return pieces


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["no markers", "markers"])
def test_every_answer_is_learned_and_nothing_else(tokenizer, template):
    turns = ["Who?", "I am ünï 🧗.", "  Again?  ", "The same.\nTwice."]
    assert _spans(tokenizer, template, *turns) == ["I am ünï 🧗.<|im_end|>", "The same.\nTwice.<|im_end|>"]


@pytest.mark.parametrize(
    "turns",
    [
        ["ok", "ok", "ok", "ok"],  # question and answer alike
        ["a<|im_end|>", "im_end", "end|>", "end"],  # looks like what closes an answer
        ["assistant\n", "assistant", "user\n", "user"],
        ["x", "a a a a", "a a", "a"],
    ],
)
def test_answers_that_look_like_something_else(tokenizer, turns):
    expected = [f"{turn}<|im_end|>" for turn in turns[1::2]]
    assert _spans(tokenizer, CHATML, *turns) == expected == _spans(tokenizer, MARKED, *turns)


def test_answers_of_random_conversations(tokenizer):
    """Found as transformers finds them by the marks of a template that renders the same."""
    pieces = ["a", "ok", " ", "\n", "<|im_end|>", "<|im_start|>", "assistant", "user", "<think>", "</think>", "|>", "🧗", "中"]
    dice = random.Random(1)
    for _ in range(200):
        roles = ["system"] * dice.randint(0, 1) + ["user", "assistant"] * dice.randint(1, 4)
        messages = tuple((role, "".join(dice.choices(pieces, k=dice.randint(0, 4)))) for role in roles)
        found = []
        for template in (CHATML, MARKED):
            tokenizer.chat_template = template
            found.append(chat.encode(records.Record("here", messages), tokenizer))
        tokenizer.chat_template = CHATML
        assert found[0] == found[1], messages


def test_template_that_drops_thoughts(tokenizer):
    pieces = _spans(tokenizer, THINKING, "q", "<think>\nwhy\n</think>\n\nfirst", "q", "<think>\nhow\n</think>\n\nsecond")
    assert pieces == ["first<|im_end|>", "<think>\nhow\n</think>\n\nsecond<|im_end|>"]
    assert _spans(tokenizer, THINKING, "q", "one", "q", "two") == ["one<|im_end|>", "<think>\n\n</think>\n\ntwo<|im_end|>"]
    pieces = _spans(tokenizer, OPENED, "q", "one", "q", "<think>\nhow\n</think>\n\ntwo")
    assert pieces == ["one<|im_end|>", "how\n</think>\n\ntwo<|im_end|>"]


def test_template_without_turn_tokens(tokenizer):
    assert _spans(tokenizer, BARE, "q", "  one ", "r", "two") == [" one<|endoftext|>", " two<|endoftext|>"]


def test_template_that_refuses(tokenizer):
    tokenizer.chat_template = BARE
    record = records.Record("f.jsonl:7", (("system", "s"), ("user", "q"), ("assistant", "yes!")))
    with pytest.raises(JobError, match="f.jsonl:7: the chat template refuses the conversation: .*no such role here"):
        chat.encode(record, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(JobError, match="f.jsonl:7: the content of message 3 is not in what the chat template makes"):
        chat.encode(record, tokenizer)
    tokenizer.chat_template = "{{ messages|length }}" + CHATML
    with pytest.raises(JobError, match="f.jsonl:7: the chat template renders what comes before message 3"):
        chat.encode(record, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(JobError, match="has no chat template"):
        chat.check_template(tokenizer, "folder")
    tokenizer.chat_template = CHATML


def _read(path, **chat_section):
    return records.read(path, NO_CHAT | chat_section)


def test_self_cognition(tmp_path):
    file = write_lines(
        tmp_path / "self.jsonl",
        [
            {"query": "你是?", "response": "我是{{NAME}}，{{AUTHOR}}的。", "tag": "zh"},
            {"query": "Are you {{NAME}}?", "response": "Yes, by {{AUTHOR}}.", "tag": "en"},
            {"query": "q2", "response": "r2", "history": [["q1", "r1"]], "system": "s"},
        ],
    )
    found = _read(file, name=["小黄", "Yellow"], author=["甲"], system="be {{NAME}}")
    assert found[0].messages == (("system", "be 小黄"), ("user", "你是?"), ("assistant", "我是小黄，甲的。"))
    assert found[1].messages[1:] == (("user", "Are you Yellow?"), ("assistant", "Yes, by 甲."))
    assert found[2].messages == (("system", "s"), ("user", "q1"), ("assistant", "r1"), ("user", "q2"), ("assistant", "r2"))
    with pytest.raises(JobError, match=r"self.jsonl:1: \{\{AUTHOR\}\} in the text, and the job file has no chat.author"):
        _read(file, name=["x"])


def test_every_form_of_data_is_the_same(tmp_path):
    import datasets

    rows = conversations(5)
    forms = [write_lines(tmp_path / "a.jsonl", rows)]
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "e")
    forms += [tmp_path / name for name in ("b.json", "c.parquet", "d", "e")]
    expected = [r.messages for r in _read(forms[0])]
    assert [role for role, _ in expected[0]] == ["user", "assistant"] * 2
    assert all([r.messages for r in _read(form)] == expected for form in forms)
    assert len({records.digest(_read(form)) for form in forms}) == 1
    # A folder: its files in the order of names.
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "2.txt").write_text("one line\n\nanother\n")
    write_lines(tmp_path / "mix" / "1.jsonl", [{"text": "first"}, {"text": " "}])
    assert [r.text for r in _read(tmp_path / "mix")] == ["first", "one line", "another"]


BAD = [
    ("{'messages': 1}", "bad.jsonl:2: not JSON"),
    ("[1]", "bad.jsonl:2: expected an object, found list"),
    ('{"body": "x"}', 'bad.jsonl:2: expected "messages", "query" and "response", or "text"; its keys are body'),
    ('{"text": 3}', "bad.jsonl:2: text must be a string, found 3"),
    ('{"messages": []}', 'bad.jsonl:2: "messages" must be a list'),
    ('{"messages": ["x"]}', "bad.jsonl:2: message 1 must be an object with role and content, found 'x'"),
    ('{"messages": [{"role": "bot", "content": "x"}]}', "bad.jsonl:2: message 1: role 'bot' is not one of"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "bad.jsonl:2: no message of the assistant"),
    ('{"messages": [{"role": "assistant", "content": null}]}', "bad.jsonl:2: content of assistant must be a string, found None"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "a part of type 'image'; only text"),
    ('{"query": "x"}', "bad.jsonl:2: response must be a string, found None"),
    ('{"query": "x", "response": "y", "history": ["z"]}', r"history must be a list of \[query, response\]"),
]


@pytest.mark.parametrize(("line", "words"), BAD)
def test_bad_records_are_named(tmp_path, line, words):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(JobError, match=words):
        _read(tmp_path / "bad.jsonl")


def test_bad_files_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("a")
    (tmp_path / "b.parquet").write_text("a")
    (tmp_path / "c.jsonl").write_text("\n")
    (tmp_path / "e.txt").write_bytes(b"one\ncaf\xe9\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "state.json").write_text("{}")
    for name, words in (("a.csv", "unknown kind"), ("b.parquet", "not a parquet"), ("c.jsonl", "is empty"), ("d", "cannot load it"), ("e.txt", "e.txt:2: not UTF-8")):
        with pytest.raises(JobError, match=words):
            _read(tmp_path / name)


def test_too_long(tokenizer):
    chats = [records.Record("", (("user", "w " * n), ("assistant", "answer " * m))) for n, m in ((2, 2), (2, 60), (60, 2))]
    cut = dataset.encode(chats, tokenizer, 60, "truncate")
    assert dict(cut.counts.items()) | {"tokens": 0, "trained": 0} == {
        "records": 3, "truncated": 2, "samples": 2, "empty": 1, "tokens": 0, "trained": 0,
    }
    assert [len(s.ids) for s in cut.samples][1] == 60 and cut.samples[1].labels[-1] == cut.samples[1].ids[-1]
    assert str(cut).endswith("2 truncated, 1 dropped with no trained token left")
    dropped = dataset.encode(chats, tokenizer, 60, "drop")
    assert (dropped.counts["dropped"], dropped.counts["samples"], dropped.counts["truncated"]) == (2, 1, 0)
    with pytest.raises(JobError, match="no sample is left to train on: .*3 dropped as too long"):
        dataset.encode(chats, tokenizer, 8, "drop")


def test_plain_text_ends(tokenizer):
    sample = dataset.encode([records.Record("", text="one two")], tokenizer, 50, "truncate").samples[0]
    assert sample.ids[-1] == tokenizer.eos_token_id and tokenizer.decode(sample.ids[:-1]) == "one two"
    assert sample.labels == [IGNORED, *sample.ids[1:]]


def _samples(*sizes: int) -> list[dataset.Sample]:
    begin = iter(range(10, 1000))
    return [dataset.Sample(ids := [next(begin) for _ in range(size)], ids) for size in sizes]


def test_packing_keeps_every_sample(tokenizer):
    generator = torch.Generator().manual_seed(0)
    samples = _samples(*torch.randint(1, 20, (90,), generator=generator).tolist())
    rows = dataset.rows(samples, 20, True, 0)
    assert sorted(s.ids for row in rows for s in row) == sorted(s.ids for s in samples)
    used = [sum(len(s.ids) for s in row) for row in rows]
    assert max(used) <= 20 and sum(used) / (20 * len(rows)) > 0.85
    assert rows == dataset.rows(samples, 20, True, 0) != dataset.rows(samples, 20, True, 1)
    assert dataset.rows(samples, 20, False, 0) == [[s] for s in samples]


def test_batches():
    a, b, c = _samples(3, 1, 2)
    batch = dataset.Collator(0, True)([[a, b], [c]])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13], [14, 15, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100], [-100, 15, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    assert batch["tokens"] == 6 and "attention_mask" not in batch
    assert dataset.Collator(0, True, 4)([[a, b]])["position_ids"].shape == (4, 1, 4)
    batch = dataset.Collator(0, False)([[a], [c]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]] and "position_ids" not in batch


def test_order_is_a_function_of_the_position():
    rows = [[s] for s in _samples(*[1] * 7)]
    stream = dataset.Stream(rows, 20, 5)
    order = [stream[i][0].ids[0] for i in range(20)]
    again = dataset.Stream(rows, 20, 5)
    assert [again[i][0].ids[0] for i in reversed(range(20))] == order[::-1]
    assert sorted(order[:7]) == sorted(order[7:14]) and order[:7] != order[7:14]
    with pytest.raises(IndexError):
        stream[20]


def test_schedule_is_that_of_torchtitan():
    pytest.importorskip("torchtitan")
    from torchtitan.components.optimizer import LRSchedulersContainer

    from jumar.train import schedule

    for form in ("linear", "sqrt", "cosine"):
        for warmup, total, ratio in ((2, None, None), (0, 12, 0.5), (3, 9, 0.9), (40, None, None), (0, None, 0.0)):
            section = {"warmup_steps": warmup, "total_steps": total, "decay_ratio": ratio, "decay_type": form, "min_lr_factor": 0.1}
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            theirs = LRSchedulersContainer.Config(**section).build(optimizers=[optimizer], training_steps=9)
            at = schedule.factor(section, 9)
            for step in range(9):
                assert at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12), (section, step)
                optimizer.step()
                theirs.step()

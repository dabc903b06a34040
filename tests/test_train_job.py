"""Job files: every mistake is an error that says where, and names the nearest valid key, value or converter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from jumar.train import JobError, runner
from jumar.train.job import load
from jumar.train.schema import SECTIONS
from train_util import write_job


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"))


def _fails(job: Path, *overrides: str) -> str:
    with pytest.raises(JobError) as error:
        runner.prepare(str(job), list(overrides))
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.seq_length=64", ["unknown key 'training.seq_length'", "'seq_len'"]),
        ("training.lr=1e-3", ["unknown key 'training.lr'", "'optimizer.lr'"]),
        ("trainning.steps=3", ["unknown section [trainning]", "'training'"]),
        ("training.steps=ten", ["training.steps must be a whole number", "'ten'"]),
        ("training.steps=1.5", ["training.steps must be a whole number", "1.5"]),
        ("training.steps=0", ["training.steps = 0 is less than 1"]),
        ("compile.enable=yes", ["compile.enable must be true or false", "'yes'"]),
        ("training.dtype=bfloat", ["'bfloat' is not one of bfloat16, float32", "'bfloat16'"]),
        ("activation_checkpoint.mode=selectiv", ["'selective'"]),
        ("lr_scheduler.decay_type=cos", ["'cosine'"]),
        ("compile.components=modell", ["'modell' is not one of model, loss", "'model'"]),
        ("model.name=qwen2", ["model.name = 'qwen2' is unknown", "'qwen3'"]),
        ("model.flavor=debugmodl", ["model.flavor = 'debugmodl'", "'debugmodel'"]),
        ("model.converters=npu_rmsnorm", ["unknown converter 'npu_rmsnorm'", "'npu_rms_norm'"]),
        ("model.converters=npu_rope,npu_rope", ["listed twice"]),
        ("training.dataset=jsonll", ["training.dataset = 'jsonll' is unknown", "'jsonl'"]),
        ("training.dataset_path=nowhere", ["training.dataset_path = 'nowhere'", "no such file"]),
        ("training.dataset_path=", ["training.dataset_path is missing"]),
        ("model.hf_assets_path=nowhere", ["model.hf_assets_path = 'nowhere'", "no such file"]),
        ("model.hf_assets_path=text", ["no tokenizer.json"]),
        ("model.tokenizer_vocab_size=1000", ["tokenizer and model disagree", "1000", "512"]),
        ("training.seq_len=5000", ["training.seq_len = 5000 is more than the model's 4096"]),
        ("parallelism.tensor_parallel_degree=2", ["1 processes cannot be split"]),
        ("parallelism.data_parallel_shard_degree=4", ["asks for 4 processes, there are 1"]),
        ("parallelism.expert_parallel_degree=2", ["expert_parallel_degree = 2", "the 1 processes"]),
        ("steps=3", ["expected section.key=value"]),
        ("training.steps", ["expected section.key=value"]),
    ],
)
def test_mistakes_are_named(job, override, words):
    text = _fails(job, override)
    for word in words:
        assert word in text


def test_missing_job_file():
    with pytest.raises(JobError, match="job file 'no.toml' does not exist"):
        load("no.toml")


def test_job_file_that_is_no_toml(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("[training\nsteps = 3")
    with pytest.raises(JobError, match="not a TOML file"):
        load(str(file))


def test_unknown_key_in_the_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "qwen3"\nflavour = "tiny"\n')
    with pytest.raises(JobError, match="unknown key 'model.flavour'; did you mean 'flavor'"):
        load(str(file))
    file.write_text('[modle]\nname = "qwen3"\n')
    with pytest.raises(JobError, match=r"unknown section \[modle\]; did you mean 'model'"):
        load(str(file))
    file.write_text('[model]\nname = "qwen3"\n')
    with pytest.raises(JobError, match="model.flavor is missing"):
        load(str(file))
    file.write_text('model = "qwen3"\n')
    with pytest.raises(JobError, match="must be a section"):
        load(str(file))


def test_values_and_overrides(job):
    loaded = load(str(job), ["--training.steps=7", "optimizer.lr=1", "model.converters=[]", "job.dump_folder=x=y"])
    assert loaded["training"]["steps"] == 7
    assert loaded["optimizer"]["lr"] == 1.0 and isinstance(loaded["optimizer"]["lr"], float)
    assert loaded["model"]["converters"] == []
    assert loaded["job"]["dump_folder"] == "x=y"
    assert load(str(job), ["lr_scheduler.total_steps=none"])["lr_scheduler"]["total_steps"] is None
    # Defaults are not shared between jobs.
    loaded["checkpoint"]["exclude_from_loading"].append("optimizer")
    assert load(str(job))["checkpoint"]["exclude_from_loading"] == []


def test_paths_are_found_beside_the_job_file_then_here(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(str(job)).path("training.dataset_path") == (job.parent / "text").resolve()
    (tmp_path / "here").mkdir()
    assert load(str(job), ["training.dataset_path=here"]).path("training.dataset_path") == tmp_path / "here"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ('\n{"text": "  "}\n', "is empty"),
        ('{"text": "a"}\n{"text": 3}\n', "data.jsonl:2: expected an object with a string under"),
        ('{"body": "a"}\n', "data.jsonl:1: expected an object"),
        ("{'text': 1}\n", "data.jsonl:1: not JSON"),
    ],
)
def test_data_that_cannot_be_used(job, tmp_path, content, words):
    (tmp_path / "data.jsonl").write_text(content)
    assert words in _fails(job, f"training.dataset_path={tmp_path}")


def test_folder_without_data(job, tmp_path):
    assert "holds no .jsonl" in _fails(job, f"training.dataset_path={tmp_path}")


def test_line_separators_inside_a_text_do_not_split_it(tmp_path):
    from jumar.train import data

    texts = ["one\u2028two", "three\x0bfour\x85five"]
    lines = (json.dumps({"text": t}, ensure_ascii=False) for t in texts)
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert data.read(tmp_path).documents == texts


def test_text_that_is_not_utf8_is_named_by_line(job, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": "caf\xe9"}\n')
    assert "a.jsonl:3: not UTF-8: byte 0xe9" in _fails(job, f"training.dataset_path={tmp_path}")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    from jumar.train import data

    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n')
    assert data.read(tmp_path).documents == ["one"]


def test_tokenizer_of_another_vocabulary(job, tmp_path):
    import random

    from jumar.train import data, tokenizer

    letters = random.Random(0)
    words = ["".join(letters.choices("abcdefghijklmnop", k=6)) for _ in range(400)]
    texts = data.Texts(tmp_path, [" ".join(words), " ".join(words[::-1])])
    folder = tokenizer.train(texts, 600, tmp_path / "tokenizer")
    assert tokenizer.check(folder, 600) == 600
    text = _fails(job, f"model.hf_assets_path={folder}")
    assert "tokenizer and model disagree" in text and "ids up to 599" in text and "is 512" in text
    # Trained once: the same data and size keep the files, another size replaces them.
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer.train(texts, 600, folder) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    assert tokenizer.check(tokenizer.train(texts, 500, folder), 512) == 500


def test_tokenizer_without_an_end_of_text(job, tmp_path):
    from jumar.train import data, tokenizer

    folder = tokenizer.train(data.read(job.parent / "text"), 300, tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text("{}")
    assert "names no eos_token" in _fails(job, f"model.hf_assets_path={folder}")


def test_tokenizer_keeps_every_text(job, tmp_path):
    from tokenizers import Tokenizer

    from jumar.train import data, tokenizer

    folder = tokenizer.train(data.read(job.parent / "text"), 300, tmp_path / "tokenizer")
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("plain words", "tabs\tand\n\nlines", "ünïcödé 中文 🧗", " leading and trailing  "):
        assert loaded.decode(loaded.encode(text).ids) == text


def test_unknown_shim(job, monkeypatch):
    monkeypatch.setenv("JUMAR_SHIMS", "-pp_stepp")
    text = _fails(job)
    assert "unknown shim 'pp_stepp'" in text and "-pp_step" in text


def test_converter_that_matches_nothing(job):
    from torchtitan.models.common.nn_modules import RMSNorm

    from jumar import titan
    from jumar.convert.errors import ConverterError
    from jumar.titan.models import model_spec

    layer = model_spec("qwen3", "tiny").model.layers[0]
    assert isinstance(layer.attention_norm, RMSNorm.Config)
    with pytest.raises(ConverterError, match="matched nothing in this model: npu_swiglu"):
        titan.plan(layer.attention, ["npu_rms_norm", "npu_swiglu"])
    report = titan.plan(layer.attention, ["npu_rms_norm", "npu_swiglu?"])
    assert report.unmatched == ["npu_swiglu"] and len(report.replaced) == 1


def test_profiling(job):
    enabled = "profiling.enable_profiling=true"
    assert "unknown key 'profiling.enable'; did you mean 'enable_profiling'?" in _fails(job, "profiling.enable=true")
    assert "unknown section [profilling]; did you mean 'profiling'?" in _fails(job, "profilling.profile_freq=3")
    assert "profiling.profile_freq = 10 records none of training.steps = 3" in _fails(job, enabled, "training.steps=3")
    text = _fails(job, enabled, "profiling.profile_freq=3")
    assert "profiling.profile_freq = 3 is less than profiler_warmup = 3 and profiler_active = 1 together" in text
    settings = load(str(job), [enabled, "profiling.profile_freq=4"])["profiling"]
    assert settings["profile_freq"] == 4 and settings["profiler_repeat"] is None


def test_keys_go_somewhere():
    """Keys that carry a torchtitan name exist in the class that the section is mapped to."""
    from dataclasses import fields

    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.config.configs import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.tools.profiler import Profiler

    own = {
        "training": {"dataset", "dataset_path", "seed", "deterministic", "loss_chunks", "packing", "too_long", "epochs"},
        "checkpoint": {"export_hf", "export_folder", "resume"},
    }
    for section, target in {
        "training": TrainingConfig,
        "checkpoint": CheckpointManager.Config,
        "lr_scheduler": LRSchedulersContainer.Config,
        "compile": CompileConfig,
        "parallelism": ParallelismConfig,
        "profiling": Profiler.Config,
    }.items():
        known = {field.name for field in fields(target)}
        assert {key.name for key in SECTIONS[section]} - own.get(section, set()) <= known


def test_every_key_is_documented():
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    for section, keys in SECTIONS.items():
        assert f"[{section}]" in page
        part = page.split(f"### [{section}]")[1].split("\n### ")[0]
        for key in keys:
            assert f"| `{key.name}` |" in part, f"{section}.{key.name}"


@pytest.mark.parametrize("config", sorted((Path(__file__).parent.parent / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_configs_of_the_repository(config):
    job = load(str(config))
    for section, keys in SECTIONS.items():
        for key in keys:
            name = f"{section}.{key.name}"
            # A Hugging Face model is the user's to bring.
            if key.path and name in job.given and name != "model.hf_assets_path":
                assert job.path(f"{section}.{key.name}")


def test_steps_on_the_command_line_win_over_epochs_in_the_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[model]\nname = "hf"\nhf_assets_path = "."\n[training]\ndataset_path = "."\nepochs = 5\n')
    assert load(str(file))["training"]["epochs"] == 5
    short = load(str(file), ["--training.steps=3"])["training"]
    assert (short["steps"], short["epochs"]) == (3, None)
    assert load(str(file), ["training.steps=3", "training.epochs=2"])["training"]["epochs"] == 2

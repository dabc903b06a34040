"""Built-in models and folders in Hugging Face layout."""

from __future__ import annotations

import json

import pytest
import torch

from jumar import models

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", list(models.BUILT_IN))
def test_built_in_models_are_reproducible_and_random(name):
    state = torch.random.get_rng_state()
    first, again = models.build(name), models.build(name)
    other = models.build(name, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not first.training
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
        assert not torch.equal(value, other.state_dict()[key]), key
    for parameter in first.parameters():  # no ones and zeros, behind which mistakes could hide
        assert parameter.detach().unique().numel() > 1
    assert next(models.build(name, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(models.BUILT_IN))
def test_example_inputs_run(name):
    model = models.build(name)
    inputs = models.example_inputs(model, batch=3, length=7)
    assert inputs["input_ids"].shape[0] == 3
    with torch.no_grad():
        out = model(**inputs)
    assert out.loss.isfinite() and out.logits.shape[:2] == inputs["input_ids"].shape
    assert ("pixel_values" in inputs) == ("_vl" in name or "3_5" in name)


def test_folder_with_weights(tmp_path):
    model = models.build("qwen3")
    model.save_pretrained(tmp_path)
    loaded = models.load(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    assert (
        next(models.load(str(tmp_path), dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    )


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
@pytest.mark.parametrize("named", [True, False])
def test_folder_without_weights(tmp_path, name, named):
    model = models.build(name)
    model.config.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["architectures"] = [type(model).__name__] if named else None
    (tmp_path / "config.json").write_text(json.dumps(data))
    first, again = models.load(tmp_path), models.load(tmp_path)
    assert type(first) is type(model)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert first(**models.example_inputs(first)).loss.isfinite()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen33", "did you mean 'qwen3'"),
        ("gpt", "neither a folder with a config.json nor a built-in"),
    ],
)
def test_unknown_names(name, text):
    with pytest.raises(ValueError, match=text):
        models.load(name)
    with pytest.raises(ValueError, match=text):
        models.build(name)


@pytest.mark.parametrize(
    "config", ["{", "{}", '{"model_type": "no_such_thing"}', '{"model_type": "clip"}']
)
def test_bad_folders(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=str(tmp_path)):
        models.load(tmp_path)

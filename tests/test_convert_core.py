"""The registry, plans, reports and undo, on plain torch modules."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import jumar
from convert_modules import Block, Norm, X, model
from jumar import ops
from jumar.convert import (
    Converter,
    ConverterError,
    Match,
    Miss,
    ModuleConverter,
    Site,
    known_converters,
    plan,
    register,
    registry,
    resolve,
    revert,
)


@pytest.fixture
def scratch_registry(monkeypatch):
    """Converters that a test registers are gone after it."""
    known_converters()
    monkeypatch.setattr(registry, "_converters", dict(registry._converters))
    monkeypatch.setattr(registry, "_aliases", dict(registry._aliases))


# ---- names ----


def test_known_names():
    assert list(known_converters()) == [
        "npu_rms_norm", "npu_rope", "npu_sdpa", "npu_dsa", "npu_swiglu", "npu_linear", "npu_loss", "npu_gmm", "npu_permute",
        "npu_router",
    ]
    for alias, name in {
        "rms_norm": "npu_rms_norm",
        "rotary": "npu_rope",
        "swiglu": "npu_swiglu",
        "loss": "npu_loss",
        "gmm": "npu_gmm",
        "moe_experts": "npu_gmm",
        "permute": "npu_permute",
        "router": "npu_router",
    }.items():
        assert resolve(alias)[0] is known_converters()[name]
    assert resolve("npu_rope") == (known_converters()["npu_rope"], False)
    assert resolve("npu_rope?") == (known_converters()["npu_rope"], True)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("npu_rmsnorm", "npu_rms_norm"),
        ("npu_ropes?", "npu_rope"),
        ("swigl", "swiglu"),
        ("NPU_LINEAR", None),
    ],
)
def test_unknown_name_gives_the_nearest(wrong, near):
    with pytest.raises(ConverterError, match="unknown converter") as error:
        jumar.convert(model(), ["npu_rms_norm", wrong])
    if near:
        assert f"did you mean {near!r}?" in str(error.value)
    assert "npu_rms_norm, npu_rope" in str(error.value)


def test_unknown_name_changes_nothing():
    m = model()
    with pytest.raises(ConverterError):
        jumar.convert(m, ["npu_linear", "npu_nothing"])
    assert revert(m) == 0


@pytest.mark.parametrize("bad", [None, 3])
def test_bad_arguments(bad):
    with pytest.raises(ConverterError, match="named by a string"):
        jumar.convert(model(), [bad])
    with pytest.raises(ConverterError, match="must be a torch.nn.Module"):
        jumar.convert(bad, ["npu_linear"])


def test_convert_is_the_package_and_the_function():
    import jumar.convert as package

    assert package is sys.modules["jumar.convert"]
    assert repr(jumar.convert(model(), "npu_linear")) == "<Report: 6 sites replaced, 0 skipped>"
    assert repr(package.convert(model(), ["linear"])) == "<Report: 6 sites replaced, 0 skipped>"


# ---- plan, report, strict ----


def test_plan_changes_nothing():
    m = model()
    dry = plan(m, ["npu_rms_norm", "npu_swiglu"])
    assert revert(m) == 0
    assert len(dry.report().replaced) == 4
    assert len(dry.apply().replaced) == 4
    assert revert(m) == 4


def test_report_lists_every_site():
    m = model()
    m.append(nn.LayerNorm(8))
    report = jumar.convert(m, ["npu_rms_norm", "npu_linear", "npu_rope"])
    assert report.counts() == {
        "npu_rms_norm": {"replaced": 2, "skipped": 1},
        "npu_linear": {"replaced": 6, "skipped": 0},
        "npu_rope": {"replaced": 0, "skipped": 0},
    }
    assert report.unmatched == ["npu_rope"]
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["sites"][0] == {
        "path": "0.norm",
        "module_class": "Norm",
        "converter": "npu_rms_norm",
        "operator": "npu_rms_norm",
        "status": "replaced",
        "reason": "",
    }
    assert data["sites"][2]["path"] == "2"
    assert data["sites"][2]["reason"] == "has a bias, which an RMS norm has not"
    text = str(report)
    assert "8 sites replaced, 1 skipped" in text
    for part in ("*.mlp.gate_proj", "skipped: has a bias", "matched nothing"):
        assert part in text


def test_report_as_rich_table():
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(jumar.convert(model(), ["npu_rms_norm"]))
    assert "*.norm" in console.export_text()
    console.print(jumar.convert(model(), ["npu_rms_norm"]).table(full=True))
    assert "1.norm" in console.export_text()


def test_strict_raises_on_a_converter_that_matched_nothing():
    m = model()
    with pytest.raises(ConverterError, match="npu_rope matched nothing"):
        jumar.convert(m, ["npu_rms_norm", "npu_rope"], strict=True)
    assert revert(m) == 0  # all or nothing
    assert jumar.convert(m, ["npu_rms_norm", "npu_rope?"], strict=True).unmatched == ["npu_rope"]


def test_strict_names_near_misses():
    with pytest.raises(ConverterError, match="near misses: LayerNorm: has a bias"):
        jumar.convert(nn.Sequential(nn.LayerNorm(4)), ["npu_rms_norm"], strict=True)


def test_kernelize_takes_what_applies():
    report = jumar.kernelize(model())
    assert {name: c["replaced"] for name, c in report.counts().items()} == {
        "npu_rms_norm": 2,
        "npu_rope": 0,
        "npu_sdpa": 0,
        "npu_dsa": 0,
        "npu_swiglu": 2,
        "npu_linear": 6,
        "npu_loss": 0,
        "npu_gmm": 0,
        "npu_permute": 0,
        "npu_router": 0,
    }
    with pytest.raises(ConverterError, match="matched nothing"):
        jumar.kernelize(nn.Sequential(nn.ReLU()), strict=True)
    assert jumar.kernelize(nn.Sequential(nn.ReLU())).sites == []


def test_order_and_repetition_of_names_do_not_matter():
    names = ["npu_linear", "swiglu", "npu_swiglu", "npu_rms_norm"]
    a, b = model(), model()
    jumar.convert(a, names)
    jumar.convert(b, reversed(names))
    assert [type(x) for x in a.modules()] == [type(x) for x in b.modules()]


def test_the_model_itself_may_be_the_site():
    norm = Norm()
    report = jumar.convert(norm, ["npu_rms_norm"])
    assert report.sites[0].path == "" and "(the model)" in str(report)
    report.undo()
    assert type(norm) is Norm


# ---- verify ----


def test_verify_catches_a_replacement_that_is_wrong(monkeypatch):
    right = ops.swiglu_gate_up
    monkeypatch.setattr(ops, "swiglu_gate_up", lambda gate, up: right(up, gate))
    m = model()
    with pytest.raises(
        ConverterError, match="npu_swiglu at 0.mlp .Mlp.: output 0 differs; nothing was converted"
    ):
        jumar.kernelize(m, verify=True)
    assert revert(m) == 0


def test_verify_looks_at_gradients(monkeypatch):
    right = ops.npu_linear

    def wrong(input, weight, bias=None):
        return right(input, weight.detach() + 2 * (weight - weight.detach()), bias)

    monkeypatch.setattr(ops, "npu_linear", wrong)
    with pytest.raises(ConverterError, match="gradient"):
        jumar.convert(model(), ["npu_linear"], verify=True)


# ---- converters of one's own ----


class Doubler(ModuleConverter):
    name = "npu_test_double"
    operators = ("none",)
    summary = "a test"

    def recognise(self, module):
        if isinstance(module, Norm):
            return Match("none", (2,))
        return Miss("is a Block") if isinstance(module, Block) else None

    def namespace(self, key, base):
        def forward(self, x):
            return key[0] * base.forward(self, x)

        return {"forward": forward}


def test_converters_stack_on_one_module_and_come_off_in_any_order(scratch_registry):
    register(Doubler())
    m = model()
    expected = m[0].norm(X)
    fused = jumar.convert(m, ["npu_rms_norm"])
    double = jumar.convert(m, ["npu_test_double"])
    assert len(double.replaced) == 2 and len(double.skipped) == 2
    jumar.reset_call_counts()
    assert torch.allclose(m[0].norm(X), 2 * expected, atol=1e-5)
    assert jumar.call_counts() == {"npu_rms_norm": 1}
    clone = pickle.loads(pickle.dumps(m))
    assert torch.equal(clone[0].norm(X), m[0].norm(X))
    fused.undo()
    jumar.reset_call_counts()
    assert torch.allclose(m[0].norm(X), 2 * expected, atol=1e-5)
    assert jumar.call_counts() == {}
    double.undo()
    assert type(m[0].norm) is Norm and torch.equal(m[0].norm(X), expected)


def test_names_are_registered_once(scratch_registry):
    register(Doubler())
    with pytest.raises(ConverterError, match="taken"):
        register(Doubler())


class ConfigSwitch(Converter):
    """A converter that works through an extension point: it has actions of its own."""

    name = "npu_test_switch"
    operators = ("none",)
    summary = "a test"

    class Action:
        def __init__(self, config):
            self.config = config

        def apply(self):
            self.before, self.config.implementation = self.config.implementation, "jumar"

        def undo(self):
            self.config.implementation = self.before

    def plan(self, model):
        if hasattr(model, "config"):
            yield Site(
                "",
                self.name,
                "none",
                "replaced",
                "",
                type(model).__name__,
                self.Action(model.config),
            )


def test_a_converter_with_actions_of_its_own(scratch_registry):
    register(ConfigSwitch())
    m = model()
    m.config = types.SimpleNamespace(implementation="sdpa")
    report = jumar.convert(m, ["npu_test_switch", "npu_linear"], strict=True, verify=True)
    assert m.config.implementation == "jumar"
    report.undo()
    assert m.config.implementation == "sdpa" and revert(m) == 0


def test_convert_is_package_and_function_from_its_first_use():
    script = "import jumar; jumar.convert.plan; assert callable(jumar.convert); jumar.kernelize"
    subprocess.run([sys.executable, "-c", script], check=True)

"""What takes the place of a module: a class that keeps name and ancestry, hooks, copies, undo."""

from __future__ import annotations

import copy
import gc
import pickle
import types

import pytest
import torch
from torch import nn

import jumar
from convert_modules import Norm, X, model
from jumar.convert import ConverterError, plan, revert, swap


def test_class_keeps_its_name_and_ancestry():
    m = model()
    jumar.kernelize(m)
    norm = m[0].norm
    assert type(norm) is not Norm and isinstance(norm, Norm)
    assert type(norm).__name__ == "Norm" and type(norm).__qualname__ == Norm.__qualname__
    assert type(norm).__module__ == Norm.__module__
    assert type(norm) is type(m[1].norm)
    assert repr(m) == repr(model())
    assert vars(norm).keys() == vars(Norm()).keys()
    assert type(norm).forward.__qualname__ == "Norm.forward"


def test_hooks_run_and_modules_are_called():
    m = model()
    seen = []
    m[0].norm.register_forward_hook(lambda mod, args, out: seen.append("norm"))
    m[0].mlp.gate_proj.register_forward_pre_hook(lambda mod, args: seen.append("gate"))
    m[0].mlp.down_proj = nn.Sequential(m[0].mlp.down_proj, nn.Dropout(0.0))  # as an adapter would
    expected = m(X)
    expected_seen, seen[:] = list(seen), []
    report = jumar.kernelize(m)
    assert torch.allclose(m(X), expected, atol=1e-6)
    assert seen == expected_seen == ["norm", "gate"]
    report.undo()
    assert torch.equal(m(X), expected)


def test_a_forward_on_the_instance_wins():
    m = model()
    m[0].norm.forward = lambda x: x * 3
    m[1].mlp.forward = types.MethodType(lambda self, x: x, m[1].mlp)
    expected = m(X)
    report = jumar.convert(m, ["npu_rms_norm", "npu_swiglu"])
    reasons = {s.path: s.reason for s in report.skipped}
    assert set(reasons) == {"0.norm", "1.mlp"}
    assert all("overridden on the instance" in r for r in reasons.values())
    assert torch.allclose(m(X), expected, atol=1e-6)


def test_a_forward_on_the_instance_that_is_the_class_s_own():
    """What a library leaves behind that wrapped forward for a while and assigned the old value back."""
    m = model()
    bound = m[0].norm.forward
    m[0].norm.forward = bound
    report = jumar.convert(m, ["npu_rms_norm"])
    assert not report.skipped
    jumar.reset_call_counts()
    m(X)
    assert jumar.call_counts()["npu_rms_norm"] == 2
    m[1].norm.forward = m[1].norm.forward  # and the same after conversion
    report.undo()
    assert m[0].norm.__dict__["forward"] == bound and "forward" not in m[1].norm.__dict__
    jumar.reset_call_counts()
    m(X)
    assert not jumar.call_counts()


def test_reports_undo_their_own_changes_only():
    m = model()
    first = jumar.convert(m, ["npu_rms_norm"])
    second = jumar.convert(m, ["npu_rms_norm", "npu_linear"])
    first.undo()
    assert type(m[0].norm) is Norm and type(m[0].mlp.up_proj) is not nn.Linear
    second.undo()
    assert revert(m) == 0


def test_undo_says_what_stands_in_its_way():
    m = model()
    report = jumar.convert(m, ["npu_rms_norm"])
    cls = type(m[0].norm)
    m[0].norm.__class__ = type("Wrapped", (cls,), {})  # as fully_shard does
    assert jumar.convert(m, ["npu_rms_norm"]).replaced == []
    with pytest.raises(ConverterError, match="0.norm: its class is now Wrapped"):
        report.undo()
    assert type(m[1].norm) is Norm  # the rest is undone
    m[0].norm.__class__ = cls
    report.undo()
    assert revert(m) == 0


def test_failure_while_applying_rolls_back(monkeypatch):
    m = model()
    dry = plan(m, ["npu_rms_norm", "npu_swiglu"])

    def fail():
        raise RuntimeError("no")

    monkeypatch.setattr(dry.report().replaced[-1].action, "apply", fail)
    with pytest.raises(RuntimeError, match="no"):
        dry.apply()
    assert revert(m) == 0


def test_monkeypatched_class_is_noticed():
    """A class whose forward somebody assigns anew is judged by its new one, not by a cached replacement."""

    class Local(Norm):
        pass

    a = Local()
    jumar.convert(a, ["npu_rms_norm"])
    Local.forward = lambda self, x: x + self.weight
    b = Local()
    assert [s.status for s in jumar.convert(b, ["npu_rms_norm"]).sites] == ["skipped"]
    assert torch.equal(b(X), X + b.weight)


def test_generated_classes_are_freed():
    def make():
        class Local(Norm):
            pass

        m = Local()
        jumar.convert(m, ["npu_rms_norm"])
        return m

    m = make()
    key = next(k for k in swap._classes if k[0] is type(m).__jumar__.original)
    del m
    del key
    gc.collect()
    assert not any(k[0].__name__ == "Local" for k in list(swap._classes))


def test_copy_and_pickle_of_one_module():
    norm = Norm()
    jumar.convert(norm, ["npu_rms_norm"])
    for clone in (
        copy.copy(norm),
        copy.deepcopy(norm),
        *(pickle.loads(pickle.dumps(norm, p)) for p in range(6)),
    ):
        assert type(clone) is type(norm)
        jumar.reset_call_counts()
        assert torch.equal(clone(X), norm(X))
        assert jumar.call_counts()["npu_rms_norm"] == 2
    assert b"Norm" in pickle.dumps(norm)


class OwnReduce(Norm):
    """A class that says itself how to copy it."""

    def __reduce__(self):
        return (OwnReduce, (self.weight.numel(),), self.__dict__)


def test_class_with_its_own_reduce():
    norm = OwnReduce()
    jumar.convert(norm, ["npu_rms_norm"])
    clone = pickle.loads(pickle.dumps(norm))
    assert type(clone) is type(norm) and torch.equal(clone(X), norm(X))


def test_device_without_kernels_is_left_alone(monkeypatch):
    m = model()
    monkeypatch.setattr(swap, "_DEVICES", ("npu",))
    report = jumar.convert(m, ["npu_rms_norm"])
    assert {s.reason for s in report.sites} == {"there is no kernel for device 'cpu'"}


def test_torchscript_is_left_alone():
    scripted = torch.jit.script(nn.RMSNorm(8, eps=1e-6))
    assert not jumar.convert(nn.Sequential(scripted), ["npu_rms_norm"]).replaced

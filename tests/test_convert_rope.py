"""``npu_rope``: which rotary functions are recognised, and how the methods that call them are rebuilt."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import types

import pytest
import torch
from torch import nn

import jumar
from jumar.convert import ConverterError, plan
from jumar.hf import forwards, rotary

HEADS, WIDTH = 2, 8


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rope_with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def rope_that_uses_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    if position_ids is not None:
        rows = torch.arange(cos.shape[0])[:, None]
        cos, sin = cos[rows, position_ids], sin[rows, position_ids]
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def rope_fp32(q, k, cos, sin, unsqueeze_dim=1):
    a, b = apply_rotary_pos_emb(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim)
    return a.to(q.dtype), b.to(k.dtype)


def rope_vision(q, k, cos, sin):
    return rope_fp32(q, k, cos, sin, -2)


def rope_sections(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    cos, sin = (rotary.select_sections(t, mrope_section) for t in (cos, sin))
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def rope_neighbours(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    a, b = (rotary.rotate(t, "interleave") for t in (q, k))
    return q * cos + a * sin, k * cos + b * sin


def rope_partial(q, k, cos, sin, unsqueeze_dim=1):
    width = cos.shape[-1]
    a, b = apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((a, q[..., width:]), -1), torch.cat((b, k[..., width:]), -1)


def rope_deepseek(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """Neighbours in, halves out."""
    q, k = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


def rope_first_pairs(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """The same, by the first half of the tables alone."""
    cos, sin = (t[..., : t.shape[-1] // 2].unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def turn(x):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return turn(q), turn(k)


def rope_wrong_halves(q, k, cos, sin, unsqueeze_dim=1):
    """Neighbours in, the second of each pair first out."""
    return tuple(t.roll(t.shape[-1] // 2, -1) for t in rope_deepseek(q, k, cos, sin, None, unsqueeze_dim))


def rope_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


def rope_fixed_axis(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos, sin, 1)


def rope_q_only(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)[0], k


def rope_one(x, cos, sin):
    return x * cos + rotate_half(x) * sin


class RopeModule(nn.Module):
    """What the `kernels` package makes of a decorated function."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


@pytest.mark.parametrize(
    ("function", "form", "mode", "rule"),
    [
        (apply_rotary_pos_emb, "plain", "half", "promote"),
        (rope_with_positions, "positions", "half", "promote"),
        (rope_fp32, "plain", "half", "input"),
        (rope_vision, "vision", "half", "input"),
        (rope_sections, "sections", "half", "promote"),
        (rope_neighbours, "plain", "interleave", "promote"),
        (rope_deepseek, "positions", "pairs", "promote"),
        (rope_first_pairs, "positions", "first_pairs", "promote"),
        (rope_partial, "plain", "half", "promote"),
        (RopeModule(), "plain", "half", "promote"),
    ],
)
def test_recognised(function, form, mode, rule):
    found = rotary.recognise(function)
    assert isinstance(found, rotary.Rotary), found
    assert (found.form, found.mode, found.dtype_rule) == (form, mode, rule)
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (rope_that_uses_positions, "does not compute"),
        (rope_wrong_halves, "does not compute"),
        (rope_backwards, "does not compute"),
        (rope_fixed_axis, "RuntimeError"),
        (rope_q_only, "does not compute"),
        (rope_one, "no known form"),
        (lambda q, k, cos, sin, *more: (q, k), "no known form"),
        (lambda q, k, cos, sin: q, "does not return two tensors"),
    ],
)
def test_other_rotations_have_a_reason(function, reason):
    assert reason in rotary.recognise(function)


def attention(function):
    """A module whose forward calls ``function`` as the global ``apply_rotary`` of a module of its own."""
    source = types.ModuleType(f"model_file_{next(attention.numbers)}")
    source.apply_rotary = function
    source.torch, source.nn = torch, nn
    exec(
        "class Attention(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.qkv = nn.Linear(16, 48)\n"
        "    def forward(self, x, cos, sin, **kwargs):\n"
        "        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 2, 8).permute(2, 0, 3, 1, 4)\n"
        "        q, k = apply_rotary(q, k, cos, sin, **kwargs)\n"
        "        return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n",
        source.__dict__,
    )
    sys.modules[source.__name__] = source
    return source.Attention


attention.numbers = iter(range(10**6))


def tables(width=WIDTH, *lead):
    generator = torch.Generator().manual_seed(7)
    angle = torch.randn(*(lead or (2, 5)), width, generator=generator)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(
    ("function", "kwargs", "width"),
    [
        (apply_rotary_pos_emb, {}, 8),
        (rope_with_positions, {"position_ids": torch.arange(5)}, 8),
        (rope_neighbours, {}, 8),
        (rope_deepseek, {"position_ids": None}, 8),
        (rope_first_pairs, {}, 8),
        (rope_partial, {}, 4),
        (rope_partial, {}, 8),
        (rope_fp32, {"unsqueeze_dim": 1}, 8),
        (rope_sections, {"mrope_section": [1, 2, 1]}, 8),
        (RopeModule(), {}, 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_types_and_gradients_are_those_of_eager(function, kwargs, width, dtype):
    torch.manual_seed(0)
    m = attention(function)().to(dtype)
    x = torch.randn(2, 5, 16).to(dtype)
    cos, sin = tables(width, *((3, 2, 5) if "mrope_section" in kwargs else (2, 5)))
    cos, sin = cos.to(dtype), sin.to(dtype)
    out = m(x, cos, sin, **kwargs)
    out.sum().backward()
    expected, grad = out.detach(), m.qkv.weight.grad.clone()
    m.zero_grad()
    report = jumar.convert(m, ["npu_rope"], strict=True, verify=True)
    jumar.reset_call_counts()
    out = m(x, cos, sin, **kwargs)
    out.sum().backward()
    assert jumar.call_counts()["npu_rotary_mul"] == 2
    tolerance = 4 * torch.finfo(torch.bfloat16).eps if dtype == torch.bfloat16 else 1e-5
    assert out.dtype == expected.dtype
    assert (out - expected).abs().max() <= tolerance * expected.abs().max()
    assert (m.qkv.weight.grad - grad).abs().max() <= 2 * tolerance * grad.abs().max()
    report.undo()
    assert torch.equal(m(x, cos, sin, **kwargs), expected)


def test_wider_tables_widen_the_result_as_in_eager():
    """bf16 input with fp32 tables: eager's multiplication promotes; the vision form rounds back."""
    q = torch.randn(2, HEADS, 5, WIDTH).bfloat16()
    for function, expected in ((apply_rotary_pos_emb, torch.float32), (rope_fp32, torch.bfloat16)):
        found = rotary.recognise(function)
        from jumar.convert.rope import _make_function

        replaced = _make_function(found)
        for out, eager in zip(replaced(q, q, *tables()), function(q, q, *tables()), strict=True):
            assert out.dtype == eager.dtype == expected
            assert (out - eager).abs().max() <= 2**-7 * eager.abs().max()


def test_pair_offset_of_partial_rotation():
    """D9: with width 2 of 4 the pair is (0, 1), not (0, 2)."""
    found = rotary.recognise(rope_partial)
    from jumar.convert.rope import _make_function

    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    cos, sin = torch.tensor([[[1.0, 1.0]]]).cos(), torch.tensor([[[1.0, 1.0]]]).sin()
    out, _ = _make_function(found)(x, x, cos, sin)
    expected = torch.tensor([-1.142640, 1.922076, 3.0, 4.0])
    assert torch.allclose(out.flatten(), expected, atol=1e-6)


def test_rotation_keeps_the_norm_and_can_be_turned_back():
    from jumar.convert.rope import _make_function

    q = torch.randn(2, HEADS, 5, WIDTH)
    cos, sin = (t[..., : WIDTH // 2].repeat(1, 1, 2) for t in tables())
    rope = _make_function(rotary.recognise(apply_rotary_pos_emb))
    turned, _ = rope(q, q, cos, sin)
    assert torch.allclose(turned.norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    back, _ = rope(turned, turned, cos, -sin)
    assert torch.allclose(back, q, atol=1e-5)


# ---- the methods ----


def test_nothing_of_the_process_changes():
    cls = attention(apply_rotary_pos_emb)
    source = sys.modules[cls.__module__]
    before, forward = dict(vars(source)), cls.forward
    m, other = cls(), cls()
    report = jumar.convert(m, ["npu_rope"])
    assert vars(source) == before and cls.forward is forward
    x = torch.randn(2, 5, 16)
    jumar.reset_call_counts()
    other(x, *tables())
    assert jumar.call_counts() == {}
    m(x, *tables())
    assert jumar.call_counts() == {"npu_rotary_mul": 2}
    report.undo()
    assert type(m) is cls


def test_globals_belong_to_a_registered_module():
    """torch.compile finds the globals of functions that it inlines through sys.modules."""
    m = attention(apply_rotary_pos_emb)()
    jumar.convert(m, ["npu_rope"])
    space = type(m).forward.__globals__
    assert sys.modules[space["__name__"]].__dict__ is space
    assert space["apply_rotary"] is not apply_rotary_pos_emb
    assert type(m).forward.__module__ == type(m).__module__


def test_modules_of_globals_go_with_the_class():
    def spaces():
        gc.collect()
        return {name for name in sys.modules if name.startswith("_jumar_globals_")}

    # What earlier tests left behind may go at any time.
    before = spaces()
    m = attention(apply_rotary_pos_emb)()
    plan(m, ["npu_rope"])
    assert not spaces() - before
    jumar.convert(m, ["npu_rope"])
    assert len(spaces() - before) == 1
    del sys.modules[type(m).__module__]
    del m
    assert not spaces() - before


def test_copies_and_pickles():
    m = attention(apply_rotary_pos_emb)()
    jumar.convert(m, ["npu_rope"])
    x = torch.randn(2, 5, 16)
    for clone in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        jumar.reset_call_counts()
        assert torch.equal(clone(x, *tables()), m(x, *tables()))
        assert jumar.call_counts() == {"npu_rotary_mul": 4}


def test_a_pickle_that_no_longer_fits_its_library_says_so():
    cls = attention(apply_rotary_pos_emb)
    m = cls()
    jumar.convert(m, ["npu_rope"])
    data = pickle.dumps(m)
    del m
    gc.collect()
    cls.forward = lambda self, x: x
    with pytest.raises(ConverterError, match="no method of Attention refers to apply_rotary"):
        pickle.loads(data)


def keyword(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        kwargs.pop("old", None)
        return function(*args, **kwargs)

    return wrapped


class Hides:
    """A decorator that keeps the function in an attribute."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function


def hidden(function):
    keeper = Hides(function)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return keeper.function(*args, **kwargs)

    return wrapped


class Base(nn.Module):
    def rope(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


class Inherits(Base):
    def forward(self, q, k, cos, sin):
        return self.rope(q, k, cos, sin)


class Decorated(nn.Module):
    scale = 1

    @keyword
    @keyword
    def forward(self, q, k, cos, sin, *, scale: float = 2.0):
        def inner(t):
            return apply_rotary_pos_emb(t, k, cos, sin)[0]

        assert __class__ is Decorated
        return inner(q) * scale, k


class Hidden(nn.Module):
    @hidden
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


class TwoMeanings(Base):
    def forward(self, q, k, cos, sin):
        return self.rope(q, k, cos, sin), rope_one(q, cos, sin)


Q = torch.randn(2, HEADS, 5, WIDTH, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("cls", [Inherits, Decorated])
def test_inherited_methods_decorators_closures_and_inner_functions(cls):
    m = cls()
    args = (Q, Q * 2, *tables())
    expected = m(*args)
    original = cls.forward
    jumar.convert(m, ["npu_rope"], strict=True)
    jumar.reset_call_counts()
    actual = m(*args, old=1) if cls is Decorated else m(*args)
    assert jumar.call_counts() == {"npu_rotary_mul": 2}
    assert all(torch.allclose(a, e, atol=1e-6) for a, e in zip(actual, expected, strict=True))
    assert cls.forward is original
    if cls is Decorated:
        rebuilt = type(m).forward
        assert rebuilt is not original and rebuilt.__wrapped__ is not original.__wrapped__
        inner, was = rebuilt.__wrapped__.__wrapped__, original.__wrapped__.__wrapped__
        assert (
            inner.__kwdefaults__ == was.__kwdefaults__
            and inner.__annotations__ == was.__annotations__
        )
        assert inner.__code__ is was.__code__ and inner.__qualname__ == was.__qualname__
        assert torch.allclose(m(*args, scale=1.0)[0], expected[0] / 2, atol=1e-6)


def test_a_decorator_that_hides_the_method_is_refused():
    report = jumar.convert(Hidden(), ["npu_rope"])
    assert [s.status for s in report.sites] == ["skipped"]
    assert "wrapped by a decorator that hides the method" in report.sites[0].reason


def test_pairs_of_another_width_than_the_tables_are_refused():
    m = attention(rope_first_pairs)()
    jumar.convert(m, ["npu_rope"])
    with pytest.raises(RuntimeError, match="npu_rope: .* tables of their own width 8, got 4"):
        m(torch.randn(2, 5, 16), *tables(4))


def test_only_the_recognised_function_is_replaced():
    m = TwoMeanings()
    assert forwards.globals_used(TwoMeanings.forward)["rope_one"] is rope_one
    report = jumar.convert(m, ["npu_rope"])
    assert len(report.replaced) == 1
    jumar.reset_call_counts()
    m.rope(Q, Q, *tables())
    assert jumar.call_counts() == {"npu_rotary_mul": 2}
    assert type(m).forward is TwoMeanings.forward


def test_unknown_rotary_functions_are_reported():
    class Turned(nn.Module):
        def forward(self, q, k, cos, sin):
            return rope_wrong_halves(q, k, cos, sin)

    report = jumar.convert(Turned(), ["npu_rope"])
    assert [s.status for s in report.sites] == ["skipped"]
    assert "rope_wrong_halves: does not compute" in report.sites[0].reason


def test_later_changes_of_the_model_file_are_kept_out_but_seen_by_new_conversions():
    cls = attention(apply_rotary_pos_emb)
    first = cls()
    jumar.convert(first, ["npu_rope"])
    cls.forward = lambda self, x, cos, sin: x
    second = cls()
    assert jumar.convert(second, ["npu_rope"]).sites == []
    x = torch.randn(2, 5, 16)
    assert second(x, None, None) is x
    assert first(x, *tables()).shape == (2, HEADS, 5, WIDTH)


def test_a_patched_class_is_rebuilt_from_its_new_code():
    """The replacement of the old code is still in use when the class gets new code that is recognised as well."""
    cls = attention(apply_rotary_pos_emb)
    first = cls()
    jumar.convert(first, ["npu_rope"])
    source = sys.modules[cls.__module__]
    exec(
        "def forward(self, x, cos, sin):\n"
        "    q = self.qkv(x).view(*x.shape[:-1], 3, 2, 8)[..., 0, :, :].transpose(1, 2)\n"
        "    return apply_rotary(q, q, cos, sin)[0]\n",
        source.__dict__,
    )
    cls.forward = source.forward
    third, x = cls(), torch.randn(2, 5, 16)
    expected = third(x, *tables())
    jumar.convert(third, ["npu_rope"], strict=True)
    jumar.reset_call_counts()
    assert torch.allclose(third(x, *tables()), expected, atol=1e-6)
    assert jumar.call_counts() == {"npu_rotary_mul": 2}
    assert type(third) is not type(first)

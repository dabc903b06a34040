"""Recognise rotary functions: which lanes pair up, where the tables come from, what type comes out."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from jumar.convert.verify import Trial
from jumar.hf import probe

#: Arguments after (q, k, cos, sin) that a known form takes.
_FORMS = {
    (): "vision",
    ("unsqueeze_dim",): "plain",
    ("position_ids", "unsqueeze_dim"): "positions",
    ("mrope_section", "unsqueeze_dim"): "sections",
}


@dataclass(frozen=True)
class Rotary:
    """A rotary function's behaviour; ``names`` are its argument names, ``defaults`` those of its last arguments.

    ``mode``: ``half`` and ``interleave`` are those of npu_rotary_mul.  ``pairs``: neighbours are pairs, and come out in
    halves (DeepSeek).  ``first_pairs``: the same, by the first half of the tables alone.
    """

    form: str
    mode: str
    dtype_rule: str
    axis: int
    names: tuple[str, ...]
    defaults: tuple


def looks_rotary(name: str, value) -> bool:
    """Whether a global that a method refers to is worth probing; never enough to replace it."""
    lowered = name.lower()
    if (
        not callable(value)
        or isinstance(value, type)
        or not ("rotary" in lowered or "rope" in lowered)
    ):
        return False
    return bool({"cos", "sin", "freqs_cis", "rope_cache"} & {p.name for p in _parameters(value)})


def _parameters(value) -> list[inspect.Parameter]:
    """The arguments of a function, or of the module that a decorator has made of one."""
    try:
        return list(
            inspect.signature(
                value.forward if isinstance(value, torch.nn.Module) else value
            ).parameters.values()
        )
    except (TypeError, ValueError):
        return []


def recognise(value) -> Rotary | str:
    """What the rotary function ``value`` does, or why it has no operator."""
    parameters = _parameters(value)
    names = tuple(p.name for p in parameters)
    form = _FORMS.get(names[4:])
    if (
        form is None
        or len(names) < 4
        or any(p.kind is not p.POSITIONAL_OR_KEYWORD for p in parameters)
    ):
        return f"no known form of rotary function takes ({', '.join(names)})"
    defaults = tuple(p.default for p in parameters if p.default is not inspect.Parameter.empty)
    try:
        axis, mode = _behaviour(value, form)
        if not mode:
            return "does not compute x * cos + rotate(x) * sin, with halves or neighbours as pairs"
        return Rotary(form, mode, _dtype_rule(value, form, axis), axis, names, defaults)
    except probe.ProbeFailed as error:
        return str(error)


_BATCH, _HEADS, _TOKENS, _WIDTH = 2, 3, 5, 12
_SECTIONS = [1, 2, 3]


def rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    """The other half of the rotation: halves (-x2, x1), or neighbours (-x[2i+1], x[2i])."""
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def as_half(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """x, cos, sin and the mode by which npu_rotary_mul computes what ``mode`` means."""
    if mode not in ("pairs", "first_pairs"):
        return x, cos, sin, mode
    if x.shape[-1] != cos.shape[-1]:
        raise RuntimeError(
            f"npu_rope: pairs that come out in halves need tables of their own width {x.shape[-1]}, got {cos.shape[-1]}"
        )
    if mode == "first_pairs":
        cos, sin = (torch.cat((t[..., : t.shape[-1] // 2],) * 2, dim=-1) for t in (cos, sin))
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin, "half"


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: str) -> torch.Tensor:
    x, cos, sin, mode = as_half(x, cos, sin, mode)
    return x * cos + rotate(x, mode) * sin


def select_sections(table: torch.Tensor, section: list[int]) -> torch.Tensor:
    """[3, B, S, D] tables -> [B, S, D]: time, height and width own the channel blocks that ``section`` gives."""
    return torch.cat(
        [part[i % 3] for i, part in enumerate(table.split(section * 2, dim=-1))], dim=-1
    )


def _call(value, form: str, q, k, cos, sin, axis: int | None, positions=None):
    def function():
        if form == "vision":
            return value(q, k, cos, sin)
        extra = {} if axis is None else {"unsqueeze_dim": axis}
        if form == "sections":
            extra["mrope_section"] = _SECTIONS
        elif positions is not None:
            extra["position_ids"] = positions
        return value(q, k, cos, sin, **extra)

    try:
        with probe.quiet():
            out = function()
    except Exception as error:
        raise probe.ProbeFailed(probe.describe(error).replace("its forward", "it")) from error
    if not isinstance(out, tuple) or len(out) != 2:
        raise probe.ProbeFailed("it does not return two tensors")
    return out


def _tables(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin: random, with halves that differ, so that nothing but the exact formula fits."""
    lead = {"vision": (_TOKENS,), "sections": (3, _BATCH, _TOKENS)}.get(form, (_BATCH, _TOKENS))
    return probe.randn(*lead, _WIDTH, seed=11), probe.randn(*lead, _WIDTH, seed=12)


def _behaviour(value, form: str) -> tuple[int, str]:
    """(the axis at which tables get their head dimension by default, pairing) or (0, "")."""
    cos, sin = _tables(form)
    q, k = _inputs(form)
    if form == "vision":
        layouts = {-2: (q, k)}
    else:
        layouts = {1: (q, k), 2: (q.transpose(1, 2), k.transpose(1, 2))}
    for mode in ("half", "interleave", "pairs", "first_pairs"):
        fits = []
        for axis, (a, b) in layouts.items():
            c, s = (
                (select_sections(t, _SECTIONS) for t in (cos, sin))
                if form == "sections"
                else (cos, sin)
            )
            c, s = c.double().unsqueeze(axis), s.double().unsqueeze(axis)
            expected = [_rotated(t.double(), c, s, mode) for t in (a, b)]
            outs = [_call(value, form, a, b, cos, sin, axis)]
            if form == "positions":
                # An argument that changes nothing, in the versions where it is one.
                positions = torch.arange(_TOKENS, device="cpu").flip(0).expand(_BATCH, -1)
                outs.append(_call(value, form, a, b, cos, sin, axis, positions))
            fits.append(
                all(probe.same(o, e) for out in outs for o, e in zip(out, expected, strict=True))
            )
        if all(fits):
            return next(iter(layouts)), mode
    return 0, ""


def _inputs(form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in the default layout, with one head for k."""
    if form == "vision":
        shapes = (_TOKENS, _HEADS, _WIDTH), (_TOKENS, 1, _WIDTH)
    else:
        shapes = (_BATCH, _HEADS, _TOKENS, _WIDTH), (_BATCH, 1, _TOKENS, _WIDTH)
    return probe.randn(*shapes[0], seed=13), probe.randn(*shapes[1], seed=14)


def trial(found: Rotary, value, replacement) -> Trial:
    """The original function and its replacement on the same q, k and tables."""
    extra = {"mrope_section": _SECTIONS} if found.form == "sections" else {}
    return Trial(
        lambda q, k, cos, sin: value(q, k, cos, sin, **extra),
        lambda q, k, cos, sin: replacement(q, k, cos, sin, **extra),
        (*_inputs(found.form), *_tables(found.form)),
    )


def _dtype_rule(value, form: str, axis: int) -> str:
    """What bf16 input and fp32 tables give: the wider type (``"promote"``) or the ``"input"``'s."""
    cos, sin = _tables(form)
    q = _inputs(form)[0].bfloat16()
    out = _call(value, form, q, q, cos, sin, None if form == "vision" else axis)
    return "promote" if out[0].dtype == torch.float32 else "input"

"""The cases of ``jumar bench``, the same in every mode: operator, dtype, shape and layout.

A case has a text, ``npu_rms_norm:bfloat16:rows=2047,cols=1531:sliced``, that ``--case`` takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import jumar
from jumar.bench.shapes import pick, quick_shapes, read_shapes, sizes_of
from jumar.opinfo import OPERATORS, Case, OpInfo, Value, dtype_name, each, find, parse_dtype
from jumar.opinfo.cases import expanded, sliced, transposed
from jumar.spelling import unknown

#: How the tensors of a case lie in memory. ``expanded``: incoming gradients with strides of 0.
LAYOUTS = ("contiguous", "sliced", "transposed", "expanded")
_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {"sliced": sliced, "transposed": transposed}


@dataclass
class Job:
    """One case: an operator on a shape, in a dtype and a layout."""

    info: OpInfo
    dtype: torch.dtype
    shape_name: str
    shape: dict[str, int]
    layout: str = "contiguous"

    @property
    def text(self) -> str:
        """What ``--case`` takes."""
        sizes = ",".join(f"{key}={size}" for key, size in self.shape.items())
        return ":".join([self.info.name, dtype_name(self.dtype), sizes, self.layout])

    def tensors(self) -> dict[str, Value]:
        """The arguments; the same at every call."""
        tensors = self.info.bench(self.shape, self.dtype)
        change = _CHANGES.get(self.layout)
        if change is None:
            return tensors
        return {name: each(change, value) for name, value in tensors.items()}

    def grads(self, tensors: dict[str, Value]) -> list[Tensor]:
        """A gradient for every differentiable output."""
        if not self.info.differentiable:
            return []
        with torch.no_grad():
            results = self.info.fused(*self.info.arguments(tensors).values())
        generator = torch.Generator().manual_seed(2)
        change = expanded if self.layout == "expanded" else _CHANGES.get(self.layout, lambda g: g)
        return [
            change(torch.randn(output.shape, generator=generator).to(output.dtype))
            for output in self.info.carrying(results)
        ]

    def case(self) -> Case:
        """For :func:`jumar.verify.compare`."""
        tensors = self.tensors()
        return Case(self.text, tensors, {}, self.grads(tensors))


def layouts_of(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """``"sliced,expanded"`` as names of layouts, ``all``, or the default. ValueError for an unknown one."""
    if text is None:
        return default
    if text == "all":
        return LAYOUTS
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in LAYOUTS:
            raise ValueError(unknown("layout", name, LAYOUTS))
    return names


def parse_case(text: str) -> Job:
    """The job of a case's text; the shape may be a name, the layout left out. ValueError for what is none."""
    parts = text.strip().split(":")
    if not 3 <= len(parts) <= 4:
        raise ValueError(f"case {text!r} is not OPERATOR:DTYPE:SHAPE or OPERATOR:DTYPE:SHAPE:LAYOUT")
    info = find(parts[0])
    dtype = parse_dtype(parts[1])
    if "=" in parts[2]:
        try:
            sizes = sizes_of(parts[2])
        except ValueError as error:
            raise ValueError(f"case {text!r}: {error}") from error
        known = next(iter(read_shapes(info.shapes_file).values()))
        if sizes.keys() != known.keys():
            raise ValueError(
                f"case {text!r}: {info.name} has the sizes {', '.join(known)}, got {', '.join(sizes)}"
            )
        named = read_shapes(info.shapes_file).items()
        name = next((name for name, known in named if known == sizes), parts[2])
    else:
        ((name, sizes),) = pick(info.shapes_file, parts[2]).items()
    (layout,) = layouts_of(parts[3] if len(parts) == 4 else None, ("contiguous",))
    return Job(info, dtype, name, sizes, layout)


def _has_bf16() -> bool:
    """Whether the CPU multiplies bf16 itself, as far as it may."""
    return jumar.simd_target() in ("AVX3_ZEN4", "AVX3_SPR")


def plan(
    names: list[str] | None,
    dtypes: list[torch.dtype] | None,
    shape: str | None,
    *,
    quick: bool = False,
    layouts: tuple[str, ...] = ("contiguous",),
    shapes_file: str | None = None,
    every_dtype: bool = False,
) -> list[Job]:
    """The jobs for operators (None: all that are registered), dtypes (None: fp32 and bf16) and shapes (None: all).

    ``quick`` keeps the shape that is marked for it; for matrix products in 16 bits on a CPU without bf16 dot products,
    which eager does so slowly that it is not timed on large shapes, the smallest one comes first.  Dtypes that an operator does not take are left out unless ``every_dtype``.  ``shapes_file``:
    a file of shapes in place of the operator's own.  ValueError for an unknown operator, shape, or a malformed file.
    """
    infos = [find(n) for n in names] if names else [i for i in OPERATORS.values() if i.registered]
    jobs = []
    for info in infos:
        if not info.registered:
            raise ValueError(f"operator {info.name!r} is not in the library that is loaded")
        kind = shapes_file or info.shapes_file
        _check_keys(info, kind)
        for dtype in dtypes or [torch.float32, torch.bfloat16]:
            if dtype not in info.dtypes and not every_dtype:
                continue
            shapes = pick(kind, shape)
            if quick and shape is None:
                shapes = quick_shapes(kind)
                if info.multiplies and dtype.itemsize == 2 and not _has_bf16():
                    smallest = dict(list(read_shapes(kind).items())[:1])
                    shapes = {**smallest, **shapes}
            jobs += [
                Job(info, dtype, name, sizes, layout)
                for name, sizes in shapes.items()
                for layout in layouts
            ]
    if not jobs:
        asked = ", ".join(dtype_name(dtype) for dtype in dtypes or ())
        raise ValueError(f"none of these operators takes {asked}")
    return jobs


def _check_keys(info: OpInfo, kind: str) -> None:
    if kind == info.shapes_file:
        return
    own = next(iter(read_shapes(info.shapes_file).values()))
    for name, sizes in read_shapes(kind).items():
        if sizes.keys() != own.keys():
            raise ValueError(
                f"{kind}: {name} has the sizes {', '.join(sizes)}; {info.name} needs {', '.join(own)}"
            )

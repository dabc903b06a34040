"""What the operator tests share: data with traps, and the comparison with the fp64 oracle in ulps."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import jumar
from jumar._load import NAMESPACES

FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HALF_DTYPES = [torch.bfloat16, torch.float16]


def ulp_size(dtype: torch.dtype, value: Tensor) -> Tensor:
    """Distance (fp64) between neighbours of `dtype` at |value|."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(value.abs().double().clamp(min=info.tiny, max=info.max))
    return torch.ldexp(torch.full_like(value, info.eps, dtype=torch.float64), exponent - 1)


def max_ulp(actual: Tensor, expected: Tensor, floor: float | Tensor = 0.0) -> float:
    """Largest error of `actual` against the fp64 `expected`, in ulps of actual's dtype, less an absolute `floor`.

    NaN counts as infinitely wrong unless both are NaN.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    expected = expected.double()
    got = actual.double()
    error = ((got - expected).abs() - floor).clamp(min=0) / ulp_size(actual.dtype, expected)
    same = (got == expected.to(actual.dtype).double()) | (got.isnan() & expected.isnan())
    error = torch.where(same, torch.zeros_like(error), error)
    error = torch.where(error.isnan(), torch.full_like(error, float("inf")), error)
    return error.max().item() if error.numel() else 0.0


def assert_ulp(
    actual: Tensor, expected: Tensor, bound: float, what: str = "", floor: float | Tensor = 0.0
) -> None:
    """Fails when :func:`max_ulp` is not at most `bound` (so NaN fails)."""
    error = max_ulp(actual, expected, floor)
    assert error <= bound, f"{what}: {error} ulp of {actual.dtype}, allowed {bound}"


def signed(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Normal data rounded to `dtype`; the first row is constant and the last one zero where there are more than two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    if len(shape) > 1 and shape[0] > 2:
        x[0] = 1.5
        x[-1] = 0.0
    return x.to(dtype)


def strided_views(x: Tensor) -> dict[str, Tensor]:
    """The same values in other layouts: padded rows, transposed memory, every second element."""
    views = {"contiguous": x}
    padded = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    padded[..., : x.shape[-1]] = x
    views["padded"] = padded[..., : x.shape[-1]]
    views["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
    stepped = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), dtype=x.dtype)
    stepped[..., ::2] = x
    views["stepped"] = stepped[..., ::2]
    return views


def check_retain_graph(f: Callable[..., Tensor], *inputs: Tensor) -> None:
    """backward(retain_graph=True) twice adds the same gradient twice, and inputs and gradients stay untouched."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    before = [x.detach().clone() for x in leaves]
    y = f(*leaves)
    grad = torch.randn_like(y)
    kept = grad.clone()
    y.backward(grad, retain_graph=True)
    first = [x.grad.clone() for x in leaves]
    y.backward(grad)
    for leaf, g, x in zip(leaves, first, before, strict=True):
        assert torch.equal(leaf.grad, g + g)
        assert torch.equal(leaf.detach(), x)
    assert torch.equal(grad, kept)


def check_layouts_and_double_backward(name: str, f: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Every layout of x gives the same bits, gradients add up, and ``name`` refuses a second derivative."""
    want = f(x)
    for layout in strided_views(x).values():
        assert torch.equal(f(layout), want)
    check_retain_graph(f, x)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(f(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{name}: not differentiable twice"):
        dx.sum().backward()
    f(leaf).sum().backward()  # a stride-0 gradient
    assert torch.equal(leaf.grad, torch.autograd.grad(f(leaf), leaf, torch.ones_like(want))[0])


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads while it lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        assert jumar.num_threads() == count
        yield
    finally:
        torch.set_num_threads(before)


def check_threads(f: Callable[[], Sequence[Tensor]]) -> None:
    """The results have the same bits for 1, 2 and 3 threads."""
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(f())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def peak_memory(script: str) -> tuple[int, int]:
    """Kilobytes that a script in a process of its own prints: the rise of the peak with fused operators, and with eager.

    The script may call ``peak()``.
    """
    head = "import resource\ndef peak():\n    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    out = subprocess.run([sys.executable, "-c", head + script], check=True, capture_output=True, text=True).stdout
    fused, eager = out.split()
    return int(fused), int(eager)


def expert_ids(
    tokens: int, top_k: int, experts: int = 5, dtype: torch.dtype = torch.int32, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, experts, (tokens, top_k), generator=generator).to(dtype)


def assert_schemas(right: dict[str, str]) -> None:
    """The operators have these schemas, from the bracket on, in every namespace."""
    for ns in NAMESPACES:
        for name, schema in right.items():
            assert str(getattr(getattr(torch.ops, ns), name).default._schema) == f"{ns}::{name}{schema}"

"""jumar.optim.clip_grad_norm_ against torch.nn.utils.clip_grad_norm_ and fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import jumar
from jumar.optim import clip_grad_norm_
from op_util import FLOAT_DTYPES, check_threads, max_ulp

SHAPES = [(3, 5), (), (17,), (2, 0), (40, 133)]
NORMS = [1.0, 2.0, 3.0, 0.5, 2.5, math.inf]


def parameters(dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    ps = []
    for shape in SHAPES:
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
        ps.append(p)
    return [*ps, nn.Parameter(torch.zeros(3))]  # one without a gradient


def without_empty(ps):
    """torch refuses the infinity norm of an empty tensor."""
    return [p for p in ps if p.numel()]


def flat64(ps):
    return torch.cat([p.grad.double().flatten() for p in ps if p.grad is not None])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_and_scaling(dtype, norm_type):
    for max_norm in (0.5, 1e6):
        ours, theirs = parameters(dtype, 0.01), parameters(dtype, 0.01)
        before = [p.grad.clone() for p in ours[:-1]]
        exact = torch.linalg.vector_norm(flat64(ours), norm_type)
        norm = clip_grad_norm_(ours, max_norm, norm_type, foreach=True)
        right = torch.nn.utils.clip_grad_norm_(without_empty(theirs), max_norm, norm_type)
        assert norm.dtype == right.dtype and norm.shape == right.shape
        # In fp64 the root multiplies the relative error of the sum, and torch's own norm is no better.
        assert max_ulp(norm, exact) <= (32 if dtype == torch.float64 else 0.51)
        # torch's own factor from our norm, bit for bit.
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(before, factor)
        for p, expected in zip(ours, before, strict=False):
            assert torch.equal(p.grad, expected)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_non_finite_norms_are_torchs(dtype):
    for bad in (math.nan, math.inf, -math.inf):
        for norm_type in (1.0, 2.0, 3.0, math.inf):
            ours, theirs = parameters(dtype), parameters(dtype)
            for ps in (ours, theirs):
                ps[4].grad[3, 7] = bad
            kept = [p.grad.clone() for p in ours[:-1]]
            with pytest.raises(RuntimeError, match=f"total norm of order {norm_type} .*non-finite"):
                clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
            for p, q in zip(ours, kept, strict=False):
                torch.testing.assert_close(p.grad, q, rtol=0, atol=0, equal_nan=True)
            norm = clip_grad_norm_(ours, 1.0, norm_type)
            right = torch.nn.utils.clip_grad_norm_(without_empty(theirs), 1.0, norm_type)
            torch.testing.assert_close(norm, right, equal_nan=True)
            for p, q in zip(ours[:-1], theirs[:-1], strict=True):
                torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


def test_one_pass_each_and_only_when_needed():
    ps = parameters()
    jumar.reset_call_counts()
    clip_grad_norm_(ps, 1e6)
    assert jumar.call_counts() == {"grad_power_sums": 1}
    version = ps[0].grad._version
    clip_grad_norm_(ps, 1e-3)
    assert jumar.call_counts() == {"grad_power_sums": 2, "scale_grads_": 1}
    assert ps[0].grad._version == version + 1


def test_same_norm_for_every_thread_count():
    ps = [nn.Parameter(torch.zeros(n)) for n in (3, 250001, 1, 90000)]
    generator = torch.Generator().manual_seed(0)
    for p in ps:
        p.grad = torch.randn(p.shape, generator=generator)
    check_threads(lambda: [clip_grad_norm_(ps, 1e9, norm_type) for norm_type in (1.0, 2.0, math.inf)])


def test_arguments():
    ps = parameters()
    exact = torch.linalg.vector_norm(flat64(ps))
    assert clip_grad_norm_((p for p in ps), 1e9) == clip_grad_norm_(ps, 1e9) == exact.float()
    assert clip_grad_norm_(ps[0], 1e9) == ps[0].grad.norm()
    assert clip_grad_norm_([ps[-1]], 1.0) == clip_grad_norm_([], 1.0) == torch.tensor(0.0)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in []), 1.0)
    # Mixed dtypes: the norm's is the promoted one, every gradient keeps its own.
    mixed = [parameters(dtype)[0] for dtype in (torch.bfloat16, torch.float32)]
    assert clip_grad_norm_(mixed, 0.1).dtype == torch.float32
    assert [p.grad.dtype for p in mixed] == [torch.bfloat16, torch.float32]
    # Strided gradients.
    p = nn.Parameter(torch.zeros(8, 6))
    p.grad = torch.randn(6, 8).t()
    kept = p.grad.clone()
    norm = clip_grad_norm_(p, 1.0)
    torch.testing.assert_close(p.grad, kept / norm)


def test_what_goes_to_torch():
    """Complex gradients, norms that are no norms."""
    ours, theirs = ([nn.Parameter(torch.complex(torch.ones(4), torch.ones(4)))] for _ in range(2))
    for p in (*ours, *theirs):
        p.grad = torch.complex(torch.ones(4), torch.arange(4.0))
    assert clip_grad_norm_(ours, 1.0) == torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(ours[0].grad, theirs[0].grad)
    ours, theirs = without_empty(parameters()), without_empty(parameters())
    for norm_type in (0.0, -1.0):
        assert torch.equal(
            clip_grad_norm_(ours, 1.0, norm_type),
            torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_gradients_with_a_single_factor(dtype):
    """Where dtypes are mixed torch multiplies 16-bit gradients by an fp32 factor."""
    ours, theirs = [], []
    for ps in (ours, theirs):
        for kind, scale in ((dtype, 1.0), (torch.float32, 0.3)):
            ps += parameters(kind, scale)[:1]
    factor = torch.clamp(0.7 / (clip_grad_norm_(ours, 0.7) + 1e-6), max=1.0)
    torch._foreach_mul_([theirs[0].grad], factor)
    assert torch.equal(ours[0].grad, theirs[0].grad)

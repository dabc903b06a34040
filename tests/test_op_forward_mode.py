"""Forward-mode differentiation, which no operator has, is refused by each."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from jumar.opinfo import OPERATORS
from jumar.opinfo.spec import each, flat

REGISTERED = [info for info in OPERATORS.values() if info.registered]


def dual(tensor):
    if not tensor.is_floating_point():
        return tensor
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


def first_case(info):
    dtype = info.dtypes[0]
    return next(c for c in info.cases(dtype, 0) if all(t.numel() for t in flat(c.grads)))


@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_a_tangent_is_refused_by_name(info):
    """torch has no forward mode for custom operators, and loses a tangent in silence."""
    case, message = first_case(info), "forward-mode differentiation is not implemented"
    with forward_ad.dual_level():
        leaves = {n: each(dual, v) for n, v in info.arguments(case.tensors).items()}
        with pytest.raises(RuntimeError, match=f"^{info.name}: {message}"):
            info.fused(*leaves.values(), **case.options)
        if info.differentiable:
            leaves = info.arguments(case.tensors, grads=True)
            wanted = [t for v in leaves.values() for t in flat(v) if t.requires_grad]
            outputs = info.carrying(info.fused(*leaves.values(), **case.options))
            with pytest.raises(RuntimeError, match=f"^{info.name}: {message}"):
                torch.autograd.grad(outputs, wanted, [dual(g) for g in case.grads])


def test_jvp_is_refused_and_levels_without_tangents_are_not():
    def norm(x):
        return torch.ops.jumar.npu_rms_norm(x, torch.ones(4), 1e-6)[0]

    x = torch.ones(2, 4)
    with pytest.raises(RuntimeError, match="npu_rms_norm: forward-mode"):
        torch.func.jvp(norm, (x,), (x,))
    with forward_ad.dual_level():
        assert torch.equal(norm(x), norm(x.clone().requires_grad_()))

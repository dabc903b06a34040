"""The functions of jumar.ops against the schemas that they call."""

from __future__ import annotations

import inspect

import pytest
import torch

from jumar import ops
from jumar.ops import _wiring

DECLARED = [f for f in map(vars(ops).get, ops.__all__) if hasattr(f, "__wrapped__")]


@pytest.mark.parametrize("function", DECLARED, ids=lambda f: f.__name__)
def test_signatures_are_the_schemas(function):
    schema = getattr(torch.ops.jumar, function.__name__).default._schema
    arguments = {a.name: a for a in schema.arguments}
    parameters = inspect.signature(function).parameters
    assert len(DECLARED) > 15
    rest = [p for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for p in parameters.values():
        if p in rest:
            continue
        argument = arguments.pop(p.name)
        assert argument.kwarg_only == (p.kind is p.KEYWORD_ONLY)
        assert argument.has_default_value() == (p.default is not p.empty)
        if argument.has_default_value():
            assert argument.default_value == p.default, p.name
    assert not arguments or rest  # what is left goes in through *options and **options
    order = [a.name for a in schema.arguments if not a.kwarg_only]
    named = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert named == (order[: len(named)] if rest and rest[0].kind is rest[0].VAR_POSITIONAL else order)


def test_gradients_take_their_arguments_from_the_schema():
    x, gamma = torch.randn(3, 8), torch.randn(8)
    y, rstd = ops.npu_rms_norm(x, gamma)
    right = ops.npu_rms_norm_backward(y, x, gamma, rstd)
    named = ops.npu_rms_norm_backward(y, rstd=rstd, gamma=gamma, input=x)
    assert all(map(torch.equal, named, right))
    assert str(inspect.signature(ops.npu_swiglu_backward)) == "(grad_output, input, dim=-1)"
    assert "Gradient of" in ops.npu_swiglu_backward.__doc__
    with pytest.raises(TypeError, match="rstd"):
        ops.npu_rms_norm_backward(y, x, gamma)


def test_arguments_by_name_in_any_order():
    x, gamma = torch.randn(3, 8), torch.randn(8)
    want = ops.npu_rms_norm(x, gamma, 1e-6)[0]
    assert torch.equal(ops.npu_rms_norm(gamma=gamma, input=x)[0], want)
    tokens, ids = torch.randn(2, 3), torch.tensor([[0, 1], [1, 0]])
    permuted, rows = ops.npu_moe_token_permute(tokens, padded_mode=False, indices=ids)
    back = ops.npu_moe_token_unpermute(permuted, rows, restore_shape=None)
    assert torch.equal(back, tokens.repeat_interleave(2, 0))
    for wrong in ({}, {"gama": gamma}, {"gamma": gamma, "epsilon": 1e-6, "eps": 1e-6}):
        with pytest.raises(TypeError, match="npu_rms_norm"):
            ops.npu_rms_norm(x, **wrong)


def test_a_tensor_of_the_card_goes_to_the_cards_operator(monkeypatch):
    calls = []

    class Vendor:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setattr(_wiring, "on_card", lambda first: True)
    monkeypatch.setattr(torch.ops, "npu", Vendor())
    x, gamma = torch.empty(2, 4, device="meta"), torch.empty(4, device="meta")
    ops.npu_rms_norm(gamma=gamma, input=x)
    assert calls.pop() == ("npu_rms_norm", (x, gamma, 1e-6), {})
    ops.npu_rms_norm_backward(x, rstd=gamma, gamma=gamma, input=x)
    assert calls.pop() == ("npu_rms_norm_backward", (x, x, gamma, gamma), {})
    ops.npu_moe_gating_top_k_softmax_v2(x, k=2)
    assert calls.pop() == ("npu_moe_gating_top_k_softmax_v2", (x,), {"k": 2})
    ops.npu_grouped_matmul([x], [gamma], group_type=0)
    assert calls.pop() == ("npu_grouped_matmul", ([x], [gamma]), {"group_type": 0})

"""npu_moe_finalize_routing through torch."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

import jumar
from jumar import ops
from op_util import (
    FLOAT_DTYPES,
    assert_schemas,
    assert_ulp,
    check_layouts_and_double_backward,
    expert_ids,
    signed,
)

jm = torch.ops.jumar


def finalize64(rows, skip1, skip2, bias, scales, index, ids, mode, k):
    """The result, and the sum of its terms' magnitudes."""
    rows = rows.flatten(0, -2)
    top_k = scales.shape[1] if scales is not None else k
    n = len(index) // top_k
    slot = index.view(n, top_k) if mode >= 2 else index.view(top_k, n).T
    picked = torch.where(slot.unsqueeze(-1) >= 0, rows[slot.clamp(min=0).long()], 0.0)
    weights = torch.ones(n, top_k, dtype=rows.dtype) if scales is None else scales
    terms = [picked * weights.unsqueeze(-1)]
    if bias is not None:
        terms.append(bias[ids.long()] * weights.unsqueeze(-1))
    value, size = sum(t.sum(1) for t in terms), sum(t.abs().sum(1) for t in terms)
    for skip in (skip1, skip2):
        if skip is not None:
            value, size = value + skip, size + skip.abs()
    return value, size


def finalize_inputs(dtype, scales_dtype, n=6, top_k=3, width=9, dropped=False):
    generator = torch.Generator().manual_seed(5)
    index = torch.randperm(n * top_k, generator=generator).int()
    if dropped:
        index[::4] = -1
    return {
        "rows": signed(n * top_k, width, dtype=dtype),
        "skip1": signed(n, width, dtype=dtype, seed=1),
        "skip2": signed(n, width, dtype=dtype, seed=2),
        "bias": signed(5, width, dtype=dtype, seed=3),
        "scales": signed(n, top_k, dtype=scales_dtype, seed=4),
        "index": index,
        "ids": expert_ids(n, top_k),
    }


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_finalize_routing(dtype, scales_dtype, mode):
    inputs = finalize_inputs(dtype, scales_dtype, dropped=mode % 2 == 1)
    eps = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    for left_out in ((), ("skip2",), ("skip1", "skip2"), ("bias",), ("skip1", "skip2", "bias")):
        given = {
            k: None if k in left_out else v.clone().requires_grad_() if v.is_floating_point() else v
            for k, v in inputs.items()
        }
        out = ops.npu_moe_finalize_routing(*given.values(), mode)
        assert out.dtype == dtype
        wide = [
            v if v is None or not v.is_floating_point() else v.detach().double()
            for v in given.values()
        ]
        exact, size = finalize64(*wide, mode, None)
        assert_ulp(out.detach(), exact, 0.51, str(left_out), floor=10 * eps * size)
        grad = signed(6, 9, dtype=dtype, seed=7)
        out.backward(grad)
        leaves = [w if w is None or not w.is_floating_point() else w.requires_grad_() for w in wide]
        finalize64(*leaves, mode, None)[0].backward(grad.double())
        for name, leaf in zip(given, leaves, strict=True):
            if leaf is None or not leaf.is_floating_point():
                continue
            got = given[name].grad
            assert got.dtype == given[name].dtype
            # Terms: at most 18 products of values below 4, and the rounding of each.
            assert_ulp(got, leaf.grad, 0.51, name, floor=24 * eps * 18 * 16)


def test_finalize_without_scales():
    x, index, ids = torch.randn(6, 4), torch.tensor([5, 3, 1, 0, 2, 4]), expert_ids(3, 2)
    out = ops.npu_moe_finalize_routing(x, None, None, None, None, index, None, 0, 2)
    torch.testing.assert_close(out, x[index.view(2, 3).T].sum(1))
    out = ops.npu_moe_finalize_routing(x.view(2, 3, 4), None, None, None, None, index, None, 2, 2)
    torch.testing.assert_close(out, x[index.view(3, 2)].sum(1))
    out = ops.npu_moe_finalize_routing(x, x, None, None, None, index, None)
    assert torch.equal(out, x + x[index])
    bias = torch.randn(5, 4)
    out = ops.npu_moe_finalize_routing(x, None, None, bias, None, index, ids, None, 2)
    torch.testing.assert_close(out, x[index.view(2, 3).T].sum(1) + bias[ids.long()].sum(1))


def test_finalize_gradcheck():
    inputs = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in finalize_inputs(torch.float64, torch.float64, dropped=True).items()}  # fmt: skip
    floats = [v for v in inputs.values() if v.is_floating_point()]
    for mode in (0, 3):
        assert gradcheck(
            lambda *t, m=mode: ops.npu_moe_finalize_routing(*t, inputs["index"], inputs["ids"], m),
            floats,
        )
    index = torch.arange(6)
    assert gradcheck(
        lambda r: ops.npu_moe_finalize_routing(r, None, None, None, None, index, None, 0, 2),
        (floats[0].detach()[:6].requires_grad_(),),
    )


def test_finalize_errors():
    i = finalize_inputs(torch.float32, torch.float32)

    def call(**changed):
        return ops.npu_moe_finalize_routing(*(i | changed).values())

    for changed, text in (
        ({"rows": i["rows"][0]}, "expanded_permuted_rows must have at least 2 dimensions"),
        ({"skip1": None}, "skip2 needs skip1"),
        ({"skip1": i["skip1"].bfloat16()}, "skip1 must be float32, got bfloat16"),
        ({"skip1": i["skip1"][:5]}, r"skip1 \[5, 9\] does not go with 6 tokens"),
        (
            {"bias": i["bias"][:, :4]},
            r"bias \[5, 4\] does not go with expanded_permuted_rows \[18, 9\]",
        ),
        ({"ids": None}, r"bias \[5, 9\] needs export_for_source_row"),
        ({"ids": i["ids"] + 4}, r"export_for_source_row \d at position .* is not in \[0, 5\)"),
        ({"ids": i["ids"][:4]}, r"export_for_source_row must be \[6, 3\], got \[4, 3\]"),
        (
            {"scales": i["scales"][:4]},
            r"18 elements of expanded_src_to_dst_row do not go with k 3 and scales \[4, 3\]",
        ),
        (
            {"index": i["index"] + 1},
            r"expanded_src_to_dst_row 18 at position .* is not in \[-1, 18\)",
        ),
        ({"index": i["index"] - 2}, "expanded_src_to_dst_row -2 at"),
        ({"index": i["index"].float()}, "must be int32 or int64, got float32"),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_finalize_routing: .*" + text):
            call(**changed)
    for mode, k, text in (
        (4, 1, "drop_pad_mode must be 0, 1, 2 or 3, got 4"),
        (0, 0, "k must be positive, got 0"),
    ):
        with pytest.raises(RuntimeError, match="npu_moe_finalize_routing: " + text):
            ops.npu_moe_finalize_routing(
                i["rows"], None, None, None, None, i["index"], None, mode, k
            )


def test_opcheck_and_schema():
    inputs = finalize_inputs(torch.float32, torch.float32)
    f = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns).npu_moe_finalize_routing.default
        opcheck(op, tuple(f.values()))
        opcheck(op, (f["rows"], None, None, None, None, f["index"], None, 2, 3))
    assert_schemas(
        {
            "npu_moe_finalize_routing": "(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, "
            "Tensor? scales, Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, "
            "int? k=1) -> Tensor"
        }
    )
    plain = {k: v.detach() for k, v in f.items()}
    opcheck(
        jm.moe_finalize_routing_grad.default,
        (torch.randn(6, 9), *(plain[k] for k in ("rows", "bias", "scales", "index", "ids")), 0, 1),
    )


def test_layouts_retain_graph_and_double_backward():
    index = torch.tensor([5, 4, 0, 2, 1, 3])
    check_layouts_and_double_backward(
        "npu_moe_finalize_routing",
        lambda t: ops.npu_moe_finalize_routing(t, None, None, None, None, index, None, 2, 3),
        signed(6, 8),
    )

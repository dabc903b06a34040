"""npu_ring_attention_update, npu_attention_update: parts of the keys against all of them, and in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import jumar
from attention_ref import CAUSAL_MASK
from attention_util import HALF_ULP, normal, sum_unit
from jumar import ops
from op_util import FLOAT_DTYPES, assert_schemas, assert_ulp, check_threads

SCRIPT = Path(__file__).with_name("ring_ranks.py")
LOWEST = torch.finfo(torch.float32).min


def in_parts(dtype, parts, packed, order, rows=45, keys=130):
    """(parts, whole) of causal attention: [out, max, sum] each; the first rows see nothing of the later parts."""
    batch = 1 if packed else 2
    q, k, v = (
        normal(rows if n == 4 else keys, batch, n * d, dtype=dtype, seed=i)
        for i, (n, d) in enumerate(((4, 16), (2, 16), (2, 8)))
    )
    layout = "SBH"
    if packed:
        layout = "TND"
        q, k, v = (x[:, 0].unflatten(-1, (n, -1)) for x, n in ((q, 4), (k, 2), (v, 2)))
    mask = (torch.arange(keys) > 3 * torch.arange(rows)[:, None]).view(rows, keys)

    def run(begin, end, inputs=(q, k, v)):
        lengths = {
            "actual_seq_qlen": [rows],
            "actual_seq_kvlen": [end - begin],
            "softmax_layout": order,
        }
        a, b, c = inputs
        return ops.npu_fusion_attention(
            a, b[begin:end].contiguous(), c[begin:end].contiguous(), 4, layout, scale=0.3, sparse_mode=1,
            atten_mask=mask[:, begin:end].contiguous(), **(lengths if packed else {}),
        )[:3]  # fmt: skip

    cuts = torch.linspace(0, keys, parts + 1).long().tolist()
    return [run(a, b) for a, b in zip(cuts, cuts[1:], strict=False)], run(
        0, keys, [x.double() for x in (q, k, v)]
    )


def test_empty_lists_raise_by_name():
    with pytest.raises(RuntimeError, match=r"npu_attention_update: .* lse=\[\], local_out=\[\], update_type=0"):
        ops.npu_attention_update([], [], 0)


@pytest.mark.parametrize("packed", [False, True], ids=["SBH", "TND"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_parts_make_the_whole(dtype, packed):
    for parts in (2, 3, 7):
        for order in ("", "TND") if packed else ("",):
            pieces, whole = in_parts(dtype, parts, packed, order)
            assert any((p[2] == 0).any() for p in pieces) and not any(
                p[0].isnan().any() for p in pieces
            )
            layout = {"input_layout": "TND", "input_softmax_layout": order} if packed else {}
            extra = {"actual_seq_qlen": torch.tensor([45])} if packed else {}
            for pieces_in_order in (pieces, pieces[::-1]):
                merged = pieces_in_order[0]
                for piece in pieces_in_order[1:]:
                    merged = ops.npu_ring_attention_update(*merged, *piece, **layout, **extra)
                unit = 40 * sum_unit(dtype, 16) + sum_unit(dtype, 130)
                rounding = parts * 4 * HALF_ULP[dtype]  # outputs of the parts are rounded
                assert_ulp(merged[0], whole[0], 1.0, "out", floor=4 * unit + rounding)
                assert_ulp(merged[1], whole[1].clamp(min=LOWEST), 1.0, "max", floor=unit)
                assert_ulp(merged[2], whole[2], 1.0, "sum", floor=4 * unit * whole[2])

            # The same from logarithms.
            flat = [(p[0].unflatten(-1, (4, -1)) if not packed else p[0]) for p in pieces]
            lse = [(p[1] + p[2].log())[..., 0] for p in pieces]
            if packed and order == "":
                lse = [
                    x.T.flatten().view_as(x.T).T
                    for x in (y.contiguous().view(4, 45).T for y in lse)
                ]
            if not packed:
                lse = [x.permute(2, 0, 1) for x in lse]
            shape = flat[0].shape
            out, total = ops.npu_attention_update(
                [x.reshape(-1) for x in lse], [x.reshape(-1, shape[-1]) for x in flat], 1
            )
            assert_ulp(out.view_as(pieces[0][0]), whole[0], 1.0, "out", floor=8 * unit + rounding)
            want = (whole[1] + whole[2].log())[..., 0]
            if packed and order == "":
                want = want.contiguous().view(4, 45).T
            want = want.permute(2, 0, 1) if not packed else want
            assert_ulp(total, want.reshape(-1), 1.0, "lse", floor=8 * unit)


def test_a_part_that_saw_nothing_is_not_read():
    out, m, total = torch.ones(3, 1, 4), torch.zeros(1, 2, 3, 8), torch.ones(1, 2, 3, 8)
    for lowest in (LOWEST, -torch.inf):
        nothing = (
            torch.full((3, 1, 4), torch.nan),
            torch.full_like(m, lowest),
            torch.zeros_like(total),
        )
        for parts in ((nothing, (out, m, total)), ((out, m, total), nothing)):
            merged = ops.npu_ring_attention_update(*parts[0], *parts[1])
            assert all(torch.equal(a, b) for a, b in zip(merged, (out, m, total), strict=True))
        merged = ops.npu_ring_attention_update(*nothing, *nothing)
        assert torch.equal(merged[0], torch.zeros(3, 1, 4)) and not merged[2].any()
    lse = [torch.tensor([-torch.inf, 0.0]), torch.tensor([-torch.inf, -torch.inf])]
    value, log = ops.npu_attention_update(lse, [out[:2, 0], torch.full((2, 4), torch.nan)], 1)
    assert value.tolist() == [[0.0] * 4, [1.0] * 4] and log.tolist() == [-torch.inf, 0.0]
    assert ops.npu_attention_update(lse, [out[:2, 0]] * 2, 0)[1].shape == (0,)


def test_two_processes_in_a_ring(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], (
        outputs[0][1][-3000:] + outputs[1][1][-3000:]
    )
    for errors in json.loads(outputs[0][0].splitlines()[-1]):
        assert max(errors) < 4e-6, errors


def test_operators():
    parts, _ = in_parts(torch.float32, 2, False, "")
    lse = [p[1][0, 0, :, 0] for p in parts]
    rows = [p[0][:, 0] for p in parts]
    for ns in jumar._load.NAMESPACES:
        op = getattr(torch.ops, ns)
        opcheck(op.npu_ring_attention_update.default, (*parts[0], *parts[1]))
        for kind in (0, 1):
            opcheck(op.npu_attention_update.default, (lse, rows, kind))
    leaf = parts[0][0].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="npu_ring_attention_update: not differentiable"):
        ops.npu_ring_attention_update(leaf, *parts[0][1:], *parts[1])[0].sum().backward()
    with pytest.raises(RuntimeError, match="npu_attention_update: not differentiable"):
        ops.npu_attention_update(lse, [leaf[:, 0], rows[1]], 1)[0].sum().backward()
    check_threads(lambda: ops.npu_ring_attention_update(*parts[0], *parts[1]))
    assert_schemas(
        {
            "npu_ring_attention_update": "(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, "
            "Tensor cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, *, Tensor? actual_seq_qlen=None, "
            'str input_layout="SBH", str input_softmax_layout="") -> (Tensor, Tensor, Tensor)',
            "npu_attention_update": "(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
        }
    )


def test_errors():
    out, m = torch.ones(3, 1, 4), torch.zeros(1, 2, 3, 8)
    ring = torch.ops.jumar.npu_ring_attention_update
    for change, given, text in (
        ({}, {"input_layout": "BSH"}, "input_layout must be SBH or TND, got 'BSH'"),
        ({}, {"input_layout": "TND"}, "input_layout TND needs actual_seq_qlen"),
        (
            {},
            {"actual_seq_qlen": torch.tensor([3], dtype=torch.int32)},
            "actual_seq_qlen must be int64, got int32",
        ),
        ({}, {"input_softmax_layout": "TND"}, "input_softmax_layout must be"),
        ({3: out.bfloat16()}, {}, "cur_attn_out must be"),
        ({4: m.double()}, {}, "cur_softmax_max must be"),
        ({1: m[..., :1]}, {}, "prev_softmax_max must be"),
    ):
        tensors = [change.get(i, x) for i, x in enumerate((out, m, m, out, m, m))]
        with pytest.raises(RuntimeError, match=f"npu_ring_attention_update: {text}"):
            ring(*tensors, **given)
    for lse, parts, kind, text in (
        ([], [out[:, 0]], 0, "lse and local_out must have one length"),
        ([m[0, 0, :, 0]], [out[:, 0]], 2, "update_type must be 0 or 1, got 2"),
        ([m[0, 0, :2, 0]], [out[:, 0]], 0, r"lse\[0\] must be"),
        ([m[0, 0, :, 0]], [out], 0, "local_out must be floating point with 2"),
    ):
        with pytest.raises(RuntimeError, match=f"npu_attention_update: {text}"):
            torch.ops.jumar.npu_attention_update(lse, parts, kind)


def test_merged_statistics_serve_the_backward():
    """Gradients of the parts with merged results are those of the whole."""
    q, k, v, dy = (normal(1, n, s, 8, dtype=torch.float64, seed=i)
                   for i, (n, s) in enumerate(((4, 20), (2, 30), (2, 30), (4, 20))))  # fmt: skip
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rule = {"sparse_mode": 3, "atten_mask": CAUSAL_MASK}
    whole = ops.npu_fusion_attention(*leaves, 4, "BNSD", scale=0.3, **rule)
    want = torch.autograd.grad(whole[0], leaves, dy)
    parts = []
    with torch.no_grad():
        for keys, r in (
            (slice(0, 12), rule | {"sparse_mode": 4, "next_tockens": 18}),
            (slice(12, 30), rule),
        ):
            parts.append(
                (
                    keys,
                    r,
                    ops.npu_fusion_attention(
                        q, k[:, :, keys], v[:, :, keys], 4, "BNSD", scale=0.3, **r
                    ),
                )
            )

        def sbh(x):
            return x.permute(2, 0, 1, 3).flatten(2)

        (_, _, a), (_, _, b) = parts
        out, m, total = ops.npu_ring_attention_update(sbh(a[0]), *a[1:3], sbh(b[0]), *b[1:3])
        out = out.unflatten(-1, (4, -1)).permute(1, 2, 0, 3)
        grads = [
            ops.npu_fusion_attention_grad(
                q, k[:, :, keys], v[:, :, keys], dy, 4, "BNSD", softmax_max=m, softmax_sum=total, attention_in=out,
                scale_value=0.3, **r,
            )
            for keys, r, _ in parts
        ]  # fmt: skip
    got = [grads[0][0] + grads[1][0], *(torch.cat([g[i] for g in grads], 2) for i in (1, 2))]
    assert all(torch.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(got, want, strict=True))

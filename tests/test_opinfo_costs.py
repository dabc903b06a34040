"""Bytes and FLOPs of operators: every fused one has a formula, and the numbers are those counted by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jumar import opinfo
from jumar.opinfo import costs
from jumar.opinfo.costs import Arg, Cost
from jumar.opinfo.spec import flat
from jumar.ops._wiring import COMPOSITES

BF16, FP32 = torch.bfloat16, torch.float32


def test_every_operator_has_a_formula():
    without = opinfo.TOOLS.keys() | COMPOSITES
    missing = [name for name in opinfo.schemas() if name not in without and name not in costs.FUSED_COSTS]
    assert not missing, f"no cost formula in opinfo/costs.py: {missing}"
    assert not [name for name in costs.FUSED_COSTS if name not in opinfo.schemas()]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        # [4, 8] in and out, gamma 8, four fp32 statistics
        ("jumar::npu_rms_norm", [Arg((4, 8), BF16), Arg((8,), BF16), 1e-6], Cost(2 * 64 + 16 + 16)),
        ("npu::npu_rms_norm", [Arg((4, 8), FP32), Arg((8,), FP32), 1e-6], Cost(2 * 128 + 32 + 16)),
        # 3 x 5 -> 7
        ("jumar::npu_linear", [Arg((3, 5), BF16), Arg((7, 5), BF16), Arg((7,), BF16)],
         Cost(2 * (15 + 35 + 21 + 7), 2.0 * 3 * 5 * 7, BF16)),
        ("jumar::linear_wgrad", [Arg((2, 3, 7), FP32), Arg((2, 3, 5), FP32)],
         Cost(4 * (42 + 30 + 35), 2.0 * 6 * 5 * 7, FP32)),
        # 9 rows of 2 groups, 5 -> 7
        ("jumar::grouped_matmul", [Arg((9, 5), BF16), Arg((2, 5, 7), BF16), Arg((2,), torch.int64), Arg((2, 7), FP32), 0],
         Cost(2 * (45 + 70 + 63) + 16 + 56, 2.0 * 9 * 5 * 7, BF16)),
        ("jumar::grouped_matmul_list", [Arg((9, 5), BF16), [Arg((5, 7), BF16)] * 2, Arg((2,), torch.int64), [], 0],
         Cost(2 * (45 + 70 + 63) + 16, 2.0 * 9 * 5 * 7, BF16)),
        ("jumar::grouped_matmul_dgrad", [Arg((9, 7), FP32), Arg((2, 5, 7), FP32), Arg((2,), torch.int64)],
         Cost(4 * (63 + 70 + 45) + 16, 2.0 * 9 * 5 * 7, FP32)),
        ("jumar::grouped_matmul_wgrad", [Arg((9, 5), FP32), Arg((9, 7), FP32), Arg((2,), torch.int64)],
         Cost(4 * (63 + 70 + 45) + 16, 2.0 * 9 * 5 * 7, FP32)),
        ("jumar::grouped_matmul_add_", [Arg((2, 5, 7), FP32), Arg((9, 5), BF16), Arg((9, 7), BF16), Arg((2,), torch.int64)],
         Cost(2 * 4 * 70 + 2 * (45 + 63) + 16, 2.0 * 9 * 5 * 7, BF16)),
        ("jumar::grouped_matmul_bias_grad", [Arg((9, 7), BF16), Arg((2,), torch.int64)], Cost(2 * 63 + 16 + 4 * 14)),
        ("jumar::separate_matmul", [[Arg((2, 5), FP32), Arg((3, 4), FP32)], [Arg((5, 7), FP32), Arg((4, 6), FP32)], []],
         Cost(4 * (10 + 12 + 35 + 24 + 14 + 18), 2.0 * (70 + 72), FP32)),
        # 5 tokens to 2 of 3 experts, 4 -> 6
        ("jumar::moe_ffn", [Arg((5, 4), BF16), Arg((5, 2), torch.int64), Arg((5, 2), FP32), [Arg((3, 4, 12), BF16)],
                            [Arg((3, 6, 4), BF16)], [], True],
         Cost(2 * (20 + 144 + 72 + 20) + 80 + 40, 6.0 * 10 * 6 * 4, BF16)),
        ("jumar::moe_ffn_backward", [Arg((5, 4), BF16), Arg((5, 4), BF16), Arg((5, 2), torch.int64), Arg((5, 2), FP32),
                                     [Arg((3, 4, 12), BF16)], [Arg((3, 6, 4), BF16)], [], Arg((10, 12), BF16),
                                     True, True, True, True],
         Cost(2 * (20 + 144 + 72 + 20 + 120 + 20 + 72 + 144) + 80 + 40 + 40, 12.0 * 10 * 6 * 4, BF16)),
        ("jumar::npu_swiglu", [Arg((4, 6), BF16), -1], Cost(2 * (24 + 12))),
        # a table that is expanded over the batch is there once
        ("jumar::npu_rotary_mul", [Arg((2, 4, 8), FP32), Arg((2, 4, 8), FP32, (0, 8, 1)), Arg((1, 4, 8), FP32), None, None],
         Cost(4 * (64 + 64 + 32 + 32))),
        ("aten::mm", [Arg((3, 4), FP32), Arg((4, 5), FP32)], Cost(4 * (12 + 20 + 15), 120.0, FP32)),
        ("aten::addmm", [Arg((5,), FP32), Arg((3, 4), FP32), Arg((4, 5), FP32), 1, 1], Cost(4 * (12 + 20 + 15 + 5), 120.0, FP32)),
        ("aten::bmm", [Arg((2, 3, 4), FP32), Arg((2, 4, 5), FP32)], Cost(4 * 2 * (12 + 20 + 15), 240.0, FP32)),
        ("aten::mul", [Arg((4, 1, 3), BF16), Arg((5, 1), FP32)], Cost(2 * 12 + 4 * 5 + 4 * 60)),
        ("aten::mul", [Arg((4,), BF16), Arg((), torch.float64)], Cost(8 + 8 + 8)),
        ("aten::sum", [Arg((4, 8), FP32), [0]], Cost(4 * (32 + 8))),
        # 6 tokens, 5 -> 7 classes; the gradient of the input alone
        ("jumar::linear_cross_entropy", [Arg((2, 3, 5), BF16), Arg((7, 5), BF16), Arg((2, 3), torch.int64), None, -100, None],
         Cost(2 * (30 + 35) + 8 * 6 + 4 * 6, 2.0 * 6 * 5 * 7, BF16)),
        ("jumar::linear_cross_entropy_backward",
         [Arg((), FP32), Arg((6, 5), FP32), Arg((7, 5), FP32), Arg((6,), torch.int32), None, Arg((6,), FP32), Arg((0, 7), FP32),
          -100, None, 0, 0, True, False, False],
         Cost(4 * (30 + 35 + 6 + 6 + 1 + 30), 2.0 * 6 * 5 * 7, FP32)),
        ("jumar::npu_cross_entropy_loss", [Arg((6, 7), BF16), Arg((6,), torch.int64), None], Cost(2 * 2 * 42 + 48)),
        ("jumar::npu_cross_entropy_loss_backward", [Arg((1,), FP32), Arg((6, 7), FP32), Arg((6,), torch.int64)],
         Cost(4 + 2 * 4 * 42 + 48)),
        # two parameters in bf16 with fp32 moments and copies
        ("jumar::adamw_", [[Arg((4,), BF16)], [Arg((4,), BF16)], [Arg((4,), FP32)], [Arg((4,), FP32)], [Arg((4,), FP32)], None],
         Cost(2 * 3 * 4 + 4 * 2 * 12)),
        ("jumar::apply_adam_w_", [Arg((4,), FP32)] * 4 + [None], Cost(4 * 7 * 4)),
        ("jumar::grad_power_sums", [[Arg((4,), FP32), Arg((3,), FP32)]], Cost(28)),
        ("jumar::scale_grads_", [[Arg((4,), FP32)], 0.5], Cost(32)),
        # unknown: blank
        ("aten::mul", [Arg((4,), torch.int64), Arg((4,), torch.int64)], None),
        ("aten::mm", [Arg((3, 4), None), Arg((4, 5), None)], None),
        ("aten::nonzero", [Arg((3, 4), FP32)], None),
        ("jumar::npu_linear", [None], None),
        ("c10d::allreduce_", [[Arg((3,), None)]], None),
    ],
)  # fmt: skip
def test_by_hand(name, arguments, expected):
    assert costs.cost(name, arguments) == expected


def test_attention_counts_the_pairs_that_see_each_other():
    q, k = Arg((2, 3, 4, 8), FP32), Arg((2, 3, 6, 8), FP32)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    whole = costs.cost(name, [q, k, k, 0.0, False])
    assert whole.flops == 2 * 3 * 4 * 6 * 8 * 4
    assert whole.bytes == 4 * (2 * 2 * 3 * 4 * 8 + 2 * 2 * 3 * 6 * 8)
    causal = costs.cost(name, [q, k, k, 0.0, True])
    assert causal.flops == 2 * 3 * (1 + 2 + 3 + 4) * 8 * 4
    back = costs.cost(f"{name}_backward", [q, q, k, k, q, Arg((2, 3, 4), FP32), 0.0, False])
    assert back.flops == whole.flops * 2.5


def test_counted_calls_are_those_that_run():
    x = torch.randn(3, 5, requires_grad=True)
    w = torch.randn(7, 5, requires_grad=True)
    found = costs.count(lambda: torch.ops.jumar.npu_linear(x, w).sum().backward())
    assert found.flops == 3 * 2.0 * 3 * 5 * 7
    frozen = costs.count(lambda: torch.ops.jumar.npu_linear(x, w.detach()).sum().backward())
    assert frozen.flops == 2 * 2.0 * 3 * 5 * 7
    plain = costs.count(lambda: F.linear(x, w), torch_too=True)
    assert plain.flops == 2.0 * 3 * 5 * 7
    assert costs.count(lambda: F.linear(x, w)).flops is None


@pytest.mark.parametrize("info", opinfo.OPERATORS.values(), ids=lambda info: info.name)
def test_bench_moves_what_the_formulas_say(info):
    """Forward: inputs and outputs. Backward: incoming gradients, inputs, gradients. Numbers of rows are left out."""
    from jumar.bench.shapes import read_shapes

    tensors = info.bench(read_shapes(info.shapes_file)["small"], FP32)
    forward, both = costs.of_operator(info, tensors)
    assert forward.bytes > 0 and (not info.differentiable or both.bytes > forward.bytes)
    assert (forward.flops is not None) == info.multiplies
    # Products are counted by hand above, and rows of experts move once for each of their tokens.
    if info.mutates or info.multiplies or info.shapes_file == "moe_permute":
        return
    given = [t for value in tensors.values() for t in flat(value)]
    read = [t.nbytes for t in given if t.is_floating_point() or t.dtype == torch.bool]
    results = sum(t.nbytes for t in info.fused(*tensors.values()))
    assert forward.bytes == pytest.approx(sum(read) + results, rel=0.01)
    if not info.differentiable:
        return
    expected = {
        "npu_rotary_mul": results + sum(read),  # needs no input
        "npu_cross_entropy_loss": results + sum(read),  # of the log-probabilities; the incoming gradient is a scalar
        "npu_scaled_masked_softmax": results + 2 * read[0] + read[-1],  # the mask has no gradient
        "npu_add_rms_norm": results + 2 * (read[0] + read[-1]),  # keeps the sum; both inputs get the same gradient
    }.get(info.name, results + 2 * sum(read))
    assert both.bytes - forward.bytes == pytest.approx(expected, rel=0.01)


def test_the_limit_is_what_takes_longer():
    assert Cost(1e9).seconds(10, 100) == (pytest.approx(0.1), "bytes")
    assert Cost(1e9, 100e9, FP32).seconds(10, 100) == (pytest.approx(1.0), "flops")
    assert Cost(None).seconds(10, 100) is None and Cost(1e9).seconds(0, 0) is None
    total = Cost(1.0) + Cost(2.0, 3.0, BF16)
    assert total == Cost(3.0, 3.0, BF16) and (total + Cost(None)).bytes is None

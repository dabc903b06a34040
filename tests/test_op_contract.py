"""What every entry of the operator table promises beside its numbers, which tests/test_verify.py compares with fp64."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.utils._pytree import tree_map

from jumar.bench import Job, read_shapes
from jumar.opinfo import OPERATORS, dtype_name, flat
from op_util import check_threads

REGISTERED = [info for info in OPERATORS.values() if info.registered]
#: Whose gradients have gradients.
TWICE = ("npu_grouped_matmul",)
#: What makes an argument one that an operator refuses, or in some places takes.
SPOILS = {
    "another device": lambda t: t.to("meta"),
    "int16": lambda t: t.to(torch.int16),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "another float": lambda t: t.half() if t.is_floating_point() else t.double(),
    "one more dimension": lambda t: t[None],
    "nine more dimensions": lambda t: t.reshape(*[1] * 9, *t.shape),
    "a column less": lambda t: t[..., :-1] if t.dim() else t,
    "nothing": lambda t: t[:0] if t.dim() else t,
}


def _job(info, dtype, shape):
    job = Job(info, dtype, shape, read_shapes(info.shapes_file)[shape])
    tensors = job.tensors()
    return tensors, job.grads(tensors)


def _run(info, tensors):
    """(arguments that have gradients, all results, those that carry gradients)"""
    leaves = info.arguments(tensors, grads=True)
    wanted = [t for value in leaves.values() for t in flat(value) if t.requires_grad]
    results = info.fused(*leaves.values())
    return wanted, [t for value in results for t in flat(value)], info.carrying(results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_same_bits_for_every_thread_count(info, dtype):
    tensors, grads = _job(info, dtype, "odd")

    def results():
        wanted, every, roots = _run(info, tensors)
        return [*every, *(torch.autograd.grad(roots, wanted, grads) if wanted else ())]

    check_threads(results)


@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_mixed_devices_are_refused_by_name(info):
    arguments = info.arguments(_job(info, torch.float32, "small")[0])
    names = [n for n, value in arguments.items() if list(flat(value))]
    if len(names) < 2:
        pytest.skip("takes one tensor")
    arguments[names[0]] = tree_map(lambda t: t.to("meta"), arguments[names[0]])
    with pytest.raises(RuntimeError, match=f"^{info.name}: all tensors must be on one device, got cpu and meta"):
        info.fused(*arguments.values())


@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_errors_begin_with_the_operator_that_is_called(info):
    arguments = info.arguments(_job(info, torch.float32, "small")[0])
    errors = {}
    for name, value in arguments.items():
        for what, spoil in SPOILS.items() if list(flat(value)) else ():
            try:
                info.fused(*(arguments | {name: tree_map(spoil, value)}).values())
            except RuntimeError as error:
                errors[name, what] = str(error)
    assert errors
    assert not {at: text for at, text in errors.items() if not text.startswith(f"{info.name}: ")}


@pytest.mark.parametrize("info", REGISTERED, ids=lambda info: info.name)
def test_fake_kernels_refuse_by_name_what_has_no_such_dimension(info):
    """Compiled code and meta tensors see no other kernel."""
    arguments = info.arguments(_job(info, torch.float32, "small")[0])
    for name, value in arguments.items():
        spoiled = arguments | {name: tree_map(torch.flatten, value)}
        spoiled = {n: tree_map(lambda t: t.to("meta"), v) for n, v in spoiled.items()}
        try:
            info.fused(*spoiled.values())
        except Exception as error:
            raised = traceback.extract_tb(error.__traceback__)[-1]
            # The table's own way of calling an operator may look at shapes, too.
            if "opinfo" not in raised.filename:
                assert type(error) is RuntimeError and str(error).startswith(f"{info.name}: "), (name, error)


@pytest.mark.parametrize("info", [i for i in REGISTERED if i.differentiable], ids=lambda info: info.name)
def test_gradients_add_up_and_write_nothing(info):
    tensors, grads = _job(info, torch.float32, "small")
    before = [t.clone() for value in (*tensors.values(), grads) for t in flat(value)]
    wanted, _, roots = _run(info, tensors)
    torch.autograd.backward(roots, grads, retain_graph=True)
    first = [leaf.grad.clone() for leaf in wanted]
    torch.autograd.backward(roots, grads)
    assert all(torch.equal(leaf.grad, g + g) for leaf, g in zip(wanted, first, strict=True))
    after = [t for value in (*tensors.values(), grads) for t in flat(value)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("info", [i for i in REGISTERED if i.differentiable and i.name not in TWICE], ids=lambda i: i.name)
def test_double_backward_raises_by_name(info):
    tensors, grads = _job(info, torch.float32, "small")
    wanted, _, roots = _run(info, tensors)
    found = torch.autograd.grad(roots, wanted, [g.requires_grad_() for g in grads], create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{info.name}: not differentiable twice"):
        sum(gradient.double().sum() for gradient in found).backward()

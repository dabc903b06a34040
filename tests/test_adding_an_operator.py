"""The worked example of docs/adding-an-operator.md: its library is loaded and its page shows the very files."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck
from torch.library import opcheck

from op_util import FLOAT_DTYPES, assert_ulp, check_retain_graph, signed, strided_views

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "operator"


@pytest.fixture(scope="session")
def example():
    build = Path(os.environ.get("JUMAR_BUILD_DIR") or ROOT / "build" / "release")
    library = build / "examples" / "libjumar_example.so"
    assert library.exists(), f"{library} is missing: run `make build`, or set JUMAR_BUILD_DIR"
    spec = importlib.util.spec_from_file_location(
        "squared_relu_glu", FOLDER / "squared_relu_glu.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load(library)
    return module


def oracle(x, gate):
    return x.double().relu().square() * gate.double()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_forward_and_gradients_against_fp64(example, dtype):
    bound = 0.51 if dtype in (torch.bfloat16, torch.float16) else 2.0
    floor = 2.0**-44 if dtype == torch.float16 else 0.0
    x, gate, dy = (signed(5, 33, dtype=dtype, seed=i) for i in range(3))
    leaves = [t.double().requires_grad_() for t in (x, gate)]
    expected = torch.autograd.grad(oracle(*leaves), leaves, dy.double())
    for name, view in strided_views(x).items():
        inputs = [view.detach().requires_grad_(), gate.detach().clone().requires_grad_()]
        y = example.squared_relu_glu(*inputs)
        assert y.dtype == dtype and y.is_contiguous()
        assert_ulp(y, oracle(x, gate), bound, name, floor)
        for got, exact in zip(torch.autograd.grad(y, inputs, dy), expected, strict=True):
            assert_ulp(got, exact, bound, name, floor)


def test_gradcheck_opcheck_and_retain_graph(example):
    x, gate = (signed(3, 5, dtype=torch.float64, seed=i).requires_grad_() for i in (1, 2))
    x.data[-1] = 0.25  # the kink at 0 has no numerical derivative
    assert gradcheck(example.squared_relu_glu, (x, gate))
    opcheck(
        torch.ops.jumar_example.squared_relu_glu.default,
        (x.float().detach(), gate.float().detach()),
    )
    opcheck(
        torch.ops.jumar_example.squared_relu_glu.default,
        tuple(t.detach().requires_grad_() for t in (x, gate)),
    )
    check_retain_graph(example.squared_relu_glu, x, gate)


def test_compiles(example):
    x, gate = signed(4, 16, seed=1), signed(4, 16, seed=2)
    compiled = torch.compile(example.squared_relu_glu, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, gate), example.squared_relu_glu(x, gate))


def test_errors(example):
    x = signed(2, 3)
    with pytest.raises(
        RuntimeError,
        match=r"squared_relu_glu: gate must be like input, float32\[2, 3\], but is float32\[2, 4\]",
    ):
        example.squared_relu_glu(x, signed(2, 4))
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(example.squared_relu_glu(leaf, x).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="squared_relu_glu_backward: not differentiable"):
        grad.sum().backward()


def test_the_page_shows_the_files():
    """Code blocks that are headed by a file's name are excerpts of that file, line by line."""
    page = (ROOT / "docs" / "adding-an-operator.md").read_text()
    blocks = re.findall(r"<!-- from (\S+) -->\n```\w+\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 6
    for name, block in blocks:
        text = (ROOT / name).read_text()
        for part in block.strip("\n").split("\n...\n"):
            assert part.strip("\n") in text, f"{name}: the page shows other code:\n{part}"


def test_every_file_of_the_example_is_named_on_the_page():
    page = (ROOT / "docs" / "adding-an-operator.md").read_text()
    for file in FOLDER.iterdir():
        if file.is_file():
            assert file.name in page, file.name

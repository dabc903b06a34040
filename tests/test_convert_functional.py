"""``npu_sdpa`` in modules of one's own, which call ``scaled_dot_product_attention`` or ``flex_attention``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as attend_as_torch

import jumar
from jumar.convert import plan
from jumar.masks import functions
from op_util import assert_ulp

NAME = ["npu_sdpa"]
compiled_flex = torch.compile(flex_attention)


class Base(nn.Module):
    """Projections around an attention with four query and two key heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 64)
        self.out = nn.Linear(32, 32)

    def heads(self, x):
        parts = self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
        return [p.contiguous() for p in parts]

    def merge(self, x):
        return self.out(x.transpose(1, 2).flatten(2))


class ByModule(Base):
    def forward(self, x, mask=None, **options):
        return self.merge(F.scaled_dot_product_attention(*self.heads(x), mask, enable_gqa=True, **options))


class ByTorch(Base):
    def forward(self, x, mask=None, **options):
        q, k, v = self.heads(x)
        return self.merge(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options))


class ByName(Base):
    def forward(self, x, mask=None, **options):
        return self.merge(attend_as_torch(*self.heads(x), attn_mask=mask, enable_gqa=True, **options))


def helper(parts, mask, options):
    return inner_helper(*parts, mask, options)


def inner_helper(q, k, v, mask, options):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, **options)


class ByHelper(Base):
    def forward(self, x, mask=None, **options):
        return self.merge(helper(self.heads(x), mask, options))


class Flex(Base):
    def forward(self, x, mask=None, **options):
        return self.merge(flex_attention(*self.heads(x), block_mask=mask, enable_gqa=True, **options))


class FlexByModule(Base):
    def forward(self, x, mask=None, **options):
        return self.merge(flex.flex_attention(*self.heads(x), block_mask=mask, enable_gqa=True, **options))


class FlexCompiled(Base):
    def forward(self, x, mask=None, **options):
        return self.merge(compiled_flex(*self.heads(x), block_mask=mask, enable_gqa=True, **options))


class FlexOfAClass(Base):
    attend = torch.compile(flex_attention)

    def forward(self, x, mask=None, **options):
        return self.merge(FlexOfAClass.attend(*self.heads(x), block_mask=mask, enable_gqa=True, **options))


SDPA = (ByModule, ByTorch, ByName, ByHelper)
FLEX = (Flex, FlexByModule, FlexCompiled, FlexOfAClass)


def made(cls, *args):
    torch.manual_seed(0)
    return nn.Sequential(cls(*args))


def inputs(length=20):
    return torch.randn(2, length, 32, generator=torch.Generator().manual_seed(1))


def run(model, *args, **options):
    model.zero_grad()
    x = args[0].clone().requires_grad_()
    out = model[0](x, *args[1:], **options)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert_ulp(a, b.double(), 8.0, floor=max(1e-8, 1e-5 * b.abs().max().item()))


IDS = torch.tensor([[0] * 7 + [1] * 4 + [2] * 9, [0] * 20])


def documents(b, h, q, k):
    return (q >= k) & (IDS[b, q] == IDS[b, k])


def window(b, h, q, k):
    return (q >= k) & (q - k < 5)


def dense(mod, batch=2, length=20):
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    rows = [mod(torch.tensor(b), torch.tensor(0), q, k) for b in range(batch)]
    return torch.stack(rows)[:, None]


CALLS = {
    "full": (None, {}),
    "causal": (None, {"is_causal": True}),
    "scale": (None, {"scale": 0.2, "is_causal": True}),
    "window": (dense(window)[0, 0], {}),
    "documents": (dense(documents), {}),
    "hidden rows": (dense(documents) & (torch.arange(20) != 3)[:, None], {}),
    "bias": (torch.randn(4, 20, 20, generator=torch.Generator().manual_seed(2)), {}),
    "bias that hides": (torch.zeros(1, 1, 20, 20).masked_fill(~dense(window)[:1], -torch.inf), {}),
}


class Beside(ByModule):
    """Heads are views of one projection, and are merged by a view."""

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)

    def merge(self, x):
        return self.out(x.transpose(1, 2).view(x.shape[0], x.shape[2], -1))


class Apart(ByModule):
    """Heads are copies, and are read as a batch by a view."""

    def merge(self, x):
        return super().merge(x.view(x.shape[0] * 4, x.shape[2], -1).view_as(x))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": torch.ones(20, 20).tril().bool()}], ids=["full", "causal", "mask"])
@pytest.mark.parametrize("cls", [Beside, Apart])
def test_results_lie_in_memory_as_the_query_does(cls, options):
    model = made(cls)
    want = run(model, inputs(), **options)
    jumar.convert(model, NAME, strict=True)
    jumar.reset_call_counts()
    for ours, theirs in zip(run(model, inputs(), **options), want, strict=True):
        assert_ulp(ours, theirs.double(), 8.0, floor=1e-6)
    assert jumar.call_counts()["npu_fusion_attention"] == 1


def test_dropout_of_everything_is_torchs():
    model = made(ByModule)
    want = model[0](inputs(), dropout_p=1.0)
    jumar.convert(model, NAME, strict=True)
    assert torch.equal(model[0](inputs(), dropout_p=1.0), want)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("cls", SDPA)
def test_scaled_dot_product_attention(cls, call):
    mask, options = CALLS[call]
    model, x = made(cls), inputs()
    want = run(model, x, mask, **options)
    keys = list(model.state_dict())
    report = jumar.convert(model, NAME, strict=True)
    (site,) = report.replaced
    assert (site.path, site.operator, site.module_class) == ("0", "npu_fusion_attention", cls.__qualname__)
    jumar.reset_call_counts()
    same(run(model, x, mask, **options), want)
    assert jumar.call_counts()["npu_fusion_attention"] == jumar.call_counts()["npu_fusion_attention_grad"] == 1
    assert type(model[0]).__name__ == cls.__name__ and isinstance(model[0], cls) and list(model.state_dict()) == keys
    report.undo()
    assert type(model[0]) is cls
    jumar.reset_call_counts()
    assert all(torch.equal(a, b) for a, b in zip(run(model, x, mask, **options), want, strict=True))
    assert not jumar.call_counts()


@pytest.mark.parametrize("mod", [None, window, documents])
@pytest.mark.parametrize("cls", FLEX)
def test_flex_attention(cls, mod):
    """Where FlexAttention has no backward: gradients are those of attention with the matrix."""
    mask = None if mod is None else create_block_mask(mod, 2, None, 20, 20, device="cpu", BLOCK_SIZE=16)
    want = run(made(ByModule), inputs(), None if mod is None else dense(mod))
    model = made(cls)
    report = jumar.convert(model, NAME, strict=True)
    jumar.reset_call_counts()
    same(run(model, inputs(), mask), want)
    assert jumar.call_counts() == {"npu_fusion_attention": 1, "npu_fusion_attention_grad": 1} | {
        k: v for k, v in jumar.call_counts().items() if "attention" not in k
    }
    if mod is not None:
        assert len(functions.plan_of(mask, 2).calls) == 1
    report.undo()
    assert type(model[0]) is cls


class FlexBeside(Beside):
    forward = Flex.forward


class FlexApart(Apart):
    forward = Flex.forward


#: Without a mask, one that is a range a query, and one that is not.
LAYOUT_MODS = {
    "full": None,
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (q // 7 == k // 7) & (q >= k),
    "chequered": lambda b, h, q, k: (q + k) % 2 == 0,
}


@pytest.mark.parametrize("mod", LAYOUT_MODS)
@pytest.mark.parametrize("cls", [FlexBeside, FlexApart])
def test_flex_results_lie_in_memory_as_the_query_does(cls, mod):
    model, options = made(cls), {}
    if LAYOUT_MODS[mod] is not None:
        options["mask"] = create_block_mask(LAYOUT_MODS[mod], 2, None, 20, 20, device="cpu")
    with torch.no_grad():  # FlexAttention has no backward on a CPU
        want = model[0](inputs(), **options)
    jumar.convert(model, NAME, strict=True)
    jumar.reset_call_counts()
    out, *_ = run(model, inputs(), **options)
    assert_ulp(out, want.double(), 8.0, floor=1e-6)
    assert jumar.call_counts()["npu_fusion_attention"] == 1


def test_flex_attention_keeps_what_the_operator_lacks():
    model, x = made(Flex).eval(), inputs()

    def score(s, b, h, q, k):
        return s * 0.5

    with torch.no_grad():
        want = model[0](x, score_mod=score)
        jumar.convert(model, NAME)
        jumar.reset_call_counts()
        assert torch.equal(model[0](x, score_mod=score), want)
        lse = functions.flex_attention_by(flex_attention)(*made(ByModule)[0].heads(x), enable_gqa=True, return_lse=True)
    assert len(lse) == 2 and "npu_fusion_attention" not in jumar.call_counts()


def test_two_models_of_one_class_and_copies():
    first, second = made(ByHelper), made(ByHelper)
    jumar.convert(first, NAME)
    x = inputs()
    jumar.reset_call_counts()
    second[0](x)
    assert not jumar.call_counts()
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        jumar.reset_call_counts()
        other[0](x)
        assert jumar.call_counts() == {"npu_fusion_attention": 1}
        assert jumar.convert.revert(other) == 1 and type(other[0]) is ByHelper
    again = plan(first, NAME).report()
    assert [s.reason for s in again.skipped] == ["already converted"] and not again.unmatched


def test_dimensions_dtypes_and_errors():
    ours = functions.scaled_dot_product_attention
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 5, 8, generator=gen) for _ in range(3))
    mask = torch.rand(3, 5, 5, generator=gen) < 0.7
    same([ours(q, k, v, mask)], [F.scaled_dot_product_attention(q, k, v, mask)])
    five = [t[None, None] for t in (q, k, v)]
    assert torch.equal(ours(*five), F.scaled_dot_product_attention(*five))
    none = [t[None, :, :0] for t in (q, k, v)]
    assert ours(*none).shape == (1, 3, 0, 8)
    low = [t[None].bfloat16() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(t.double() for t in low))
    assert_ulp(ours(*low), exact, 0.51)
    for bad in ((q[None], k[None, :2], v[None, :2]), (q[None], k[None].bfloat16(), v[None])):
        with pytest.raises(RuntimeError) as theirs:
            F.scaled_dot_product_attention(*bad)
        with pytest.raises(RuntimeError) as mine:
            ours(*bad)
        assert str(mine.value) == str(theirs.value)
    both = (q[None], k[None], v[None], mask[None])
    assert torch.equal(ours(*both, is_causal=True), F.scaled_dot_product_attention(*both, is_causal=True))


def test_hidden_values_do_not_leak():
    q = torch.zeros(1, 1, 1, 2)
    k = torch.zeros(1, 1, 5, 2).index_fill_(2, torch.tensor([4]), torch.inf)
    v = torch.tensor([0.0, 1, 2, torch.nan, 4]).view(1, 1, 5, 1)
    seen = torch.tensor([True, True, True, False, False]).view(1, 1, 1, 5)
    assert functions.scaled_dot_product_attention(q, k, v, seen).item() == 1.0


def test_dropout_and_checkpointing():
    model, x = made(ByModule), inputs()
    jumar.convert(model, NAME)
    torch.manual_seed(0)
    first = model[0](x, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(first, model[0](x, dropout_p=0.5)) and not torch.equal(first, model[0](x, dropout_p=0.5))
    want = run(model, x, is_causal=True)
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(model[0], x, is_causal=True, use_reentrant=False)
    out.square().mean().backward()
    assert torch.equal(x.grad, want[1])


@pytest.mark.parametrize("cls", [ByModule, ByTorch, ByName, ByHelper, Flex])
def test_compiles(cls):
    model, x = made(cls), inputs()
    jumar.convert(model, NAME)
    mask = create_block_mask(documents, 2, None, 20, 20, device="cpu") if cls is Flex else dense(documents)
    want = model[0](x, mask)
    torch._dynamo.reset()
    got = torch.compile(model[0], backend="aot_eager", fullgraph=True)(x, mask)
    assert_ulp(got.detach(), want.detach().double(), 8.0, floor=1e-6)


def test_what_is_left_alone():
    class Hidden(Base):
        def forward(self, x):
            return x

    assert not plan(nn.Sequential(Hidden(), nn.Linear(3, 3)), NAME).sites
    inside = nn.TransformerEncoderLayer(32, 2, 16, batch_first=True)
    (site,) = plan(inside, NAME).report().skipped
    assert site.path == "self_attn" and "inside torch" in site.reason
    model = made(ByModule)
    model[0].forward = lambda x: x
    (site,) = plan(model, NAME).report().skipped
    assert "overridden on the instance" in site.reason

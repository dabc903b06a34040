"""Converted mixtures of experts of Hugging Face models against eager ones.  Runs under every supported version of
transformers: ``test_convert_moe.py`` in the main environment, ``compat/test_hf457.py`` in the one of 4.57.
"""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import transformers

import jumar
from convert_hf_suite import (
    assert_close,
    check_save_and_load,
    checkpointed,
    counted,
    generate,
    gradient_errors,
    rms,
    snapshot,
    step,
)
from jumar import models
from jumar.convert import revert
from jumar.convert.registry import ALREADY
from jumar.verify.models import StayWide

CONVERTERS = ["npu_gmm", "npu_permute", "npu_router"]
FAMILIES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "deepseek_v3",
]
NAMES = [name for name in FAMILIES if name in models.available()]
SOME = ["qwen3_moe", "deepseek_v3"]
STACKED = int(transformers.__version__.split(".")[0]) >= 5
SUBSETS = [(name, (c,)) for name in NAMES for c in CONVERTERS]
SUBSETS += [(name, c) for name in SOME for c in itertools.combinations(CONVERTERS, 2)]


def cancels(name):
    """The decay of linear attention: its gradient is a sum of terms that cancel, eager's own is 1e-5 to 3e-5 from fp64."""
    return name.endswith(("linear_attn.A_log", "linear_attn.dt_bias"))


def assert_same(actual, expected, relative=1e-5, exact=None):
    """Equal to eager; with ``exact``, gradients that cancel are judged by it: not much further from it than eager's."""
    assert_close(actual[0], expected[0], relative)
    assert_close(actual[1], expected[1], relative)
    assert actual[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():
        if exact is not None and cancels(name):
            right = exact[2][name]
            error, eager = ((g[2][name].double() - right).abs().max() for g in (actual, expected))
            assert error <= 2 * eager + relative * right.abs().max(), name
        else:
            assert_close(actual[2][name], grad, relative, name)


def exact_step(model, inputs):
    """The step in fp64, for models that have gradients which cancel."""
    if not any(cancels(name) for name, _ in model.named_parameters()):
        return None
    with StayWide():
        return step(widened(model), {k: wide(v) for k, v in inputs.items()})


def wide(value):
    return value.double() if torch.is_tensor(value) and value.is_floating_point() else value


def widened(model):
    """The model in fp64; torch's grouped product has none, the loop over experts has."""
    wide = copy.deepcopy(model).double()
    if STACKED:
        wide.set_experts_implementation("eager")
    return wide


def blocks(model):
    return [m for m in model.modules() if {"gate", "experts"} <= m._modules.keys()]


def errors_of(results, exact):
    """Sums of relative errors; where nothing but zeros is right (an expert of one unlabelled token) none is."""
    names = [n for n, g in exact.items() if g.abs().max() > 1e-9 and all(n in r for r in results)]
    return [sum(gradient_errors({n: r[n] for n in names}, exact).values()) for r in results]


# ---- whole models ----


@pytest.mark.parametrize("name", NAMES)
def test_fp32_step_equals_eager(name):
    model = models.build(name).train()
    inputs, count = models.example_inputs(model), len(blocks(model))
    before, keys, expected = snapshot(model), list(model.state_dict()), step(model, inputs)
    exact = exact_step(model, inputs)
    report = jumar.kernelize(model, verify=True)
    assert [report.counts()[c] for c in CONVERTERS] == [{"replaced": count, "skipped": 0}] * 3
    assert list(model.state_dict()) == keys
    actual, calls = counted(lambda: step(model, inputs))
    assert_same(actual, expected, exact=exact)
    assert calls["router_top_k"] == calls["router_top_k_backward"] == count
    assert calls["moe_ffn"] == calls["moe_ffn_backward"] == count
    report.undo()
    assert snapshot(model) == before
    undone, calls = counted(lambda: step(model, inputs))
    assert not calls
    assert_same(undone, expected, relative=0)


@pytest.mark.parametrize(("name", "names"), SUBSETS, ids=str)
def test_every_subset_of_the_converters(name, names):
    model = models.build(name).train()
    inputs = models.example_inputs(model)
    before, expected, exact = snapshot(model), step(model, inputs), exact_step(model, inputs)
    report = jumar.convert(model, list(names), strict=True)
    assert len(report.replaced) == len(names) * len(blocks(model))
    actual, calls = counted(lambda: step(model, inputs))
    assert_same(actual, expected, exact=exact)
    both = {"npu_gmm", "npu_permute"} <= set(names)
    products = {"grouped_matmul", "grouped_matmul_list"} & calls.keys()
    assert bool(calls.get("moe_ffn")) == both
    assert bool(products) == ("npu_gmm" in names and not both)
    assert bool(calls.get("npu_moe_token_permute")) == ("npu_permute" in names and not both)
    assert bool(calls.get("router_top_k")) == ("npu_router" in names)
    report.undo()
    assert snapshot(model) == before


def test_converters_come_off_in_any_order():
    model = models.build("qwen3_moe").train()
    inputs = models.example_inputs(model)
    before, expected = snapshot(model), step(model, inputs)
    for order in itertools.permutations(range(3)):
        reports = [jumar.convert(model, [c], strict=True) for c in CONVERTERS]
        for index in order:
            reports[index].undo()
            assert_same(step(model, inputs), expected)
        assert snapshot(model) == before


def routed_step(model, inputs):
    """The step, and which experts each block chose for each token."""
    chosen, handles = [], []
    for block in blocks(model):

        def record(gate, args, out, block=block):
            parts = out if isinstance(out, tuple) else (out,)
            indices = [p for p in parts if not p.is_floating_point()]
            top_k = block.top_k if not indices else 0
            chosen.append((indices or [parts[0].topk(top_k, -1)[1]])[0].sort(-1)[0])

        handles.append(block.gate.register_forward_hook(record))
    result = step(model, inputs)
    for handle in handles:
        handle.remove()
    return result, torch.stack(chosen)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_step_is_no_further_from_fp64_than_eager(name):
    """On draws where eager and fused choose the same experts: a near tie that falls the other way, in whichever of
    them, changes a result by more than all rounding together."""
    totals = {"eager": [0.0, 0.0], "fused": [0.0, 0.0]}
    alike = 0
    for seed in range(10):
        model = models.build(name, seed=seed, dtype=torch.bfloat16).train()
        inputs = models.example_inputs(model, seed=seed)
        with StayWide():
            exact = step(widened(model), {k: wide(v) for k, v in inputs.items()})
        eager, chosen = routed_step(model, inputs)
        jumar.convert(model, CONVERTERS, strict=True)
        fused, choices = routed_step(model, inputs)
        assert fused[1].dtype == torch.bfloat16
        if not torch.equal(choices, chosen):
            assert (choices != chosen).any(-1).float().mean() < 0.05
            continue
        assert fused[2].keys() == eager[2].keys()
        for kind, result in (("eager", eager), ("fused", fused)):
            totals[kind][0] += (rms([result[1].double() - exact[1]]) / rms([exact[1]])).item()
            totals[kind][1] += errors_of([result[2]], exact[2])[0]
        alike += 1
        if alike == 4:
            break
    assert alike == 4
    assert totals["fused"][0] <= 1.05 * totals["eager"][0]
    assert totals["fused"][1] <= 1.05 * totals["eager"][1]


# ---- single blocks: where the tokens go ----


def tokens_of_kinds(model, count, seed=0, kinds=87):
    """Normalised embeddings: hidden states that routers decide clearly about."""
    generator = torch.Generator().manual_seed(seed)
    weight = model.get_input_embeddings().weight.detach().float()
    ids = torch.randint(3, 3 + kinds, (1, count), generator=generator)
    rows = weight[ids] + 0.1 * torch.randn(1, count, weight.shape[1], generator=generator)
    return rows / rows.square().mean(-1, keepdim=True).sqrt()


def set_top_k(block, top_k):
    for module in (block, block.gate):
        if hasattr(module, "top_k"):
            module.top_k = top_k


def decided(block, hidden):
    """`hidden` without tokens whose choice hangs on the last bits of 16-bit logits: another token stands there."""
    top_k = next(m.top_k for m in (block, block.gate) if hasattr(m, "top_k"))
    logits = hidden[0].double() @ block.gate.weight.detach().double().T
    best = logits.topk(top_k + 1, -1)[0]
    sure = best[:, -2] - best[:, -1] > 2**-6 * logits.abs().amax(-1)
    assert sure.float().mean() > 0.5
    return hidden[:, sure][:, torch.arange(hidden.shape[1]) % int(sure.sum())]


def run_block(block, hidden):
    """Everything that a block returns, and every gradient, by name."""
    hidden = hidden.detach().to(next(block.experts.parameters()).dtype, copy=True).requires_grad_()
    block.zero_grad(set_to_none=True)
    out = block(hidden)
    parts = dict(enumerate(out)) if isinstance(out, tuple) else {"out": out}
    generator = torch.Generator().manual_seed(7)
    total = sum(
        (p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in parts.values()
    )
    total.backward()
    results = {name: part.detach() for name, part in parts.items()} | {"d hidden": hidden.grad}
    return results | {n: p.grad for n, p in block.named_parameters() if p.grad is not None}


def case(model, block, what, seed=0):
    if what == "all to one expert":
        set_top_k(block, 1)
        return tokens_of_kinds(model, 66, seed, kinds=1).view(2, 33, -1)
    if what == "some experts get none":
        return tokens_of_kinds(model, 66, seed, kinds=1).view(2, 33, -1)
    return tokens_of_kinds(model, 1 if what == "one token" else 4096, seed)


CASES = ["all to one expert", "some experts get none", "one token", "4096 tokens"]


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_block_in_fp32(name, what):
    model = models.build(name).train()
    block = blocks(model)[-1]
    hidden = case(model, block, what)
    expected = run_block(block, hidden)
    jumar.convert(block, CONVERTERS, strict=True)
    actual = run_block(block, hidden)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if (
            value.abs().max() < 1e-5
        ):  # zero but for rounding: a single weight that is made to sum to 1
            assert actual[key].abs().max() < 1e-5
        else:
            assert_close(actual[key], value, 1e-5, key)


@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_block_in_bf16(name, what):
    model = models.build(name, dtype=torch.bfloat16).train()
    block = blocks(model)[-1]
    draws = 1 if what == "4096 tokens" else 8  # one token, or 66 that are nearly the same, scatter
    hidden = [case(model, block, what, seed).bfloat16() for seed in range(draws)]
    if what == "4096 tokens":
        hidden = [decided(block, h) for h in hidden]
    oracle = blocks(widened(model))[-1]
    if what == CASES[0]:
        set_top_k(oracle, 1)
    with StayWide():
        exact = [run_block(oracle, h.double()) for h in hidden]
    eager = [run_block(block, h) for h in hidden]
    jumar.convert(block, CONVERTERS, strict=True)
    totals = [0.0, 0.0]
    for h, plain, right in zip(hidden, eager, exact, strict=True):
        fused = run_block(block, h)
        assert fused.keys() == plain.keys() == right.keys()
        assert all(fused[key].dtype == plain[key].dtype for key in plain)
        totals = [s + e for s, e in zip(totals, errors_of([plain, fused], right), strict=True)]
    assert totals[1] <= 1.05 * totals[0]


def test_no_tokens_at_all():
    model = models.build("qwen3_moe")
    block = blocks(model)[0]
    hidden = torch.zeros(0, 3, 48)
    jumar.convert(block, CONVERTERS, strict=True)
    out = block(hidden)
    out = out[0] if isinstance(out, tuple) else out
    assert out.shape == hidden.shape


# ---- what models are used for ----


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n in ("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next")]
)
def test_auxiliary_loss_and_router_logits(name):
    model = models.build(name).train()
    inputs = {**models.example_inputs(model), "output_router_logits": True}
    plain, expected, exact = model(**inputs), step(model, inputs), exact_step(model, inputs)
    assert plain.aux_loss > 0 and len(plain.router_logits) == len(blocks(model))
    jumar.convert(model, [*CONVERTERS, "npu_loss"], strict=True)
    fused = model(**inputs)
    assert_close(fused.aux_loss.detach(), plain.aux_loss.detach(), 1e-5)
    for a, e in zip(fused.router_logits, plain.router_logits, strict=True):
        assert_close(a.detach(), e.detach(), 1e-5)
    assert_same(step(model, inputs), expected, exact=exact)
    without = step(model, models.example_inputs(model))
    assert not torch.equal(without[0], expected[0])  # the auxiliary loss is part of the loss


@pytest.mark.parametrize("name", NAMES)
def test_generate(name):
    model = models.build(name)
    expected = generate(model, 4)
    jumar.convert(model, CONVERTERS, strict=True)
    actual, calls = counted(lambda: generate(model, 4))
    assert torch.equal(actual, expected)
    assert calls["router_top_k"] == 4 * len(blocks(model))


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(name, tmp_path):
    check_save_and_load(name, tmp_path)


@pytest.mark.parametrize("name", SOME)
def test_deepcopy_and_pickle(name):
    model = models.build(name)
    inputs = models.example_inputs(model)
    jumar.convert(model, CONVERTERS)
    expected, calls = counted(lambda: step(model, inputs))
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        actual, clone_calls = counted(lambda clone=clone: step(clone, inputs))
        assert clone_calls == calls
        assert_same(actual, expected, relative=0)
        assert revert(clone) > 0
        assert not counted(lambda clone=clone: step(clone, inputs))[1]
    assert counted(lambda: step(model, inputs))[1] == calls


@pytest.mark.parametrize("name", SOME)
def test_two_models_do_not_disturb_each_other(name):
    converted, plain = models.build(name), models.build(name)
    inputs = models.example_inputs(plain)
    expected = step(plain, inputs)
    jumar.convert(converted, CONVERTERS)
    undisturbed, calls = counted(lambda: step(plain, inputs))
    assert not calls
    assert_same(undisturbed, expected, relative=0)
    half = jumar.convert(plain, ["npu_router"])
    calls = counted(lambda: step(plain, inputs))[1]
    assert {c for c in calls if "backward" not in c and "grad" not in c} <= {
        "router_top_k",
        "npu_linear",
        "expert_counts",
    }
    half.undo()
    assert not counted(lambda: step(plain, inputs))[1]


@pytest.mark.parametrize("name", SOME)
def test_converted_twice_is_converted_once(name):
    model = models.build(name)
    first = jumar.convert(model, CONVERTERS)
    classes = [type(m) for m in model.modules()]
    second = jumar.convert(model, CONVERTERS, strict=True)
    assert [type(m) for m in model.modules()] == classes
    assert [s.reason for s in second.sites] == [ALREADY] * len(first.replaced)


def autocast_step(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**inputs)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.loss.detach(), out.logits.detach(), grads


@pytest.mark.parametrize("name", SOME)
def test_autocast(name):
    totals = [0.0, 0.0]
    for seed in range(3):
        model = models.build(name, seed=seed).train()
        if STACKED:
            model.set_experts_implementation(
                "eager"
            )  # the grouped one of torch does not know autocast
        inputs = models.example_inputs(model, seed=seed)
        exact, eager = step(model, inputs), autocast_step(model, inputs)
        jumar.convert(model, CONVERTERS)
        fused = autocast_step(model, inputs)
        assert fused[1].dtype == eager[1].dtype
        assert {g.dtype for g in fused[2].values()} == {torch.float32}
        for index, error in enumerate(errors_of([eager[2], fused[2]], exact[2])):
            totals[index] += error
    assert totals[1] <= 1.1 * totals[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_gradient_checkpointing(name, reentrant):
    plain, recomputed = checkpointed(
        name, reentrant, lambda model: jumar.convert(model, CONVERTERS), assert_same
    )
    assert recomputed["router_top_k"] == 2 * plain["router_top_k"]


@pytest.mark.parametrize("name", SOME)
def test_compiled_model_runs_the_operators(name):
    torch._dynamo.reset()
    model = models.build(name).train()
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    jumar.convert(model, CONVERTERS)
    _, plain_calls = counted(lambda: step(model, inputs))
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, inputs)
    actual, calls = counted(lambda: step(compiled, inputs))
    assert_same(
        (*actual[:2], {n.removeprefix("_orig_mod."): g for n, g in actual[2].items()}), expected
    )
    assert calls["router_top_k"] == plain_calls["router_top_k"]
    assert calls["moe_ffn"] == plain_calls["moe_ffn"]
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SOME)
def test_meta_models_are_recognised(name):
    model = models.build(name)
    with torch.device("meta"):
        empty = type(model)(model.config)
    report = jumar.convert(empty, CONVERTERS, strict=True)
    assert len(report.replaced) == 3 * len(blocks(model)) and not report.skipped

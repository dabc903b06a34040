"""Converted Hugging Face models against eager ones.  Runs under every supported version of transformers:
``test_convert_hf.py`` in the main environment, ``compat/test_hf457.py`` in the one of 4.57.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import jumar
from jumar import models
from jumar.convert import revert
from jumar.convert.registry import ALREADY

#: sites of (npu_rms_norm, npu_rope, npu_sdpa, npu_swiglu, npu_linear, npu_loss) in the built-in dense models
SITES = {
    "llama": (5, 2, 2, 2, 15, 1),
    "qwen2": (5, 2, 2, 2, 15, 1),
    "qwen3": (9, 2, 2, 2, 15, 1),
    "qwen2_5_vl": (10, 4, 4, 4, 27, 1),
    "qwen3_vl": (9, 4, 4, 2, 27, 1),
}
NAMES = list(SITES)
CALLS = {
    "npu_rms_norm": ("npu_rms_norm", 1),
    "npu_rope": ("npu_rotary_mul", 2),  # q and k
    "npu_sdpa": ("npu_fusion_attention", 1),
    "npu_swiglu": ("swiglu_gate_up", 1),
    "npu_linear": ("npu_linear", 1),
    "npu_loss": ("linear_cross_entropy", 1),
}


def step(model, inputs):
    """(loss, logits, gradients by name) of one training step."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.loss.detach(), out.logits.detach(), grads


def assert_close(actual, expected, relative, what=""):
    """Every element within ``relative`` of the tensor's largest; NaN is never close."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = relative * expected.abs().max().clamp_min(1e-30)
    assert bool(((actual - expected).abs() <= bound).all()), what


def assert_same_step(actual, expected, relative=1e-5):
    assert_close(actual[0], expected[0], relative)
    assert_close(actual[1], expected[1], relative)
    assert actual[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():
        assert_close(actual[2][name], grad, relative, name)


def counted(function):
    """The function's result, and the operators that ran meanwhile."""
    jumar.reset_call_counts()
    result = function()
    return result, jumar.call_counts()


@pytest.mark.parametrize("name", NAMES)
def test_fp32_step_equals_eager(name):
    model, inputs = models.build(name).train(), None
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    assert len(expected[2]) == len(list(model.parameters()))  # every weight takes part
    report = jumar.kernelize(model, verify=True)
    assert tuple(report.counts()[c]["replaced"] for c in CALLS) == SITES[name]
    actual, calls = counted(lambda: step(model, inputs))
    assert_same_step(actual, expected)
    for number, (operator, factor) in zip(SITES[name], CALLS.values(), strict=True):
        assert_calls(calls, operator, number * factor)
    report.undo()
    undone, calls = counted(lambda: step(model, inputs))
    assert not calls
    assert_same_step(undone, expected, relative=0)


def assert_calls(calls, operator, number):
    """Vision towers attend window by window, image by image: a call each; compiled, all at once with lengths in tensors."""
    if operator == "npu_fusion_attention":
        assert sum(calls.get(operator + version, 0) for version in ("", "_v3")) >= number
    else:
        assert calls[operator] == number


def rms(tensors):
    return torch.sqrt(sum(t.double().square().sum() for t in tensors))


def gradient_errors(grads, exact):
    """Relative error of each gradient, in the root mean square."""
    return {
        n: (rms([g.double() - exact[n].double()]) / rms([exact[n]])).item()
        for n, g in grads.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_bf16_step_is_no_further_from_fp64_than_eager(name):
    """At equal weights, over several draws: for one tensor the two errors scatter about each other, summed over
    all of them the fused one must not be larger."""
    totals = {"eager": [0.0, 0.0], "fused": [0.0, 0.0]}
    for seed in range(10):
        model = models.build(name, seed=seed, dtype=torch.bfloat16).train()
        inputs = models.example_inputs(model, seed=seed)
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        exact = step(copy.deepcopy(model).double(), wide)
        eager = step(model, inputs)
        jumar.kernelize(model)
        fused, calls = counted(lambda model=model, inputs=inputs: step(model, inputs))
        for number, (operator, factor) in zip(SITES[name], CALLS.values(), strict=True):
            assert_calls(calls, operator, number * factor)
        for kind, result in (("eager", eager), ("fused", fused)):
            assert result[1].dtype == torch.bfloat16
            totals[kind][0] += (rms([result[1].double() - exact[1]]) / rms([exact[1]])).item()
            errors = gradient_errors(result[2], exact[2])
            totals[kind][1] += sum(errors.values())
            assert max(errors.values()) < 0.1  # and nothing is simply wrong
    assert totals["fused"][0] <= 1.1 * totals["eager"][0]
    assert totals["fused"][1] <= 1.05 * totals["eager"][1]


@pytest.mark.parametrize("converter", list(CALLS))
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl", "qwen3_vl"])
def test_each_converter_alone(name, converter):
    model = models.build(name).train()
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    keys = list(model.state_dict())
    jumar.convert(model, [converter], strict=True)
    assert list(model.state_dict()) == keys
    actual, calls = counted(lambda: step(model, inputs))
    assert_same_step(actual, expected)
    forward = {c for c in calls if "backward" not in c and "grad" not in c}
    assert forward == {CALLS[converter][0]}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_vision_language_models_on_text_alone(name):
    model = models.build(name)
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids).logits
    jumar.kernelize(model)
    assert_close(model(input_ids=ids).logits, expected, 1e-5)


@pytest.mark.parametrize(
    "positions", [[[5, 6, 7, 8]], [[0, 1, 0, 1]], [[3, 3, 2, 0], [0, 1, 2, 3]]]
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2_5_vl"])
def test_position_ids_are_respected(name, positions):
    model = models.build(name)
    positions = torch.tensor(positions)
    ids = torch.randint(3, 90, (len(positions), 4), generator=torch.Generator().manual_seed(2))
    expected = model(input_ids=ids, position_ids=positions).logits
    other = model(input_ids=ids).logits
    jumar.kernelize(model)
    actual = model(input_ids=ids, position_ids=positions).logits
    assert_close(actual, expected, 1e-5)
    if not torch.equal(positions - positions[:, :1], torch.arange(4).expand_as(positions)):
        assert (actual - other).abs().max() > 1e-3  # the ids mattered


def test_scales_of_long_context_variants_are_kept():
    """D4: YaRN scales the tables and the softmax; both belong to the model and are used as they are."""
    model = models.build("qwen3")
    model.model.rotary_emb.attention_scaling = 1.3
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.2
    inputs = models.example_inputs(model)
    expected = model(**inputs).logits
    jumar.kernelize(model)
    assert_close(model(**inputs).logits, expected, 1e-5)


def test_multimodal_positions_that_differ_by_axis():
    model = models.build("qwen2_5_vl")
    ids = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.arange(6), torch.arange(6) * 2, 7 - torch.arange(6)])
    positions = positions[:, None].expand(3, 2, 6)
    expected = model(input_ids=ids, position_ids=positions).logits
    jumar.kernelize(model)
    assert_close(model(input_ids=ids, position_ids=positions).logits, expected, 1e-5)


def generate(model, tokens, **options):
    inputs = {name: value for name, value in models.example_inputs(model).items() if name != "labels"}
    options |= {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options["suppress_tokens"] = list(range(90, 96))  # a random model would start images
    return model.generate(**inputs, **options)


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_cache_after_training(name):
    model = models.build(name)
    expected = generate(model, 6)
    jumar.kernelize(model)
    model.train()
    step(model, models.example_inputs(model))
    model.eval()
    actual, calls = counted(lambda: generate(model, 6))
    assert torch.equal(actual, expected)
    assert calls["npu_rotary_mul"] >= 6 * 2 * 2  # every decoding step of every layer
    assert torch.equal(generate(model, 6, use_cache=False), expected)


def test_train_and_eval_switch_back_and_forth():
    model = models.build("qwen3")
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    jumar.kernelize(model)
    for mode in (True, False, True, False):
        model.train(mode)
        actual, calls = counted(lambda: step(model, inputs))
        assert_same_step(actual, expected)
        assert calls["npu_rms_norm"] == 9


def check_save_and_load(name, folder):
    """A converted model's files are those of the plain one, in both directions."""
    first = models.build(name)
    inputs = models.example_inputs(first)
    first.save_pretrained(folder / "plain")
    model = type(first).from_pretrained(folder / "plain").eval()
    expected = model(**inputs).logits  # as loaded: weights may lie otherwise in memory than those that were built
    jumar.kernelize(model, strict=True)
    assert_close(model(**inputs).logits, expected, 1e-5)
    model.save_pretrained(folder / "converted")
    again = models.load(folder / "converted")
    assert type(again) is type(first)
    assert torch.equal(again(**inputs).logits, expected)
    before, after = first.state_dict(), again.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load(name, tmp_path):
    check_save_and_load(name, tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl"])
def test_deepcopy_and_pickle(name):
    model = models.build(name)
    inputs = models.example_inputs(model)
    jumar.kernelize(model)
    expected, calls = counted(lambda: step(model, inputs))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    clones = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(stream, weights_only=False),
    }
    for way, clone in clones.items():
        actual, clone_calls = counted(lambda clone=clone: step(clone, inputs))
        assert clone_calls == calls, way
        assert_same_step(actual, expected, relative=0)
        assert [type(m) for m in clone.modules()] == [type(m) for m in model.modules()]
        # the copies do not hang together
        assert revert(clone) > 0
        assert not counted(lambda clone=clone: step(clone, inputs))[1]
    assert counted(lambda: step(model, inputs))[1] == calls


def autocast_step(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**inputs)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return out.loss.detach(), out.logits.detach(), grads


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_autocast(name):
    totals = [0.0, 0.0]
    for seed in range(4):
        model = models.build(name, seed=seed).train()
        inputs = models.example_inputs(model, seed=seed)
        exact = step(model, inputs)
        eager = autocast_step(model, inputs)
        jumar.kernelize(model)
        fused, calls = counted(lambda model=model, inputs=inputs: autocast_step(model, inputs))
        assert calls["npu_rms_norm"] == SITES[name][0] and calls["npu_linear"] == SITES[name][4]
        assert fused[1].dtype == eager[1].dtype
        assert {g.dtype for g in fused[2].values()} == {torch.float32}
        totals[0] += sum(gradient_errors(eager[2], exact[2]).values())
        totals[1] += sum(gradient_errors(fused[2], exact[2]).values())
    assert totals[1] <= 1.1 * totals[0]


def checkpointed(name, reentrant, convert, same):
    """The calls of a converted step without and with gradient checkpointing, whose results are those of the plain model."""
    model = models.build(name).train()
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    convert(model)
    _, plain_calls = counted(lambda: step(model, inputs))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    actual, calls = counted(lambda: step(model, inputs))
    same(actual, expected)
    return plain_calls, calls


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl"])
def test_gradient_checkpointing(name, reentrant):
    plain, recomputed = checkpointed(name, reentrant, jumar.kernelize, assert_same_step)
    assert recomputed["npu_rotary_mul"] > plain["npu_rotary_mul"]


def test_hidden_states_and_attentions_are_recorded():
    model = models.build("qwen3")
    model.set_attn_implementation("eager") if hasattr(model, "set_attn_implementation") else None
    inputs = models.example_inputs(model)
    options = {"output_hidden_states": True, "output_attentions": True}
    expected = model(**inputs, **options)
    report = jumar.kernelize(model)
    for _ in range(2):
        actual = model(**inputs, **options)
        for kind in ("hidden_states", "attentions"):
            assert len(actual[kind]) == len(expected[kind]) > 0
            for a, e in zip(actual[kind], expected[kind], strict=True):
                assert_close(a, e, 1e-5)
    report.undo()
    assert torch.equal(model(**inputs).logits, expected.logits)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5_vl"])
def test_compiled_model_runs_the_operators(name):
    torch._dynamo.reset()
    model = models.build(name).train()
    inputs = models.example_inputs(model)
    expected = step(model, inputs)
    jumar.kernelize(model)
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, inputs)
    actual, calls = counted(lambda: step(compiled, inputs))
    prefix = "_orig_mod."
    actual = (*actual[:2], {n.removeprefix(prefix): g for n, g in actual[2].items()})
    assert_same_step(actual, expected)
    for number, (operator, factor) in zip(SITES[name], CALLS.values(), strict=True):
        assert_calls(calls, operator, number * factor)
    torch._dynamo.reset()


def test_two_models_do_not_disturb_each_other():
    converted, plain = models.build("qwen3"), models.build("qwen3")
    inputs = models.example_inputs(plain)
    forward = type(plain.model.layers[0].self_attn).forward
    jumar.kernelize(converted)
    assert not counted(lambda: step(plain, inputs))[1]
    assert type(plain.model.layers[0].self_attn).forward is forward
    half = jumar.convert(plain, ["npu_rms_norm"])
    assert type(plain.model.norm) is type(converted.model.norm)  # one class for equal sites
    _, calls = counted(lambda: step(plain, inputs))
    assert set(calls) == {"npu_rms_norm", "npu_rms_norm_backward"}
    half.undo()
    assert not counted(lambda: step(plain, inputs))[1]
    assert counted(lambda: step(converted, inputs))[1]["npu_rotary_mul"] == 4


@pytest.mark.parametrize("name", NAMES)
def test_converted_twice_is_converted_once(name):
    model = models.build(name)
    inputs = models.example_inputs(model)
    first = jumar.kernelize(model)
    classes = [type(m) for m in model.modules()]
    second = jumar.kernelize(model, strict=True)
    assert [type(m) for m in model.modules()] == classes
    assert not second.replaced and second.unmatched == first.unmatched
    assert sum(site.reason == ALREADY for site in second.skipped) == len(first.replaced)
    second.undo()
    assert [type(m) for m in model.modules()] == classes
    _, calls = counted(lambda: step(model, inputs))
    assert calls["npu_rms_norm"] == SITES[name][0]


def snapshot(model):
    """Everything that conversion could leave behind."""
    return {
        path: (
            type(m),
            type(m).forward,
            {k: v for k, v in vars(m).items() if not k.startswith("_")}.keys(),
            len(m._forward_hooks),
            [id(p) for p in m._parameters.values()],
        )
        for path, m in model.named_modules()
    }


@pytest.mark.parametrize("name", NAMES)
def test_undo_restores_everything(name):
    model = models.build(name)
    inputs = models.example_inputs(model)
    before, expected = snapshot(model), step(model, inputs)
    keys = list(model.state_dict())
    report = jumar.kernelize(model)
    assert list(model.state_dict()) == keys
    assert snapshot(model) != before
    report.undo()
    assert snapshot(model) == before
    assert_same_step(step(model, inputs), expected, relative=0)
    report.undo()  # twice is harmless
    assert snapshot(model) == before


def test_meta_model_is_recognised_and_runs_once_it_has_weights():
    model = models.build("qwen3")
    inputs = models.example_inputs(model)
    expected = model(**inputs).logits
    with torch.device("meta"):
        empty = type(model)(model.config)
    report = jumar.kernelize(empty)
    assert tuple(report.counts()[c]["replaced"] for c in CALLS) == SITES["qwen3"]
    buffers = dict(model.named_buffers())
    empty.load_state_dict(model.state_dict(), assign=True)
    for name, value in buffers.items():
        owner, _, leaf = name.rpartition(".")
        empty.get_submodule(owner)._buffers[leaf] = value
    for path, module in model.named_modules():
        if hasattr(module, "original_inv_freq"):
            empty.get_submodule(path).original_inv_freq = module.original_inv_freq
    assert_close(empty.eval()(**inputs).logits, expected, 1e-5)


def test_dtype_of_a_model_with_fp32_norms():
    """bf16 weights, norms kept in fp32 (as many trainers do): the types between the layers are eager's."""
    model = models.build("llama", dtype=torch.bfloat16)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.float()
    inputs = models.example_inputs(model)
    seen = []
    hooks = [
        m.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
        for m in model.modules()
        if type(m).__name__ == "LlamaRMSNorm"
    ]
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs)
        expected, seen = seen, []
        jumar.kernelize(model)
        model(**inputs)
    assert len(hooks) == 5 and len(expected) == 5

"""torchtitan's modules on fused operators: against their parents, with batched positions, names and identities kept."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

pytest.importorskip("torchtitan")

from jumar import compat, dtensor, titan

compat.apply()

from torch.nn.attention.flex_attention import BlockMask
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from jumar.convert.errors import ConverterError
from jumar.titan.models import model_spec

NAMES = ["npu_rms_norm", "npu_rope", "npu_swiglu", "npu_linear"]


def _override(root, names):
    apply_overrides(OverrideConfig(imports=[f"jumar.titan.{name}" for name in names]), root)


def _pair(config, factory):
    """(eager, fused) modules of one configuration with equal, random parameters."""
    torch.manual_seed(3)
    eager = copy.deepcopy(config).build()
    fused = factory(copy.deepcopy(config)).build()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    fused.load_state_dict(eager.state_dict())
    return eager, fused


def _compare(eager, fused, *inputs, **more):
    """Outputs and all gradients agree to fp32 accuracy."""
    results = []
    for module in (eager, fused):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = module(*leaves, **more)
        outs = out if isinstance(out, tuple) else (out,)
        torch.manual_seed(5)
        sum((o * torch.randn_like(o)).sum() for o in outs).backward()
        results.append([*outs, *(x.grad for x in leaves), *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps", [1e-5, None])
def test_norm(eps):
    config = RMSNorm.Config(normalized_shape=24, eps=eps)
    _compare(*_pair(config, titan.npu_rms_norm), torch.randn(2, 5, 24))


def test_linear():
    _compare(*_pair(Linear.Config(in_features=13, out_features=7, bias=True), titan.npu_linear), torch.randn(2, 5, 13))


def test_feed_forward():
    config = model_spec("qwen3", "tiny").model.layers[0].feed_forward
    _compare(*_pair(config, titan.npu_swiglu), torch.randn(2, 5, 64))


def test_gated_feed_forward():
    plain = model_spec("qwen3", "tiny").model.layers[0].feed_forward
    gate = Linear.Config(in_features=64, out_features=1)
    config = SigmoidGatedFeedForward.Config(w1=plain.w1, w2=plain.w2, w3=plain.w3, gate=gate)
    eager, fused = _pair(config, titan.npu_swiglu)
    _compare(eager, fused, torch.randn(2, 5, 64))


@pytest.mark.parametrize("kind", [CosSinRoPE, ComplexRoPE])
@pytest.mark.parametrize(
    "positions",
    [
        None,
        torch.tensor([[5, 6, 7]]),
        # Every row its own angles; two packed documents in the second.
        torch.tensor([[0, 1, 2], [0, 0, 1]]),
        torch.tensor([[9, 3, 3], [1, 0, 7]]),
    ],
    ids=["none", "shifted", "packed", "batched"],
)
def test_positions(kind, positions):
    eager, fused = _pair(kind.Config(dim=8, max_seq_len=10), titan.npu_rope)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    _compare(eager, fused, query, key, positions=positions)
    out = fused(query, key, positions)
    assert out[0].shape == query.shape and out[1].shape == key.shape


def test_positions_where_heads_equal_tokens():
    """Angles must follow the rows, not line up with the heads."""
    eager, fused = _pair(CosSinRoPE.Config(dim=8, max_seq_len=10), titan.npu_rope)
    x = torch.randn(2, 4, 4, 8)
    _compare(eager, fused, x, x.clone(), positions=torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]))


def test_position_beyond_the_cache():
    _, fused = _pair(CosSinRoPE.Config(dim=8, max_seq_len=4), titan.npu_rope)
    x = torch.randn(1, 2, 1, 8)
    with pytest.raises(RuntimeError, match="max_valid_pos"):
        fused(x, x, torch.tensor([[0, 4]]))


def test_forward_takes_the_parents_names():
    for converter in titan.CONVERTERS.values():
        for target, replacement in converter.replacements.items():
            parent, fused = target._owner, replacement._owner
            names = list(inspect.signature(parent.forward).parameters)
            assert list(inspect.signature(fused.forward).parameters) == names
            # The shim of FlexAttention is what its configuration builds on a CPU.
            assert fused.__mro__[1] in parent.__mro__[:2]


def test_signature_of_another_release():
    class Parent:
        def forward(self, hidden, extra=None):
            return hidden

    @titan.modules.adopt_signature(Parent)
    def forward(self, x):
        return x + 1

    assert list(inspect.signature(forward).parameters) == ["self", "hidden", "extra"]
    assert forward(None, hidden=1) == 2
    with pytest.raises(TypeError, match="takes"):
        titan.modules.adopt_signature(Parent)(lambda self, a, b, c: a)


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_overrides_in_any_order(order):
    spec = model_spec("qwen3", "tiny")
    keys = list(copy.deepcopy(spec.model).build().state_dict())
    report = titan.plan(spec, order)
    _override(spec, order)
    model = spec.model.build()
    # The query-key norm is one node and two modules.
    assert titan.count_modules([model]) == {"npu_rms_norm": 9, "npu_rope": 2, "npu_swiglu": 2, "npu_linear": 11}
    assert list(model.state_dict()) == keys
    assert len(report.replaced) == 22 and not report.skipped
    again = titan.plan(spec, order, strict=False)
    assert {site.reason for site in again.skipped} == {"already converted"} and not again.unmatched


def test_somebody_elses_override_still_conflicts():
    from torchtitan.config.override import _REGISTRY, override

    @override(target=Linear.Config, fqns=["*.w1"])
    def other(config):
        return config

    try:
        with pytest.raises(ValueError, match="both claim node|ancestor"):
            spec = model_spec("qwen3", "tiny")
            apply_overrides(OverrideConfig(imports=["jumar.titan.npu_linear", f"{__name__}.other"]), spec)
    finally:
        _REGISTRY.pop(f"{__name__}.other")


def test_subclasses_and_weightless_norms_stay():
    special = ScaledBiasRowwiseLinear.Config(in_features=4, out_features=4, bias=True)
    assert type(titan.npu_linear(special)) is ScaledBiasRowwiseLinear.Config
    bare = RMSNorm.Config(normalized_shape=4, elementwise_affine=False)
    assert type(titan.npu_rms_norm(bare)) is RMSNorm.Config
    assert titan.CONVERTERS["npu_rms_norm"].obstacle(bare) == "the norm has no weight"


def test_unknown_converter_names_the_nearest():
    with pytest.raises(ConverterError, match="did you mean 'npu_swiglu'"):
        titan.plan(model_spec("qwen3", "tiny"), ["npu_swigluu"])


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3", "gpt_oss"])
def test_other_models_of_torchtitan(name):
    """Whatever a model has is planned, and what is planned is what is built."""
    spec = model_spec(name, "debugmodel")
    report = titan.plan(spec, [f"{n}?" for n in NAMES], strict=False)
    found = {site.converter for site in report.replaced}
    assert {"npu_rms_norm", "npu_linear"} <= found
    _override(spec, NAMES)
    with torch.device("meta"):
        built = titan.count_modules([spec.model.build()])
    assert set(built) == found


def _documents(positions):
    """Causal and same document, by definition."""
    documents = (positions == 0).cumsum(1)
    length = positions.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (documents.unsqueeze(2) == documents.unsqueeze(1)) & causal


def _packed():
    return torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


def test_attention_honours_the_document_mask():
    config = model_spec("qwen3", "tiny").model
    model = config.build()
    positions = _packed()
    mask = model.get_attention_masks(positions)
    assert isinstance(mask, BlockMask)
    inner = model.layers["0"].attention.inner_attention
    q, k, v = (torch.randn(2, 8, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    out = inner(q, k, v, attention_masks=mask, scale=0.25, enable_gqa=True)
    wide_k, wide_v = (t.repeat_interleave(2, 2) for t in (k, v))
    scores = torch.einsum("blnh,bmnh->bnlm", q, wide_k) * 0.25
    allowed = _documents(positions).unsqueeze(1)
    expected = torch.einsum("bnlm,bmnh->blnh", scores.masked_fill(~allowed, -torch.inf).softmax(-1), wide_v)
    torch.testing.assert_close(out, expected)
    # What lies in another document, or in the future, has no influence on a token.
    (gradient,) = torch.autograd.grad(out[0, 4].sum(), v, retain_graph=True)
    assert gradient[0, [3, 4]].abs().sum() > 0
    assert gradient[0, [0, 1, 2, 5, 6, 7]].abs().sum() == 0 and gradient[1].abs().sum() == 0


def test_attention_refuses_what_it_cannot_honour():
    inner = titan_attention.FlexAttention.Config().build()
    x = torch.randn(1, 4, 1, 8)
    mask = model_spec("qwen3", "tiny").model.build().get_attention_masks(torch.arange(4).unsqueeze(0))
    with pytest.raises(NotImplementedError, match="score_mod"):
        inner(x, x, x, attention_masks=mask, score_mod=lambda s, b, h, q, k: s)
    with pytest.raises(NotImplementedError, match="out_transform"):
        inner(x, x, x, attention_masks=mask, out_transform=lambda out, lse: out)
    with pytest.raises(TypeError, match="BlockMask"):
        inner(x, x, x, attention_masks=None)


def test_attention_in_bf16_without_instructions_for_it(monkeypatch):
    from jumar.compat import attention

    mask = model_spec("qwen3", "tiny").model.build().get_attention_masks(_packed())
    inner = titan_attention.FlexAttention.Config().build()
    values = [torch.randn(2, 8, 4, 16).bfloat16() for _ in range(3)]
    exact = inner(*(t.double() for t in values), attention_masks=mask)
    monkeypatch.setattr(attention, "WIDEN", True)
    out = inner(*values, attention_masks=mask)
    assert out.dtype == torch.bfloat16 and out.shape == exact.shape
    # One rounding.
    assert ((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_packed_documents_equal_separate_ones():
    """A document's logits do not depend on what it is packed with; eager and fused alike."""
    for names in ([], NAMES):
        spec = model_spec("qwen3", "tiny")
        _override(spec, names)
        torch.manual_seed(0)
        model = spec.model.build()
        model.init_states()
        tokens = torch.randint(0, 512, (1, 8), generator=torch.Generator().manual_seed(1))
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
        packed = model(tokens, positions, model.get_attention_masks(positions))
        alone = torch.arange(5).unsqueeze(0)
        single = model(tokens[:, 3:], alone, model.get_attention_masks(alone))
        torch.testing.assert_close(packed[:, 3:], single, rtol=1e-5, atol=1e-5)


def test_shims_are_listed():
    states = {status.name: status.state for status in compat.status()}
    assert set(states) == {
        "cpu_device", "set_timeout", "fsdp_force_sum", "pp_step", "pp_buffers", "triton_stub", "flex_attention",
        "histc", "lora_sharding",
    }
    assert set(states.values()) <= {"applied", "not needed", "switched off"}
    assert all(status.reason and status.reference for status in compat.status())


class _Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.rows += len(x)
        return x * self.weight


def test_a_pipeline_counts_its_microbatches_only():
    """torch runs the stage once more before the first step, on memory that nobody has written."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    compat.apply()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        module = _Counts()
        stage = PipelineStage(module, 0, 1, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
        for step in (1, 2):
            schedule.step(torch.ones(6, 4), target=torch.zeros(6, 4))
            assert module.rows == 6 * step
    finally:
        dist.destroy_process_group()


def test_switching_shims_off(monkeypatch):
    from jumar.compat import registry

    monkeypatch.setenv("JUMAR_SHIMS", "-pp_step, -set_timeout")
    assert registry.switched_off() == {"pp_step", "set_timeout"}
    monkeypatch.setenv("JUMAR_SHIMS", "off")
    assert "cpu_device" in registry.switched_off()
    monkeypatch.setenv("JUMAR_SHIMS", "pp_step")
    with pytest.raises(compat.ShimError, match="should be -pp_step"):
        registry.switched_off()


def test_every_rule_for_dtensors_belongs_to_an_operator():
    dtensor.register()
    for name in dtensor._RULES:
        assert hasattr(torch.ops.jumar, name), name

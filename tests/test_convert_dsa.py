"""npu_dsa in transformers: DeepSeek-V3.2's attention on the operators beside the library's."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch

import jumar
from convert_hf_suite import assert_close, assert_same_step, counted, step
from graph_util import Graphs
from jumar import models
from jumar.convert import ConverterError, dsa
from jumar.hf import dsa as recogniser

transformers = pytest.importorskip("transformers")
if "deepseek_v32" not in models.available():
    pytest.skip("transformers has no DeepSeek-V3.2", allow_module_level=True)

LENGTH = 24  # five keys a query are chosen


def _model(attention="sdpa"):
    model = models.build("deepseek_v32").train()
    model.config.use_cache = False
    model.set_attn_implementation(attention)
    return model


def _inputs(model, **more):
    return {**models.example_inputs(model, length=LENGTH), **more}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("names", [["npu_dsa"], ["npu_rope", "npu_dsa"], ["npu_dsa", "npu_rope"], None], ids=str)
def test_fp32_step_equals_eager(names, attention):
    model = _model(attention)
    inputs = _inputs(model)
    expected = step(model, inputs)
    report = jumar.kernelize(model, verify=True) if names is None else jumar.convert(model, names, verify=True)
    assert report.counts()["npu_dsa"]["replaced"] == 3
    actual, calls = counted(lambda: step(model, inputs))
    assert_same_step(actual, expected)
    assert calls["npu_sparse_flash_attention"] == calls["npu_lightning_indexer"] == 3
    assert calls["npu_sparse_flash_attention_grad"] == 3 and "npu_fusion_attention" not in calls
    if names != ["npu_dsa"]:
        assert calls["npu_rotary_mul"] >= 3 * 4
    report.undo()
    assert all(torch.equal(a, b) for a, b in zip(step(model, inputs)[:2], expected[:2], strict=True))


def test_bf16_step_is_no_further_from_fp64_than_eager():
    from jumar.verify.models import verify_model

    rows = verify_model(models.build("deepseek_v32", dtype=torch.bfloat16), ["npu_dsa"])
    assert all(row.ok for row in rows), [row for row in rows if not row.ok]


MASKS = {
    "padded on the right": {"attention_mask": [[1] * 24, [1] * 15 + [0] * 9]},
    "padded on the left": {"attention_mask": [[1] * 24, [0] * 9 + [1] * 15]},
    "packed": {"position_ids": [[*range(9), *range(15)]] * 2},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("what", MASKS)
def test_masks(what, attention):
    """Documents and padding are sequences; what is padded has no result that anybody reads."""
    model = _model(attention)
    inputs = {n: torch.tensor(v) for n, v in MASKS[what].items()}
    real = inputs.get("attention_mask", torch.ones(2, LENGTH)).bool()
    inputs = _inputs(model, **inputs)
    # The first token after padding would be predicted from it.
    read = real & torch.nn.functional.pad(real, (1, 0), value=True)[:, :-1]
    inputs["labels"] = inputs["labels"].masked_fill(~read, -100)
    expected = step(model, inputs)
    jumar.convert(model, "npu_dsa")
    actual, calls = counted(lambda: step(model, inputs))
    assert calls["npu_sparse_flash_attention"] == 3
    assert_close(actual[1][real], expected[1][real], 1e-5)
    assert_close(actual[0], expected[0], 1e-5)
    for name, gradient in expected[2].items():
        assert_close(actual[2][name], gradient, 1e-5, name)


def test_what_is_no_sequence_runs_as_before():
    """A bias, and a mask with holes: the library's attention, bit for bit."""
    model = _model()
    hole = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    hole[:, :, 9:, 4] = False
    bias = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~hole.tril(), torch.finfo(torch.float32).min)
    bias[:, :, :, 2] -= 0.5
    for mask in (hole, bias):
        inputs = _inputs(model, attention_mask=mask)
        expected = step(model, inputs)
        report = jumar.convert(model, "npu_dsa")
        actual, calls = counted(lambda inputs=inputs: step(model, inputs))
        report.undo()
        assert "npu_sparse_flash_attention" not in calls
        assert all(torch.equal(a, b) for a, b in zip(actual[:2], expected[:2], strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_written_to_is_read_again(mode):
    model = _model()
    with mode():
        first = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        second = first.clone()
        second[..., 9:, :9] = False
        inputs = _inputs(model)
        del inputs["labels"]
        expected = [model(**{**inputs, "attention_mask": m}).logits for m in (first, second)]
        jumar.convert(model, "npu_dsa")
        mask = first.clone()
        for values, logits in zip((first, second), expected, strict=True):
            mask.copy_(values)
            assert_close(model(**{**inputs, "attention_mask": mask}).logits, logits, 1e-5)


def test_generate_with_a_cache():
    model = _model().eval()
    ids = models.example_inputs(model, length=9)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    jumar.convert(model, "npu_dsa")
    actual, calls = counted(lambda: model.generate(ids, **options))
    assert torch.equal(actual, expected) and calls["npu_sparse_flash_attention"] == 3 * 8


def test_scores_have_the_library_s_scale(monkeypatch):
    """The choice of keys does not depend on it, what the indexer learns does."""
    eager = pytest.importorskip("jumar.titan.deepseek_v32").eager
    model, scores, parts = _model(), [], []
    topk, layer = torch.Tensor.topk, model.model.layers[0].self_attn
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, *a, **k: scores.append(self) or topk(self, *a, **k))
    layer.indexer.register_forward_hook(lambda m, a, o: parts.append(recogniser._index(layer, *a[:3], None)))
    with torch.no_grad():
        model(**_inputs(model))
    expected, visible = scores[0], torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert_close(eager.scores(*parts[0]) * visible, expected.masked_fill(~visible, 0), 2e-6)


def test_compiled_model_runs_the_operators():
    model = _model()
    inputs = _inputs(model)
    jumar.convert(model, "npu_dsa")
    expected = step(model, inputs)
    actual, calls = counted(lambda: step(torch.compile(model, backend="aot_eager"), inputs))
    torch._dynamo.reset()
    assert calls["npu_sparse_flash_attention"] == calls["npu_sparse_flash_attention_grad"] == 3
    assert_close(actual[1], expected[1], 1e-6)


def check_one_graph(model, run, expected, tolerance):
    """Compiled, a forward and a backward graph without a matrix of tokens compute what `run` gave before."""
    graphs = Graphs()
    torch._dynamo.reset()
    actual, calls = counted(lambda: run(torch.compile(model, backend=graphs.backend, fullgraph=True)))
    torch._dynamo.reset()
    assert calls["npu_sparse_flash_attention"] == calls["npu_sparse_flash_attention_grad"] == 3
    assert graphs.number == 2 and not graphs.matrices(29)
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want, tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_a_compiled_model_is_one_graph_without_a_matrix(packed):
    """All converters; the indexer's choice is of the operator, and no query has a place for every key."""
    model = _model()
    inputs = models.example_inputs(model, length=29)  # no other size of the model
    if packed:
        inputs["position_ids"] = torch.tensor([[*range(9), *range(20)]] * 2)
    del inputs["labels"]
    jumar.kernelize(model)
    assert model.config._attn_implementation == recogniser.FUSED["sdpa"]

    def run(m):
        m.zero_grad()
        logits = m(**inputs).logits
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in m.parameters() if p.grad is not None)]

    check_one_graph(model, run, run(model), 1e-6)


PADDING = {
    "right": [[1] * 29, [1] * 20 + [0] * 9],
    "left": [[0] * 2 + [1] * 27, [0] * 9 + [1] * 20],
    "holes": [[1] * 12 + [0] * 3 + [1] * 14, [0] * 4 + [1] * 15 + [0] * 2 + [1] * 6 + [0] * 2],
    "nothing else": [[0] * 29, [1] * 29],
}


@pytest.mark.parametrize("what", PADDING)
def test_padding_does_not_end_a_compiled_graph(what):
    """Also where what is not padding is no range, which without a graph is the library's attention."""
    model, real = _model(), torch.tensor(PADDING[what]).bool()
    ids = models.example_inputs(model, length=29)["input_ids"]

    def run(m):
        m.zero_grad()
        logits = m(input_ids=ids, attention_mask=real.long(), use_cache=False).logits[real]
        logits.square().mean().backward()
        return [logits.detach(), *(p.grad.clone() for p in m.parameters() if p.grad is not None)]

    expected = run(model)
    jumar.convert(model, "npu_dsa")
    check_one_graph(model, run, expected, 1e-5)


def test_revert_and_undo_name_the_attention_that_was_there():
    model = _model()
    report = jumar.convert(model, "npu_dsa")
    other = copy.deepcopy(model)
    report.undo()
    jumar.convert.revert(other)
    assert {m.config._attn_implementation for m in (model, other)} == {"sdpa"}


def test_npu_sdpa_leaves_chosen_keys_alone():
    report = jumar.convert(_model(), "npu_sdpa")
    reasons = {site.reason for site in report.sites if site.module_class == "DeepseekV32Attention"}
    assert not report.replaced and reasons == {"its keys are chosen by an indexer, as npu_dsa does it"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = _model()
    inputs = _inputs(model)
    expected = step(model, inputs)
    jumar.convert(model, "npu_dsa")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(step(model, inputs), expected)


def test_copies_and_pickles_stay_converted(tmp_path):
    model = _model()
    inputs = _inputs(model)
    jumar.convert(model, "npu_dsa")
    expected = step(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        actual, calls = counted(lambda other=other: step(other, inputs))
        assert calls["npu_sparse_flash_attention"] == 3
        assert torch.equal(actual[1], expected[1])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    assert_same_step(step(loaded, inputs), expected)


def test_look_alikes_are_reported():
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    small = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20}
    small |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_hidden_layers": 1}
    small |= {"hidden_size": 48, "vocab_size": 96, "intermediate_size": 80, "index_n_heads": 2, "index_head_dim": 16}
    report = jumar.convert(GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**small)), "npu_dsa")
    reasons = [site.reason for site in report.skipped]
    assert len(reasons) == 1 and "prev_topk_indices" in reasons[0]
    assert not jumar.convert(models.build("deepseek_v3"), "npu_dsa").sites
    model = _model()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    del model.model.layers[2].self_attn.indexer.softmax_scale
    model.model.layers[2].self_attn.config = copy.copy(model.config)
    report = jumar.convert(model, "npu_dsa")
    reasons = [site.reason for site in report.skipped]
    assert len(report.replaced) == 1 and reasons[0] == "it has dropout"
    assert reasons[1].startswith("its forward raised AttributeError") and "softmax_scale" in reasons[1]


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_indexers_learn_when_they_are_told_to(stage):
    """The rest of the model has the gradients that it had, the loss is that of torchtitan's form."""
    eager = pytest.importorskip("jumar.titan.deepseek_v32").eager
    model = _model()
    inputs = _inputs(model)
    report = jumar.convert(model, "npu_dsa")
    before = step(model, inputs)
    assert not any(".indexer." in name for name in before[2])
    meters = dsa.train_indexers(model, stage=stage, coeff=2.0)
    seen = []
    layer = model.model.layers[0].self_attn
    hook = layer.register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    after = step(model, inputs)
    hook.remove()
    indexers = {name for name in after[2] if ".indexer." in name}
    assert len(indexers) == 3 * 5 and after[2].keys() - indexers == before[2].keys()
    if stage == "sparse":
        assert torch.equal(after[1], before[1])
        assert all(torch.equal(after[2][name], gradient) for name, gradient in before[2].items())
    # The first layer again, by hand.
    arguments, named = seen[0]
    hidden = (arguments or (named["hidden_states"],))[0].detach()
    tables = named["position_embeddings"]
    q_resid = layer.q_a_layernorm(layer.q_a_proj(hidden)).detach()
    q_nope, q_pe = layer.q_b_proj(q_resid).unflatten(-1, (4, -1)).split([12, 8], -1)
    latent, k_pe = layer.kv_a_proj_with_mqa(hidden).split([20, 8], -1)
    modeling = __import__(type(model).__module__, fromlist=["apply_rotary_pos_emb_interleave"])
    q_pe, k_pe = modeling.apply_rotary_pos_emb_interleave(q_pe, k_pe.unsqueeze(2), *tables, unsqueeze_dim=2)
    key = layer.kv_b_proj(layer.kv_a_layernorm(latent)).unflatten(-1, (4, -1))[..., :12]
    key = torch.cat([key, k_pe.expand(-1, -1, 4, -1)], -1)
    index = recogniser._index(layer, hidden, q_resid, tables, None)
    chosen = visible = eager.visible(2, LENGTH, None, hidden.device)
    if stage == "sparse":
        chosen = eager.choose(eager.scores(*index), visible, 5)
    *gradients, loss = eager.kl(*index, torch.cat([q_nope, q_pe], -1), key, chosen, scale=layer.scaling)
    torch.testing.assert_close(meters[0].take(), loss.detach(), rtol=1e-5, atol=1e-6)
    torch.autograd.backward(index, [g * (2.0 / (2 * LENGTH)) for g in gradients])
    for name, parameter in layer.indexer.named_parameters():
        assert_close(after[2][f"model.layers.0.self_attn.indexer.{name}"], parameter.grad, 2e-5, name)
    # What is evaluated is what is trained; without gradients nothing is learned.
    for run in (model.eval(), model.train()):
        with torch.no_grad():
            assert torch.equal(run(**inputs).logits, after[1])
    assert not meters[1].take(1).equal(torch.zeros(())) and not meters[1].losses
    hole = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    hole[:, :, 9:, 4] = False
    with pytest.raises(NotImplementedError, match="indexers that learn have no form for an attention mask that is not of .*; leave it out"):
        model(**{**inputs, "attention_mask": hole})
    # Half of the gradients, as if of a step of twice the queries.
    dsa.set_step_queries(model, 2 * 2 * LENGTH)
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert torch.equal(2 * step(model, inputs)[2][name], after[2][name])
    report.undo()
    with pytest.raises(ConverterError, match="npu_dsa has replaced nothing"):
        dsa.train_indexers(model)
    with pytest.raises(ConverterError, match="stage must be 'sparse' or 'warmup', got 'dense'"):
        dsa.train_indexers(model, stage="dense")


RANK, ROPE = 20, 8


class InnerAttention(torch.nn.Module):
    """The shape of torchtitan-npu's inner attention: [B, N, S, D], its loss handed back beside the output."""

    def __init__(self):
        super().__init__()
        self.config = types.SimpleNamespace(kv_lora_rank=RANK, qk_rope_head_dim=ROPE)
        self.compute_dsa_indexer_loss = torch.nn.Identity()

    def forward(
        self, q, k, v, attn_mask=None, scale=None, q_indexer=None, k_indexer=None, weights=None, end_pos=None,
        index_topk=None,
    ):  # fmt: skip
        from jumar.titan.deepseek_v32 import eager

        heads = q.shape[1]
        query, key, value = (t.transpose(1, 2) for t in (q, k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)))
        chosen = eager.visible(len(q), q.shape[2], None, q.device)
        if q_indexer is None:
            return q.new_zeros(1), eager.attention(query, key, value, chosen, scale).transpose(1, 2)
        scores = eager.scores(q_indexer, k_indexer, weights)
        chosen = eager.choose(scores, chosen, min(index_topk, end_pos))
        out = eager.attention(query, key, value, chosen, scale)
        p = (torch.einsum("bsnd,btnd->bnst", query, key) * scale).masked_fill(~chosen[:, None], -torch.inf)
        p = p.softmax(-1).mean(1).detach()
        y = scores.masked_fill(~chosen, -torch.inf).log_softmax(-1).masked_fill(~chosen, 0)
        return (torch.xlogy(p, p) - p * y).sum(-1).mean(), out.transpose(1, 2)


def test_inner_attention_of_torchtitan_npu():
    """The loss comes back as it is, where the vendor's replacement gives 0, and its gradients with it."""
    pytest.importorskip("torchtitan")
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, RANK + ROPE), (2, 1, LENGTH, RANK + ROPE), (2, 1, LENGTH, RANK)]
    shapes += [(2, LENGTH, 3, 16), (2, LENGTH, 1, 16), (2, LENGTH, 3)]
    q, k, v, qi, ki, w = leaves = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    model = torch.nn.ModuleDict({"inner_attention": InnerAttention()})

    def run():
        loss, out = model["inner_attention"](q, k, v, None, 0.2, qi, ki, w, LENGTH, 7)
        gradients = torch.autograd.grad(3 * loss + out.square().sum(), leaves)
        return [loss.detach(), out.detach(), *gradients]

    expected = run()
    report = jumar.convert(model, "npu_dsa", strict=True)
    actual, calls = counted(run)
    assert [site.path for site in report.replaced] == ["inner_attention"] and expected[0] > 0.01
    assert calls["npu_sparse_flash_attention"] == calls["npu_sparse_lightning_indexer_grad_kl_loss"] == 1
    for got, want in zip(actual, expected, strict=True):
        assert_close(got, want, 2e-6)
    heads = [t.expand(-1, 4, -1, -1) for t in (k, v)]
    wide, calls = counted(lambda: model["inner_attention"](q, *heads, None, 0.2, qi, ki, w, LENGTH, 7))
    assert "npu_sparse_flash_attention" not in calls
    assert_close(wide[1].detach(), expected[1], 2e-6)

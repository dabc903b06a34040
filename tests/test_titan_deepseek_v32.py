"""DeepSeek-V3.2 in torchtitan: transformers' model by another name, its sparse attention, and the loss of its indexers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan")

from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from torchtitan.config.override import OverrideConfig, apply_overrides

from jumar.titan.deepseek_v32 import DeepSeekV32Model, SparseAttention, eager
from jumar.titan.models import model_spec
from jumar.train import JobError, export
from train_util import check_resumes, quickly, train_job, write_job

transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "DeepseekV32ForCausalLM"):
    pytest.skip("transformers has no DeepSeek-V3.2", allow_module_level=True)

LENGTH = 40


def _spec(converters=("npu_gmm",)):
    """The tiny flavor; torchtitan's own experts round to bf16."""
    spec = model_spec("deepseek_v32", "tiny")
    apply_overrides(OverrideConfig(imports=[f"jumar.titan.{name}" for name in converters]), spec)
    return spec


def _build(spec, seed=0) -> DeepSeekV32Model:
    """The model with weights of its own everywhere, of a size at which attention and indexers choose."""
    model = spec.model.build()
    torch.manual_seed(seed)
    model.init_states()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            elif "attention" in name:
                parameter.mul_(8)
    return model


def _tokens(batch=2, seed=1):
    tokens = torch.randint(0, 512, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.arange(LENGTH).expand(batch, -1)


def _theirs(model, spec, folder):
    """The same model in transformers, by way of a checkpoint."""
    adapter = spec.state_dict_adapter(spec.model, None)
    weights = {name: t.contiguous().clone() for name, t in adapter.to_hf(model.state_dict()).items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(export.hf_config("deepseek_v32", spec.model, None)))
    theirs, info = transformers.DeepseekV32ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.train()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(spec, our model, transformers' with the same weights)"""
    spec = _spec()
    model = _build(spec)
    return spec, model, _theirs(model, spec, tmp_path_factory.mktemp("hf") / "model")


def _loss(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _back(theirs, spec, folder):
    """A model of transformers as a checkpoint, by torchtitan's names."""
    theirs.save_pretrained(folder)
    return spec.state_dict_adapter(spec.model, None).from_hf(load_file(folder / "model.safetensors"))


def test_logits_and_gradients_are_those_of_transformers(pair, tmp_path):
    spec, ours, theirs = pair
    tokens, positions = _tokens()
    ours.zero_grad(), theirs.zero_grad()
    logits = ours(tokens, positions)
    expected = theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    _loss(logits, tokens).backward()
    _loss(expected, tokens).backward()
    gradients = copy.deepcopy(theirs)
    with torch.no_grad():
        for into, of in zip(gradients.parameters(), theirs.parameters(), strict=True):
            into.copy_(torch.zeros_like(of) if of.grad is None else of.grad)
    found = _back(gradients, spec, tmp_path)
    checked = 0
    for name, parameter in ours.named_parameters():
        if ".indexer." in name:
            assert not found[name].any() and parameter.grad.any()  # they have no loss for it
            continue
        error = (parameter.grad - found[name]).abs().max() / found[name].abs().max()
        assert error <= 2e-5, (name, error)
        checked += 1
    assert checked > 40


def test_weights_come_back_bit_for_bit(pair, tmp_path):
    spec, ours, theirs = pair
    found = _back(theirs, spec, tmp_path)
    expected = ours.state_dict()
    assert found.keys() == expected.keys() - {n for n in expected if "tokens_per_expert" in n}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_the_same_keys_are_chosen_as_in_transformers(pair):
    """By score: of equal ones the library's top-k may take another."""
    _, ours, theirs = pair
    tokens, positions = _tokens(seed=2)
    chosen, found = [], []
    hooks = [m.self_attn.indexer.register_forward_hook(lambda m, i, o: found.append(o)) for m in theirs.model.layers]
    choose = eager.choose
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(eager, "choose", lambda s, v, k: chosen.append((s, choose(s, v, k))) or chosen[-1][1])
        ours(tokens, positions), theirs(tokens)
    for hook in hooks:
        hook.remove()
    assert len(chosen) == len(found) == 3
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    for (score, mine), indices in zip(chosen, found, strict=True):
        theirs_mask = torch.zeros_like(mine).scatter(-1, indices.long(), True) & causal
        assert (mine.sum(-1) == torch.arange(1, LENGTH + 1).clamp(max=12)).all()
        for mask in (mine, theirs_mask):
            worst = score.masked_fill(~mask, torch.inf).amin(-1)
            best_left = score.masked_fill(mask | ~causal, -torch.inf).amax(-1)
            assert (worst - best_left >= -1e-5 * score.abs().amax()).all()
        assert torch.equal(mine, theirs_mask)


def _cores(model):
    return [m for m in model.modules() if isinstance(m, SparseAttention)]


def _indexer_gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if ".indexer." in n}


def _step(model, tokens, positions, parts=1):
    """Losses of the indexers, a mean over queries, and their gradients, of a batch in parts."""
    model.zero_grad()
    for core in _cores(model):
        core.meter.take()
        core.step_queries = tokens.numel()
    for t, p in zip(tokens.chunk(parts), positions.chunk(parts), strict=True):
        (_loss(model(t, p), t) / parts).backward()
    return [core.meter.take() / tokens.numel() for core in _cores(model)], _indexer_gradients(model)


def test_a_batch_in_parts_gives_the_gradients_of_the_batch(pair):
    _, model, _ = pair
    tokens, positions = _tokens(4)
    (whole, expected), (parts, gradients) = (_step(model, tokens, positions, n) for n in (1, 4))
    torch.testing.assert_close(torch.stack(parts), torch.stack(whole), rtol=1e-5, atol=0)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


def test_activation_checkpointing_computes_the_loss_once(pair):
    _, model, _ = pair
    tokens, positions = _tokens()
    expected, gradients = _step(model, tokens, positions)
    calls = []
    kl = eager.kl
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "kl", lambda *a, **k: calls.append(1) or kl(*a, **k))
        for layer in model.layers.values():
            plain = type(layer).forward
            patch.setattr(
                layer, "forward", lambda *a, m=layer, f=plain: checkpoint(f, m, *a, use_reentrant=False), raising=False
            )
        found, again = _step(model, tokens, positions)
    assert len(calls) == 3
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert all(torch.equal(again[name], gradients[name]) for name in gradients)


def test_packed_documents_do_not_see_one_another(pair):
    _, model, _ = pair
    tokens, _ = _tokens(2)
    lengths = [13, 27]
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    with torch.no_grad():
        packed = model(tokens, positions)
        alone = [model(t, torch.arange(t.shape[1]).expand(2, -1)) for t in tokens.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-5, atol=1e-5)


def test_the_loss_teaches_the_indexer_and_nothing_else(pair):
    """Its gradients are those of a divergence written out, in fp64; the rest of the model does not feel its weight."""
    _, model, _ = pair
    tokens, positions = _tokens()
    seen = {}
    core = _cores(model)[1]
    hook = core.register_forward_pre_hook(lambda m, args: seen.update(args=args))
    losses, gradients = _step(model, tokens, positions)
    hook.remove()
    rest = {n: p.grad.clone() for n, p in model.named_parameters() if ".indexer." not in n}
    (q_nope, q_pe), latent, k_pe, wkv_b, index, _, scale = seen["args"]
    with torch.no_grad():
        kv = (latent.double() @ wkv_b.weight.double().T).unflatten(-1, (4, -1))
        key = torch.cat([kv[..., :16], k_pe.double().expand(-1, -1, 4, -1)], -1)
        query = torch.cat([q_nope, q_pe], -1).double()
        chosen = eager.choose(eager.scores(*index), eager.visible(2, LENGTH, None, latent.device), 12)
    q, k, w = (t.detach().double().requires_grad_() for t in index)
    total = torch.zeros((), dtype=torch.float64)
    for b in range(2):
        for s in range(LENGTH):
            keys = chosen[b, s].nonzero().flatten()
            teacher = sum(torch.softmax(scale * key[b, keys, n] @ query[b, s, n], 0) for n in range(4)) / 4
            score = sum(w[b, s, h] * torch.relu(k[b, keys, 0] @ q[b, s, h]) for h in range(8))
            total = total + (teacher * (teacher.log() - score.log_softmax(0))).sum()
    torch.testing.assert_close(losses[1].double(), total.detach() / tokens.numel(), rtol=1e-4, atol=1e-8)
    total.backward()
    got = eager.kl(*index, query.float(), key.float(), chosen, scale=scale)
    for gradient, expected in zip(got, (q.grad, k.grad, w.grad), strict=False):
        assert (gradient - expected).abs().max() <= 2e-5 * expected.abs().max()
    for core in _cores(model):
        core.loss_coeff = 4.0
    again, fourfold = _step(model, tokens, positions)
    for core in _cores(model):
        core.loss_coeff = 1.0
    assert torch.equal(torch.stack(again), torch.stack(losses))
    assert all(torch.equal(gradient, 4 * gradients[name]) for name, gradient in fourfold.items())
    assert all(torch.equal(p.grad, rest[n]) for n, p in model.named_parameters() if n in rest)


def test_warmup_attends_to_all_keys_and_trains_the_indexers_alone(pair, tmp_path):
    _, sparse, _ = pair
    spec = _spec()
    for layer in spec.model.layers:
        layer.attention.inner_attention.stage = "warmup"
    warmup, dense = spec.model.build(), copy.deepcopy(sparse)
    warmup.load_state_dict(sparse.state_dict())
    for core in _cores(dense):
        core.topk = LENGTH
    tokens, positions = _tokens()
    logits = warmup(tokens, positions)
    with torch.no_grad():
        assert torch.equal(logits, dense(tokens, positions))
        assert not torch.allclose(logits, sparse(tokens, positions), atol=1e-3)
    losses, gradients = _step(warmup, tokens, positions)
    expected, same = _step(dense, tokens, positions)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    # Attention reaches the gradients through the order of sums alone.
    assert {n for n, p in warmup.named_parameters() if p.grad is not None} == gradients.keys() == same.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name]), name


def test_scores_and_loss_by_hand():
    """Negative products count as nothing; a probability of 0 in the teacher is no NaN."""
    query, weights = torch.tensor([[1.0, -1], [0, 2]]), torch.tensor([1.0, 0.5])
    key = torch.tensor([[1.0, 0], [0, 1], [-1, -1]])
    scores = eager.scores(query.expand(1, 3, 2, 2), key[None, :, None], weights.expand(1, 3, 2))
    assert torch.equal(scores[0, 0], torch.tensor([1.0, 1, 0]))
    best = eager.choose(scores, torch.ones(1, 3, 3, dtype=torch.bool), 1)
    assert torch.equal(best[0, 0], torch.tensor([True, False, False]))  # of equal ones the first
    # Two heads, scores 1, 0, -1; attention sees the third key not at all.
    index = (
        torch.tensor([[[[1.0, 0], [0, 1]]]]),
        torch.tensor([[[[1.0, 0]], [[0, 0]], [[0, 1]]]]),
        torch.tensor([[[1.0, -1]]]),
    )
    attended = torch.tensor([[[[0.0]], [[0.0]], [[-1e30]]]])
    chosen = torch.ones(1, 1, 3, dtype=torch.bool)
    found = eager.kl(*index, torch.ones(1, 1, 1, 1), attended, chosen, scale=1.0)
    d_weights, loss = found[2], found[3]
    # d score = softmax(I) - p = [0.165241, -0.255272, 0.090031]
    torch.testing.assert_close(d_weights, torch.tensor([[[0.165241, 0.090031]]]), rtol=0, atol=1e-6)
    torch.testing.assert_close(loss, torch.tensor(0.214459), rtol=0, atol=1e-6)


def test_what_it_does_not_do_is_refused():
    spec = _spec()
    parallelism = SimpleNamespace(tensor_parallel_degree=1, context_parallel_degree=2)
    with pytest.raises(NotImplementedError, match="deepseek_v32 has no context parallelism, its degree is 2; set parallelism.context_parallel_degree to 1"):
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with pytest.raises(NotImplementedError, match="deepseek_v32 is not compiled: .* compile.components are model, loss; leave out model"):
        parallelism.context_parallel_degree = 1
        compilation = SimpleNamespace(enable=True, components=["model", "loss"])
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism, compile=compilation))
    attention = spec.model.layers[0].attention
    attention.q_lora_rank = 0
    with pytest.raises(ValueError, match="DeepSeek-V3.2: the indexer needs low-rank queries"):
        attention.build()


_quick = pytest.fixture(autouse=True, scope="module")(quickly)


def _run(folder, *overrides, converters=()):
    job = write_job(folder, list(converters))
    return train_job(job, "model.name=deepseek_v32", "training.seq_len=32", "optimizer.lr=3e-3", *overrides)


def test_a_job_logs_the_loss_of_the_indexers(tmp_path):
    run = _run(tmp_path)
    records = run["records"]
    assert len(records) == 10 and records[-1]["loss"] < records[0]["loss"]
    indexer = [record["indexer_loss"] for record in records]
    assert all(0 < value < 1 for value in indexer), indexer
    assert "indexer loss" in Path(run["report_file"]).read_text()
    parts = _run(tmp_path / "parts", "training.steps=1", "training.local_batch_size=1", "training.global_batch_size=2")
    assert parts["records"][0]["indexer_loss"] == pytest.approx(indexer[0], rel=1e-5)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run["hf_folder"])
    assert type(theirs).__name__ == "DeepseekV32ForCausalLM" and theirs.config.index_topk == 12


def test_stages_and_weight_of_the_loss_are_keys_of_a_job(tmp_path):
    warm = [_run(tmp_path / str(n), "model.indexer_stage=warmup", f"training.steps={n}") for n in (1, 3)]
    assert warm[1]["records"][2]["indexer_loss"] < warm[1]["records"][0]["indexer_loss"]
    once, again = (load_file(Path(run["hf_folder"]) / "model.safetensors") for run in warm)
    moved = {name for name, tensor in again.items() if not torch.equal(tensor, once[name])}
    assert moved == {name for name in once if ".indexer." in name}
    off = _run(tmp_path / "off", "model.indexer_loss_coeff=0", "training.steps=2")
    assert all("indexer_loss" not in record for record in off["records"])
    with pytest.raises(JobError, match="model.indexer_stage = 'warmup': qwen3 tiny has no indexers"):
        train_job(write_job(tmp_path), "model.indexer_stage=warmup")


def test_resumed_run_gives_the_same_losses(tmp_path):
    check_resumes(_run, tmp_path, 4, "indexer_loss")

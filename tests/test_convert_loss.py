"""npu_loss on models of transformers: same loss and gradients, lazy logits, what is left alone and why."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jumar
from jumar import models
from jumar.hf.logits import LazyLogits

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tiny(family, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def batch(model, seed=0):
    inputs = models.example_inputs(model, seed=seed)
    inputs["labels"][0, :4] = -100
    return inputs


def pair(name="qwen3", converters=("npu_loss",), **options):
    model = models.build(name, **options).train()
    eager = copy.deepcopy(model)
    report = jumar.convert(model, list(converters), strict=True)
    return model, eager, report


def grads(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check(model, eager, inputs, rtol=1e-5, calls=1, **more):
    """Loss, gradients and logits of both; the operator ran."""
    jumar.reset_call_counts()
    got, want = model(**inputs, **more), eager(**inputs, **more)
    got.loss.backward()
    want.loss.backward()
    counts = jumar.call_counts()
    assert (
        counts.get("linear_cross_entropy", 0)
        == counts.get("linear_cross_entropy_backward", 0)
        == calls
    )
    torch.testing.assert_close(got.loss, want.loss, rtol=rtol, atol=1e-6)
    ours, theirs = grads(model), grads(eager)
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(
            grad, theirs[name], rtol=1e-3, atol=rtol * float(theirs[name].abs().max() + 1e-2)
        )
    torch.testing.assert_close(got.logits + 0, want.logits, rtol=1e-5, atol=1e-5)
    return got


@pytest.mark.parametrize("name", list(models.BUILT_IN))
def test_built_in_models(name):
    model, eager, report = pair(name)
    assert [(s.path, s.status, s.operator) for s in report.sites] == [
        ("", "replaced", "linear_cross_entropy")
    ]
    assert isinstance(check(model, eager, batch(model)).logits, LazyLogits)


@pytest.mark.parametrize(
    "family,more",
    [
        ("Qwen3Moe", {**MOE, "output_router_logits": True}),
        ("Qwen3Moe", MOE),
        ("Mistral", {}),
        ("Phi", {}),  # a head with a bias
        ("Qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_other_families(family, more):
    model = tiny(family, **more)
    eager = copy.deepcopy(model)
    assert jumar.convert(model, "npu_loss", strict=True, verify=True).replaced
    check(model, eager, batch(model))


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "Granite"])
def test_logits_that_are_capped_or_scaled_are_a_near_miss(family):
    model = tiny(family)
    eager = copy.deepcopy(model)
    report = jumar.convert(model, "npu_loss")
    assert [s.reason for s in report.skipped] == [
        "its loss does not get the output of its head as it is"
    ]
    check(model, eager, batch(model), calls=0)


def test_near_misses():
    class Quantised(nn.Linear):
        pass

    model = tiny("Qwen3")
    model.lm_head.__class__ = Quantised
    assert (
        jumar.convert(model, "npu_loss")
        .skipped[0]
        .reason.endswith("Quantised, not torch.nn.Linear")
    )
    model = tiny("Qwen3")
    model.loss_function = lambda logits, labels, **_: logits.mean()
    assert (
        jumar.convert(model, "npu_loss").skipped[0].reason
        == "its loss function was set by somebody else"
    )
    for other in (
        tiny("Qwen3").model,
        transformers.Qwen3ForSequenceClassification(tiny("Qwen3").config),
    ):
        assert jumar.convert(other, "npu_loss").sites == []


def test_a_model_that_scales_logits_after_conversion_is_not_fused():
    """What the recogniser cannot know: the loss sees that these are no longer the head's logits."""
    model, eager, _ = pair()
    for m in (model, eager):
        m.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)
    check(model, eager, batch(model), calls=0)


def test_changes_of_the_head_after_conversion():
    model, eager, _ = pair()
    for m in (model, eager):
        m.lm_head = nn.Sequential(m.lm_head, nn.Tanh())
    check(model, eager, batch(model), calls=0)
    model, eager, _ = pair()
    for m in (model, eager):
        m.lm_head.register_full_backward_hook(lambda module, gin, gout: None)
    check(model, eager, batch(model), calls=0)
    model, eager, _ = pair()
    for m in (model, eager):
        m.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    check(model, eager, batch(model), calls=0)


def test_arguments_of_transformers_loss():
    model, eager, _ = pair()
    inputs = batch(model)
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].clone()
    shifted[1, 2] = 7
    for more in (
        {"num_items_in_batch": 9},
        {"num_items_in_batch": torch.tensor(9)},
        {"ignore_index": 5},
        {"shift_labels": shifted},
        {"logits_to_keep": 0},
    ):
        labels = inputs["labels"].clone()
        if "ignore_index" in more:
            labels[labels == -100] = 5
        check(model, eager, {**inputs, "labels": labels}, **more)


def test_logits_to_keep_follows_eager():
    model, eager, _ = pair()
    inputs = batch(model)
    with pytest.raises((ValueError, RuntimeError)) as wanted:
        eager(**inputs, logits_to_keep=3)
    with pytest.raises((ValueError, RuntimeError)) as got:
        model(**inputs, logits_to_keep=3)
    assert str(got.value) == str(wanted.value)
    inputs["shift_labels"] = inputs["labels"][:, -3:].contiguous()
    check(model, eager, inputs, logits_to_keep=3)


def test_labels_out_of_range_and_all_ignored():
    model, _, _ = pair()
    inputs = batch(model)
    inputs["labels"][0, 5] = 96
    with pytest.raises(RuntimeError, match="linear_cross_entropy: target 96 at position"):
        model(**inputs)
    inputs["labels"][:] = -100
    loss = model(**inputs, num_items_in_batch=torch.tensor(4)).loss
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())


def test_without_labels_nothing_changes():
    model, eager, _ = pair()
    ids = batch(model)["input_ids"]
    jumar.reset_call_counts()
    out, want = model(input_ids=ids), eager(input_ids=ids)
    assert (
        out.loss is None
        and type(out.logits) is torch.Tensor
        and torch.equal(out.logits, want.logits)
    )
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.eval().generate(ids, **options), eager.eval().generate(ids, **options))
    assert jumar.call_counts() == {}


def test_every_form_of_the_output():
    model, eager, _ = pair()
    inputs = batch(model)
    want = eager(**inputs).logits.detach()
    forms = {
        "attribute": lambda: model(**inputs).logits,
        "item": lambda: model(**inputs)["logits"],
        "index": lambda: model(**inputs)[1],
        "tuple": lambda: model(**inputs, return_dict=False)[1],
        "positional": lambda: model(inputs["input_ids"], labels=inputs["labels"]).to_tuple()[1],
    }
    for name, form in forms.items():
        logits = form()
        assert logits.shape == want.shape and logits.dtype == want.dtype and logits.requires_grad, (
            name
        )
        assert logits.device == want.device and logits.ndim == 3 and len(logits) == len(want), name
        assert logits.pending and "not computed" in repr(logits), name
        torch.testing.assert_close(logits.detach(), want, rtol=1e-5, atol=1e-5)
        assert not logits.pending and "not computed" not in repr(logits), name
    assert (model(**inputs).logits.argmax(-1) == want.argmax(-1)).all()
    lazy = model(**inputs).logits.float()
    assert isinstance(lazy, LazyLogits) and lazy.pending and torch.equal(lazy.cpu(), lazy.value())


def test_gradients_through_logits():
    model, eager, _ = pair()
    for m in (model, eager):
        out = m(**batch(m))
        (out.loss + out.logits.square().mean()).backward()
    for name, grad in grads(model).items():
        other = dict(eager.named_parameters())[name].grad
        torch.testing.assert_close(grad, other, rtol=1e-3, atol=1e-5)


def test_logits_remember_their_circumstances():
    model, eager, _ = pair()
    inputs = batch(model)
    with torch.no_grad():
        out = model(**inputs)
    assert not out.logits.requires_grad and not (out.logits + 0).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        out, want = model(**inputs), eager(**inputs)
    assert (
        out.logits.dtype == want.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    )
    assert torch.equal(out.logits, want.logits)
    torch.testing.assert_close(out.loss, want.loss, rtol=2e-3, atol=0)


def test_logits_of_a_head_that_has_changed_are_an_error():
    model, _, _ = pair()
    out = model(**batch(model))
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(
        RuntimeError, match="npu_loss: the logits of this forward pass were not computed"
    ):
        out.logits.sum()
    assert out.logits.shape[-1] == 96


def test_logits_never_lose_their_gradient():
    """An autograd.Function sees tensors past Python's dispatch."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    model, _, _ = pair()
    logits = model(**batch(model)).logits
    with pytest.raises(RuntimeError, match=r"npu_loss: .*value\(\)"):
        Twice.apply(logits).sum().backward()
    assert Twice.apply(model(**batch(model)).logits.value()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_no_worse_than_eager(dtype):
    model, eager, _ = pair(dtype=dtype)
    exact = copy.deepcopy(eager).double()
    inputs = batch(model)
    losses = [m(**inputs).loss for m in (model, eager, exact)]
    for loss in losses:
        loss.backward()
    ours, theirs, right = (m.lm_head.weight.grad.double() for m in (model, eager, exact))
    assert (ours - right).norm() <= 1.05 * (theirs - right).norm()
    assert abs(losses[0] - losses[2]) <= 1.05 * abs(losses[1] - losses[2]) + 1e-3


def test_other_converters_on_the_head():
    for converters in (["npu_loss", "npu_linear"], ["npu_linear", "npu_loss"]):
        model, eager, _ = pair(converters=converters)
        check(model, eager, batch(model))
    report = jumar.kernelize(models.build("qwen3"))
    assert report.counts()["npu_loss"]["replaced"] == 1


def test_copies_pickles_state_and_undo(tmp_path):
    model, eager, report = pair()
    assert list(model.state_dict()) == list(eager.state_dict())
    assert "forward" not in model.__dict__ and "forward" not in model.lm_head.__dict__
    inputs = batch(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check(other, copy.deepcopy(eager), inputs)
        assert jumar.convert(other, "npu_loss").skipped[0].reason == "already converted"
    model.save_pretrained(tmp_path)
    loaded = type(eager).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**inputs).loss, model(**inputs).loss, rtol=1e-5, atol=0)
    buffer = io.BytesIO()
    torch.save(model(**inputs), buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=False).logits) is torch.Tensor
    report.undo()
    assert type(model) is type(eager)
    check(model, eager, inputs, calls=0)


def test_errors_inside_leave_the_head_as_it_was():
    model, _, _ = pair()
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 3), 999999999), labels=torch.zeros(1, 3, dtype=torch.long))
    assert "forward" not in model.lm_head.__dict__


def test_compiled_model():
    model, eager, _ = pair()
    inputs = batch(model)
    compiled = torch.compile(model, backend="eager")
    jumar.reset_call_counts()
    out = compiled(**inputs)
    out.loss.backward()
    assert jumar.call_counts() == {"linear_cross_entropy": 1, "linear_cross_entropy_backward": 1}
    want = eager(**inputs)
    want.loss.backward()
    torch.testing.assert_close(out.loss, want.loss)
    torch.testing.assert_close(out.logits + 0, want.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        model.lm_head.weight.grad, eager.lm_head.weight.grad, rtol=1e-4, atol=1e-6
    )
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(whole(input_ids=inputs["input_ids"]).logits, want.logits, atol=1e-5)


def test_adapters():
    peft = pytest.importorskip("peft")
    options = {"r": 2, "lora_alpha": 4, "init_lora_weights": False}
    for targets, calls in (("all-linear", 1), (["lm_head", "q_proj"], 0)):
        for before in (True, False):
            model = models.build("qwen3").train()
            eager = copy.deepcopy(model)
            torch.manual_seed(1)
            wrapped = peft.get_peft_model(eager, peft.LoraConfig(target_modules=targets, **options))
            if before:
                jumar.convert(model, "npu_loss")
            torch.manual_seed(1)
            adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **options))
            if not before:
                report = jumar.convert(adapted, "npu_loss")
                assert len(report.replaced) == calls
                assert calls or "not torch.nn.Linear" in report.skipped[0].reason
            check(adapted, wrapped, batch(eager), calls=calls)


def test_trainer_trains_and_evaluates(tmp_path):
    """Loss of every step and metrics from logits, by transformers' Trainer with unequal accumulation."""

    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            ids = torch.randint(3, 90, (12,), generator=torch.Generator().manual_seed(index))
            labels = ids.clone()
            labels[: index % 5] = -100
            return {"input_ids": ids, "labels": labels}

    def metrics(prediction):
        return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    results = []
    for converters in ([], ["npu_loss"]):
        model = models.build("qwen3").train()
        jumar.convert(model, converters)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(len(results))),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            seed=1,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Texts(),
            eval_dataset=Texts(),
            compute_metrics=metrics,
        )
        jumar.reset_call_counts()
        trainer.train()
        assert jumar.call_counts().get("linear_cross_entropy", 0) == (5 if converters else 0)
        logs = trainer.state.log_history
        results.append(
            [
                v
                for log in logs
                for k, v in log.items()
                if k in ("loss", "eval_loss", "eval_right", "grad_norm")
            ]
        )
    assert len(results[0]) == 6
    torch.testing.assert_close(
        torch.tensor(results[0]), torch.tensor(results[1]), rtol=1e-4, atol=1e-5
    )

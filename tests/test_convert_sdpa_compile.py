"""``npu_sdpa`` under ``torch.compile``: masks keep their compressed form, graphs do not break, results are those of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import jumar
from graph_util import Graphs
from jumar import models
from op_util import assert_ulp

transformers = pytest.importorskip("transformers")
from transformers import masking_utils as known

from jumar.hf import attention, masks, traced_masks
from sdpa_util import NAME, qwen3, run, same

LENGTH = 37
FIFTH = hasattr(known, "remap_positions_for_packed_sequence")
pytestmark = pytest.mark.skipif(not FIFTH, reason="transformers 5")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(batch=2, length=LENGTH):
    return torch.randint(1, 60, (batch, length), generator=torch.Generator().manual_seed(1))


def documents(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None]


PACKED = torch.cat([documents(9, 1, 27), documents(LENGTH)])
PADDED = torch.ones(2, LENGTH, dtype=torch.long)
PADDED[1, :5] = 0
#: Padding that is no range, which the operator takes as it is.
HOLES = PADDED.clone()
HOLES[0, 11:13] = 0
CASES = {
    "causal": {},
    "documents": {"position_ids": PACKED},
    "padding": {"attention_mask": PADDED},
    "padding with holes": {"attention_mask": HOLES},
}
SLIDING = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
SLIDING["layer_types"] = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_matrix_is_made(case, window):
    """In one graph; not of any size, and not the [2048, 2048] of the sparse modes."""
    model, inputs = qwen3(**(SLIDING if window else {})), {"input_ids": tokens(), **CASES[case]}
    eager = run(model, **inputs)
    jumar.convert(model, NAME)
    want, graphs = run(model, **inputs), Graphs()
    jumar.reset_call_counts()
    got = run(torch.compile(model, backend=graphs.backend, fullgraph=True), **inputs)
    same(got, want)
    same(got, eager)
    assert graphs.number == 2 and graphs.matrices(LENGTH) == set()
    name = "npu_fusion_attention" + ("_v3" if "padding" not in case else "")
    assert jumar.call_counts()[name] == 2


@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_those_of_transformers(padded):
    """What is known of a composed function while tracing is what transformers makes of it; the rest is a matrix."""
    ids = (PACKED == 0).cumsum(1)
    window = known.sliding_window_causal_mask_function
    functions = {
        "causal": lambda: known.causal_mask_function,
        "full": lambda: known.bidirectional_mask_function,
        "window": lambda: window(3),
        "both sides": lambda: known.sliding_window_bidirectional_mask_function(2),
        "two windows": lambda: known.and_masks(window(3), window(5)),
        "packed": lambda: known.packed_sequence_mask_function(ids),
        "packed window": lambda: known.and_masks(
            known.remap_positions_for_packed_sequence(window(3), PACKED), known.packed_sequence_mask_function(ids)
        ),
        "not packed": lambda: known.remap_positions_for_packed_sequence(window(3), PACKED),
        "or": lambda: known.or_masks(window(3), known.packed_sequence_mask_function(ids)),
        "or, packed": lambda: known.and_masks(
            known.or_masks(window(3), known.bidirectional_mask_function), known.packed_sequence_mask_function(ids)
        ),
        "chunks": lambda: known.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    }
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, 8, generator=gen) for _ in range(3))
    options = dict(batch_size=2, kv_length=LENGTH, q_length=LENGTH, allow_is_causal_skip=False)
    if padded:
        options["attention_mask"] = PADDED.bool()
    for name, function in functions.items():

        def attend(q, k, v, function=function):
            mask = masks.attention_mask(mask_function=function(), **options)
            out = attention.attention_forward(torch.nn.Module(), q, k, v, mask)[0]
            return out, torch.tensor(isinstance(mask, traced_masks.TracedMask))

        torch._dynamo.reset()
        got, traced = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v)
        matrix = known.sdpa_mask(mask_function=function(), **options)
        want = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), attn_mask=matrix)
        want = want.nan_to_num().masked_fill(~matrix.any(-1, keepdim=True), 0)
        assert_ulp(got.transpose(1, 2), want, 4.0, floor=1e-6, what=name)
        no = ("not packed", "or", "or, packed", "chunks", *(("packed", "packed window") if padded else ()))
        assert bool(traced) == (name not in no), name


def test_ends_of_documents():
    ids = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 2]])
    assert traced_masks.ends_of(ids).tolist() == [2, 5, 9, 10, 10, 10, 10, 10, 10, 10]


def test_lengths_of_a_collator_cut_what_positions_do_not():
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate([{"input_ids": tokens(1, n)[0].tolist()} for n in (4, 1, 6)]))
    batch.pop("labels")
    model = qwen3()
    jumar.convert(model, NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    same(run(compiled, **batch), run(model, **batch))
    batch["position_ids"] = torch.arange(11)[None]
    same(run(compiled, **batch), run(model, **batch))


STARTS = {name: torch.tensor([0, 7, 21, 52, 2 * LENGTH]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}


@pytest.mark.parametrize("outside", [False, True], ids=["mask made in the graph", "mask made outside"])
@pytest.mark.parametrize("case", ["causal", "window", "documents", "padding", "padding with holes"])
def test_lengths_beside_a_mask(case, outside):
    """They cut what it lets through in compiled code, too, and raise where they are not those of all tokens."""
    options = dict(batch_size=2, kv_length=LENGTH, q_length=LENGTH, allow_is_causal_skip=False)
    if "padding" in case:
        options["attention_mask"] = CASES[case]["attention_mask"].bool()
    of = (PACKED == 0).cumsum(1)

    def make():
        function = known.causal_mask_function
        if case == "window":
            function = known.sliding_window_causal_mask_function(3)
        elif case == "documents":
            function = known.and_masks(function, known.packed_sequence_mask_function(of))
        return masks.attention_mask(mask_function=function, **options)

    def attend(q, k, v, starts, mask=None):
        mask = make() if mask is None else mask
        return attention.attention_forward(torch.nn.Module(), q, k, v, mask, **starts)[0]

    gen = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, LENGTH, 8, generator=gen) for _ in range(3)]
    given = (make(),) if outside else ()
    want = attend(*tensors, STARTS)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    same([compiled(*tensors, STARTS, *given)], [want])
    assert not torch.equal(want, attend(*tensors, {}))
    for wrong in (STARTS["cu_seq_lens_q"] - 1, STARTS["cu_seq_lens_q"][:-1]):
        with pytest.raises(RuntimeError, match="npu_sdpa: cu_seq_lens_q must rise from 0 to the 2 x 37 tokens"):
            compiled(*tensors, dict.fromkeys(STARTS, wrong), *given)


@pytest.mark.parametrize(
    ("family", "names"),
    [("qwen3", None), ("qwen3", ["npu_rope", "npu_sdpa", "npu_rms_norm"]), ("qwen3_moe", None), ("deepseek_v3", NAME)],
)
def test_converters_together(family, names):
    model = models.build(family)
    report = jumar.kernelize(model) if names is None else jumar.convert(model, names)
    assert report.counts()["npu_sdpa"]["replaced"] > 0
    inputs = models.example_inputs(model, length=23)
    inputs.pop("labels", None)
    graphs = Graphs()
    got = run(torch.compile(model, backend=graphs.backend), **inputs)
    same(got, run(model, **inputs))
    assert not graphs.matrices(inputs["input_ids"].shape[1])


def test_inductor():
    model, inputs = qwen3(num_hidden_layers=1), {"input_ids": tokens(), "position_ids": PACKED}
    jumar.convert(model, NAME)
    same(run(torch.compile(model, fullgraph=True), **inputs), run(model, **inputs))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model, inputs = qwen3().train(), {"input_ids": tokens(), "position_ids": PACKED}
    jumar.convert(model, NAME)
    want, graphs = run(model, **inputs), Graphs()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    same(run(torch.compile(model, backend=graphs.backend), **inputs), want)
    assert not graphs.matrices(LENGTH)


def test_dropout_draws_in_the_graph():
    model = qwen3(attention_dropout=0.5).train()
    jumar.convert(model, NAME)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for more in ({}, {"attention_mask": PADDED}):
        torch.manual_seed(0)
        first = run(compiled, input_ids=tokens(), **more)
        torch.manual_seed(0)
        assert all(map(torch.equal, first, run(compiled, input_ids=tokens(), **more)))
        assert not torch.equal(first[0], run(compiled, input_ids=tokens(), **more)[0])


def test_layers_compiled_one_by_one():
    """The mask is made outside: its lengths are inputs of the layers' graphs, which are not compiled anew for others."""
    model, whole = qwen3(), qwen3()
    for other in (model, whole):
        jumar.convert(other, NAME)
    graphs = Graphs()
    for layer in model.model.layers:
        layer.compile(backend=graphs.backend, fullgraph=True)
    numbers = []
    for lengths in ((9, 28), (5, 20, 12), (30, 3, 2, 2), (1, 36)):
        inputs = {"input_ids": tokens(), "position_ids": documents(*lengths)}
        same(run(model, **inputs), run(whole, **inputs))
        numbers.append(graphs.number)
    assert numbers[1:] == [numbers[1]] * 3
    for left in ((0, 5), (3, 4), (2, 2)):
        padding = (torch.arange(LENGTH) >= torch.tensor(left)[:, None]).long()
        inputs = {"input_ids": tokens(), "attention_mask": padding}
        same(run(model, **inputs), run(whole, **inputs))
    assert graphs.number == numbers[1] + 2
    holes = {"input_ids": tokens(), "attention_mask": HOLES}
    same(run(model, **holes), run(whole, **holes))


def test_other_lengths_are_compiled_once_more():
    model, graphs = qwen3(), Graphs()
    jumar.convert(model, NAME)
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    for length in (37, 41, 50):
        same(run(compiled, input_ids=tokens(2, length)), run(model, input_ids=tokens(2, length)))
    assert graphs.number == 4


def test_who_looks_at_the_mask_sees_a_matrix():
    def look(module, args, kwargs):
        mask = kwargs["attention_mask"]
        seen = mask[:, :, :LENGTH]
        assert mask.shape == seen.shape == (2, 1, LENGTH, LENGTH) and mask.dtype == torch.bool
        kwargs["attention_mask"] = torch.where(mask, seen, False) & mask
        return args, kwargs

    model, inputs = qwen3(), {"input_ids": tokens(), "position_ids": PACKED}
    jumar.convert(model, NAME)
    want = run(model, **inputs)
    model.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
    same(run(torch.compile(model, backend="aot_eager", fullgraph=True), **inputs), want)


def test_graph_breaks():
    model, inputs = qwen3(), {"input_ids": tokens(), "position_ids": PACKED}
    jumar.convert(model, NAME)
    want = run(model, **inputs)
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    graphs = Graphs()
    same(run(torch.compile(model, backend=graphs.backend), **inputs), want)
    assert graphs.number > 2 and not graphs.matrices(LENGTH)


def test_static_cache():
    model = qwen3().eval()
    jumar.convert(model, NAME)
    settings = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, cache_implementation="static")
    want = model.generate(tokens(), **settings, disable_compile=True)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(model.generate(tokens(), **settings, disable_compile=True), want)


def test_a_model_that_is_not_converted_compiles_to_the_same_masks():
    """Dynamo sees jumar's form of transformers' functions in every model."""
    model, inputs = qwen3(**SLIDING), {"input_ids": tokens(), "position_ids": PACKED}
    traced_masks.register()
    same(run(torch.compile(model, backend="aot_eager", fullgraph=True), **inputs), run(model, **inputs))

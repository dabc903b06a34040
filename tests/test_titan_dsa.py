"""npu_dsa in torchtitan: DeepSeek-V3.2's sparse attention on the operators beside its eager form."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchtitan")

import jumar
from jumar import dsa, titan
from jumar.convert import ConverterError
from jumar.titan.deepseek_v32 import SparseAttention, eager
from jumar.titan.deepseek_v32.model import create_varlen_metadata_for_document
from jumar.titan.dsa import FusedSparseAttention
from jumar.titan.models import model_spec
from jumar.train import JobError, mapping
from jumar.train.job import load
from jumar.verify.models import FACTOR, FLOOR
from train_util import check_resumes, quickly, torchrun, train_job, write_job

NAMES = ["npu_dsa", "npu_rms_norm", "npu_permute", "npu_gmm"]
BATCH, LENGTH, HEADS, NOPE, ROPE, RANK, VALUE = 2, 41, 4, 12, 8, 20, 10
INDEX_HEADS, INDEX_DIM, TOPK = 5, 16, 7

_quick = pytest.fixture(autouse=True, scope="module")(quickly)


def _inputs(dtype, seed=0):
    """What the core is called with: leaves in fp64 that ``dtype`` can hold."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    rows = (BATCH, LENGTH)
    return {
        "q_nope": leaf(*rows, HEADS, NOPE),
        "q_pe": leaf(*rows, HEADS, ROPE),
        "latent": leaf(*rows, RANK),
        "k_pe": leaf(*rows, 1, ROPE),
        "weight": leaf(HEADS * (NOPE + VALUE), RANK),
        "q": leaf(*rows, INDEX_HEADS, INDEX_DIM),
        "k": leaf(*rows, 1, INDEX_DIM),
        "w": leaf(*rows, INDEX_HEADS) / 8,
    }


DOCUMENTS = {
    "one document a row": None,
    "packed": [13, 1, 27],
    "many short ones": [1, 2, 3, 5, 7, 11, 12],
}


def _documents(lengths):
    if lengths is None:
        return None
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(BATCH, -1)
    return create_varlen_metadata_for_document(positions, include_host_offsets=True)


def _run(kind, inputs, dtype, documents=None, stage="sparse"):
    """(results by name, mean loss of the indexer) of one forward and backward pass of a core."""
    core = kind(SparseAttention.Config(topk=TOPK, stage=stage))
    leaves = {n: t.to(dtype).clone().requires_grad_() for n, t in inputs.items()}
    if dtype == torch.bfloat16:
        leaves["w"] = inputs["w"].float().requires_grad_()
    projection = torch.nn.Linear(RANK, 1, bias=False)
    del projection.weight
    projection.weight = leaves["weight"]
    out = core(
        (leaves["q_nope"], leaves["q_pe"]),
        leaves["latent"],
        leaves["k_pe"],
        projection,
        (leaves["q"], leaves["k"], leaves["w"]),
        documents,
        0.3,
    )
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype))
    results = {"out": out.detach()} | {f"d{n}": t.grad for n, t in leaves.items()}
    return results, core.meter.take() / (BATCH * LENGTH)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_core_beside_eager(dtype, documents, stage):
    """Outputs and every gradient are as near to fp64 as eager's; FACTOR and FLOOR are those of whole models."""
    inputs, cut = _inputs(dtype), _documents(DOCUMENTS[documents])
    exact, loss = _run(SparseAttention, inputs, torch.float64, cut, stage)
    jumar.reset_call_counts()
    fused, fused_loss = _run(FusedSparseAttention, inputs, dtype, cut, stage)
    calls = jumar.call_counts()
    plain, _ = _run(SparseAttention, inputs, dtype, cut, stage)
    assert calls["npu_sparse_flash_attention" if stage == "sparse" else "npu_fusion_attention"] == 1
    # fp64 is its own oracle, but for the order of sums.
    unit = torch.finfo(dtype).eps * (16 if dtype == torch.float64 else 1)
    for name, expected in exact.items():
        assert fused[name].dtype == plain[name].dtype and fused[name].shape == expected.shape
        largest = expected.abs().max()
        ours, theirs = ((t[name].double() - expected).abs().max() / largest for t in (fused, plain))
        assert ours <= FACTOR * theirs + FLOOR * unit, (name, ours.item(), theirs.item())
    # The teacher's queries are rounded to 16 bits.
    tolerance = {torch.float64: 1e-8, torch.float32: 2e-5, torch.bfloat16: 1e-3}[dtype]
    torch.testing.assert_close(fused_loss.double(), loss.double(), rtol=tolerance, atol=1e-7)


def test_the_same_keys_are_chosen(monkeypatch):
    inputs = {n: t.float() for n, t in _inputs(torch.float32).items()}
    seen = []
    operator = dsa.ops.npu_lightning_indexer
    monkeypatch.setattr(dsa.ops, "npu_lightning_indexer", lambda *a, **k: seen.append(operator(*a, **k)) or seen[-1])
    _run(FusedSparseAttention, inputs, torch.float32)
    indices = seen[0][0][:, :, 0].long()
    scores = eager.scores(inputs["q"], inputs["k"], inputs["w"])
    expected = eager.choose(scores, eager.visible(BATCH, LENGTH, None, scores.device), TOPK)
    found = torch.zeros(BATCH, LENGTH, LENGTH + 1, dtype=torch.bool)
    found.scatter_(-1, indices.where(indices >= 0, LENGTH), True)
    assert torch.equal(found[..., :-1], expected)


def test_adapters_on_the_projection_count():
    """A layer that is more than its weight is asked for what it does to unit vectors."""

    class Adapted(torch.nn.Linear):
        def __init__(self):
            super().__init__(RANK, 6, bias=False)
            self.more = torch.nn.Linear(RANK, 6, bias=False)

        def forward(self, x):
            return super().forward(x) + self.more(x)

    layer, like = Adapted(), torch.zeros(1)
    torch.testing.assert_close(dsa.weight_of(layer, RANK, like), layer.weight + layer.more.weight)
    plain = torch.nn.Linear(RANK, 6, bias=False)
    assert dsa.weight_of(plain, RANK, like) is plain.weight


def test_only_models_with_an_indexer_match():
    report = titan.plan(model_spec("deepseek_v32", "tiny"), NAMES)
    sites = [site for site in report.sites if site.converter == "npu_dsa"]
    assert [s.path for s in sites] == [f"layers.{n}.attention.inner_attention" for n in range(3)]
    assert all(site.status == "replaced" for site in sites)
    with pytest.raises(ConverterError, match="matched nothing in this model: npu_dsa"):
        titan.plan(model_spec("deepseek_v3", "tiny"), NAMES)
    assert not titan.plan(model_spec("deepseek_v32", "tiny"), ["npu_sdpa?"]).replaced


def test_job_file():
    """The job that comes with the package: its lines go together, and replace every site."""
    job = load(str(Path(__file__).parents[1] / "configs" / "deepseek_v32_debug.toml"), [])
    assert (job["model"]["name"], job["model"]["flavor"]) == ("deepseek_v32", "debugmodel")
    assert job["model"]["converters"] == NAMES
    report = titan.plan(mapping.model_spec(job), NAMES)
    assert not report.unmatched and not report.skipped


def _job(folder, *overrides, converters=NAMES):
    job = write_job(folder, converters)
    options = ["model.name=deepseek_v32", "training.seq_len=48", "optimizer.lr=3e-3"]
    return train_job(job, *options, *overrides)


def test_a_meter_that_nobody_reads_does_not_grow():
    meter = dsa.Meter()
    for i in range(5000):
        meter.add(torch.tensor([float(i % 2)]))
    assert len(meter.losses) <= 2 * meter.KEPT + 1
    assert meter.take() == 2500 and meter.take() == 0
    for i in range(5000):
        meter.add(torch.tensor([float(i)]))
    assert meter.take(3) == 4997 + 4998 + 4999


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_ten_steps_beside_eager(tmp_path, stage):
    """fp32; torchtitan's own experts round to bf16, so those are fused in both."""
    fused = _job(tmp_path / "fused", f"model.indexer_stage={stage}")
    eager_run = _job(tmp_path / "eager", f"model.indexer_stage={stage}", converters=NAMES[2:])
    # Adam divides the indexers' small gradients by themselves.
    for key, bound, later in (("loss", 1e-5, 1e-4), ("indexer_loss", 1e-4, 1e-2)):
        ours, theirs = ([r[key] for r in run["records"]] for run in (fused, eager_run))
        assert len(ours) == 10 and ours == pytest.approx(theirs, rel=later), key
        assert ours[:3] == pytest.approx(theirs[:3], rel=bound), key
    row = next(row for row in fused["operators"] if row["converter"] == "npu_dsa")
    assert row["planned"] == row["replaced"] == row["modules"] == 3
    assert row["calls"] >= 30 and row["backward_calls"] >= (30 if stage == "sparse" else 0)
    kind = "sparse" if stage == "sparse" else "dense"
    assert fused["calls"][f"npu_{kind}_lightning_indexer_grad_kl_loss"] == 30


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_does_not_compute_the_loss_again(tmp_path, mode):
    plain, again = (
        _job(tmp_path / m, "training.steps=3", f"activation_checkpoint.mode={m}") for m in ("none", mode)
    )
    for key in ("loss", "indexer_loss"):
        assert [r[key] for r in plain["records"]] == [r[key] for r in again["records"]]
    for run in (plain, again):
        assert run["calls"]["npu_sparse_lightning_indexer_grad_kl_loss"] == 9
    # Selective checkpointing keeps what the attention gave.
    once = 9 if mode == "selective" else 18
    assert again["calls"]["npu_lightning_indexer"] == again["calls"]["npu_sparse_flash_attention"] == once
    # The products of heads are two an attention, and no calls of the experts'.
    assert again["calls"]["head_matmul"] == 2 * once
    experts = next(row for row in again["operators"] if row["converter"] == "npu_gmm")
    assert experts["calls"] == again["calls"]["moe_ffn"] and experts["backward_calls"] == again["calls"]["moe_ffn_backward"]


def test_resumed_run_gives_the_same_bits(tmp_path):
    check_resumes(_job, tmp_path, 4, "indexer_loss", "grad_norm")


def test_the_sparse_stage_starts_from_the_warmed_up_model(tmp_path):
    warm = _job(tmp_path / "warm", "model.indexer_stage=warmup", "training.steps=3", "checkpoint.enable=true")
    start = [f"checkpoint.initial_load_path={warm['hf_folder']}", "checkpoint.initial_load_in_hf=true"]
    started = _job(tmp_path / "started", "training.steps=1", "checkpoint.enable=true", *start)
    fresh = _job(tmp_path / "fresh", "training.steps=1")
    # The same model but for its indexers, which know more.
    assert started["losses"][0] == pytest.approx(fresh["losses"][0], rel=1e-3)
    assert started["records"][0]["indexer_loss"] < 0.8 * fresh["records"][0]["indexer_loss"]


def test_low_rank_adapters_reach_the_fused_attention(tmp_path):
    options = ["lora.enable=true", "lora.target_modules=wkv_b,wq_b", "training.steps=4"]
    fused, plain = (_job(tmp_path / str(len(n)), *options, converters=n) for n in (NAMES, NAMES[2:]))
    assert fused["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert fused["losses"][-1] != fused["losses"][0]
    # Frozen indexers have no loss; wq_b is the name of a layer of theirs, too.
    bare = _job(tmp_path / "bare", "lora.enable=true", "lora.target_modules=wkv_b,wo", "training.steps=1")
    assert "indexer_loss" in fused["records"][0] and "indexer_loss" not in bare["records"][0]
    with pytest.raises(JobError, match="model.indexer_stage: lora.target_modules names no layer of the indexers"):
        _job(tmp_path / "no", "lora.enable=true", "lora.target_modules=wkv_b,wo", "model.indexer_stage=warmup")


def test_a_warm_up_with_adapters_trains_those_of_the_indexers_alone(tmp_path):
    job = load(str(write_job(tmp_path, NAMES)), ["model.name=deepseek_v32", "lora.enable=true", "model.indexer_stage=warmup"])
    with torch.device("meta"):
        model = mapping.model_spec(job).model.build()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 3 * 3 * 2 and all(".indexer." in n and ".lora_" in n for n in trained)


def test_a_warm_up_is_not_resumed_as_sparse_training(tmp_path):
    saved = ["checkpoint.enable=true", "training.steps=1"]
    _job(tmp_path, "model.indexer_stage=warmup", *saved)
    with pytest.raises(JobError, match=r"was written with model = deepseek_v32 tiny \(warm-up of its indexers\), the job has"):
        _job(tmp_path, *saved)
    with pytest.raises(JobError, match="trains the indexers alone, and model.indexer_loss_coeff is 0"):
        _job(tmp_path, "model.indexer_stage=warmup", "model.indexer_loss_coeff=0")


LAYOUTS = {
    "sharded": ["training.local_batch_size=2"],
    "in parts": ["training.local_batch_size=1", "training.global_batch_size=4"],
    "expert": ["training.local_batch_size=2", "parallelism.expert_parallel_degree=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_two_processes(tmp_path, stage):
    """One loss of the indexers and one gradient in every layout, and a resumed run goes on to the same."""
    if not os.environ.get("JUMAR_LONG_TESTS"):
        pytest.skip("long; set JUMAR_LONG_TESTS=1")
    job = write_job(tmp_path, NAMES)
    common = ["model.name=deepseek_v32", "training.seq_len=48", "lr_scheduler.total_steps=10", "checkpoint.enable=true"]
    torchrun(job, *common, "checkpoint.create_seed_checkpoint=true", f"job.dump_folder={tmp_path / 'seed'}", processes=1)
    common += [f"checkpoint.initial_load_path={tmp_path / 'seed/checkpoint/step-0'}", f"model.indexer_stage={stage}"]

    def run(name: str, layout: str, steps: int) -> list[list[float]]:
        options = [*common, *LAYOUTS[layout], f"training.steps={steps}", f"job.dump_folder={tmp_path / name}"]
        records = torchrun(job, *options)["records"]
        return [[r[key] for r in records] for key in ("loss", "indexer_loss", "grad_norm")]

    whole = run("whole", "sharded", 4)
    half = [run("half", "sharded", steps) for steps in (2, 4)]
    assert [a + b for a, b in zip(*half, strict=True)] == whole
    for layout in ("in parts", "expert"):
        for found, expected in zip(run(layout, layout, 4), whole, strict=True):
            assert found == pytest.approx(expected, rel=1e-4), layout

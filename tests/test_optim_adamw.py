"""jumar.optim.AdamW against torch.optim.AdamW: numbers, state, hooks, schedulers, layouts, errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import jumar
from jumar.optim import AdamW
from op_util import FLOAT_DTYPES, check_threads, max_ulp

SHAPES = [(3, 5), (), (17,), (2, 0), (40, 33)]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype))
        for s in SHAPES
    ]


def give_gradients(*lists, seed=0, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        grad = torch.randn(same[0].shape, generator=generator, dtype=torch.float64) * scale
        for p in same:
            p.grad = grad.to(same[0].dtype).to(p.dtype)


def assert_same(ours, theirs, rtol=2e-7, atol=1e-8):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)


def assert_same_state(ours, theirs, **tolerance):
    for a, b in zip(ours.state.values(), theirs.state.values(), strict=True):
        assert a["step"] == b["step"] and a["step"].dtype == b["step"].dtype
        for key in ("exp_avg", "exp_avg_sq"):
            assert a[key].dtype == b[key].dtype and a[key].stride() == b[key].stride()
            torch.testing.assert_close(a[key], b[key], **tolerance)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0, "betas": (0.0, 0.5), "eps": 1e-3},
        {"lr": torch.tensor(3e-2, dtype=torch.float64), "betas": (0.3, 0.999), "maximize": True},
        {"lr": 0.0},
    ],
    ids=["defaults", "no decay", "tensor, maximize", "lr 0"],
)
@pytest.mark.parametrize("step", [0, 5, 2**24 - 1])
def test_one_step_from_any_state(dtype, options, step):
    """Within 2 ulp of torch's own step in fp64 from the same values, and no further off than torch's in this dtype."""
    options = {"lr": 1e-2, "eps": 1e-4, **options}
    everyone = [parameters(dtype), parameters(dtype), [nn.Parameter(p.double()) for p in parameters(dtype)]]
    give_gradients(*everyone, seed=7)
    optimizers = [AdamW(everyone[0], **options)]
    optimizers += [torch.optim.AdamW(ps, foreach=False, **options) for ps in everyone[1:]]
    for k, (ours, theirs, exact) in enumerate(zip(*everyone, strict=True)):
        generator = torch.Generator().manual_seed(k)
        m, v = (torch.randn(ours.shape, generator=generator).to(dtype) for _ in range(2))
        for optimizer, p in zip(optimizers, (ours, theirs, exact), strict=True):
            optimizer.state[p] = {
                "step": torch.tensor(float(step)),
                "exp_avg": m.to(p.dtype) * 0.1,
                "exp_avg_sq": (v * v).to(p.dtype),
            }
            # The same start for all, whatever 0.1 rounds to.
            optimizer.state[p]["exp_avg"].copy_((m * 0.1).to(p.dtype))
    for optimizer in optimizers:
        optimizer.step()
    for ours, theirs, exact in zip(*everyone, strict=True):
        states = [o.state[p] for o, p in zip(optimizers, (ours, theirs, exact), strict=True)]
        for mine, other, right in [(ours, theirs, exact)] + [
            tuple(s[key] for s in states) for key in ("exp_avg", "exp_avg_sq")
        ]:
            mine, other, right = (t.detach() for t in (mine, other, right))
            # What fp64 itself loses where terms cancel.
            error = max_ulp(mine, right, floor=1e-14)
            assert error <= 2.0
            if dtype != torch.float64:
                assert error <= max(max_ulp(other, right, floor=1e-14), 0.52)
        assert {s["step"].item() for s in states} == {states[1]["step"].item()}


def test_many_steps_with_groups():
    def groups(ps):
        return [
            {"params": ps[:2], "lr": 1e-2, "weight_decay": 0.0},
            {"params": ps[2:4], "betas": (0.8, 0.9)},
            {"params": ps[4:], "maximize": True, "eps": 1e-3},
        ]

    a, b = parameters(), parameters()
    ours, theirs = AdamW(groups(a), lr=1e-3), torch.optim.AdamW(groups(b), lr=1e-3)
    assert ours.defaults == theirs.defaults
    jumar.reset_call_counts()
    for step in range(20):
        give_gradients(a, b, seed=step)
        if step % 3 == 0:
            a[2].grad = b[2].grad = None  # left out, its step is not counted
        ours.step()
        theirs.step()
    assert jumar.call_counts()["adamw_"] == 20
    assert_same(a, b, rtol=1e-5, atol=1e-6)
    assert_same_state(ours, theirs, rtol=1e-5, atol=1e-7)
    assert a[0]._version and ours.param_groups[0].keys() == theirs.param_groups[0].keys()
    AdamW(parameters()).step()  # no gradients at all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ours_first", [True, False])
def test_state_goes_both_ways(dtype, ours_first):
    """Three steps of one, its state into the other: not a bit is lost. In fp32, three more: as six steps of either.

    (In bf16 torch rounds after every operation; ours is held to fp64 by test_op_adam_w.py.)
    """
    kinds = (AdamW, torch.optim.AdamW) if ours_first else (torch.optim.AdamW, AdamW)
    ps, qs = parameters(dtype), parameters(dtype)
    first = kinds[0](ps, lr=1e-2)
    for step in range(3):
        give_gradients(ps, seed=step)
        first.step()
    second = kinds[1](qs, lr=5.0)
    for p, q in zip(ps, qs, strict=True):
        q.data.copy_(p.data)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert second.param_groups[0]["lr"] == 1e-2
    assert first.state_dict()["param_groups"] == second.state_dict()["param_groups"]
    assert_same_state(second, first, rtol=0, atol=0)
    for step in range(3, 6):
        give_gradients(ps, qs, seed=step)
        first.step()
        second.step()
    assert all(second.state[q]["step"] == 6 for q in qs)
    if dtype == torch.float32:
        assert_same(qs, ps, rtol=1e-5, atol=1e-6)
        assert_same_state(second, first, rtol=1e-5, atol=1e-6)


def test_distributed_checkpoint_functions():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    def make(kind):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        return model, kind(model.parameters(), lr=1e-2)

    def train(model, optimizer, steps):
        for step in steps:
            give_gradients(list(model.parameters()), seed=step)
            optimizer.step()

    for kinds in ((AdamW, torch.optim.AdamW), (torch.optim.AdamW, AdamW), (AdamW, AdamW)):
        model, optimizer = make(kinds[0])
        train(model, optimizer, range(3))
        state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        weights = copy.deepcopy(model.state_dict())
        train(model, optimizer, range(3, 5))
        other, resumed = make(kinds[1])
        other.load_state_dict(weights)
        set_optimizer_state_dict(other, resumed, state)
        assert_same(other.state_dict().values(), weights.values(), 0, 0)
        train(other, resumed, range(3, 5))
        assert_same(other.parameters(), model.parameters(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("grad_dtype", ["param", torch.float32])
def test_master_weights(dtype, grad_dtype):
    """The trajectory of fp32 parameters, rounded; saved and restored exactly."""
    ps, exact = parameters(dtype), [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    ours, theirs = AdamW(ps, lr=1e-4, master_weights=True), AdamW(exact, lr=1e-4)

    def step(optimizer, tensors, seed):
        generator = torch.Generator().manual_seed(seed)
        for p in tensors:
            grad = torch.randn(p.shape, generator=generator).to(dtype)
            p.grad = None
            if grad_dtype != "param":
                p.grad_dtype = torch.float32
            p.grad = grad.to(p.grad_dtype)
        optimizer.step()

    for seed in range(5):
        step(ours, ps, seed)
        step(theirs, exact, seed)
    for p, q in zip(ps, exact, strict=True):
        assert torch.equal(ours.state[p]["master_param"], q.detach())
        assert torch.equal(p.detach(), q.detach().to(dtype))
        assert ours.state[p]["exp_avg_sq"].dtype == torch.float32
    # Restored.
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    restored = AdamW(qs, master_weights=True)
    restored.load_state_dict(copy.deepcopy(ours.state_dict()))
    for p, q in zip(ps, qs, strict=True):
        for key in ("master_param", "exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(ours.state[p][key], restored.state[q][key])
            assert ours.state[p][key].dtype == restored.state[q][key].dtype
    for optimizer, tensors in ((ours, ps), (restored, qs)):
        step(optimizer, tensors, 9)
    assert_same(qs, ps, 0, 0)
    # Copied and pickled, the setting goes along.
    assert copy.deepcopy(ours).master_weights and pickle.loads(pickle.dumps(ours)).master_weights


def test_a_parameter_that_was_changed_wins_over_its_copy():
    p = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, master_weights=True)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        p[2:4] = 5.0
    optimizer.step()
    assert optimizer.state[p]["master_param"].tolist() == [1, 1, 5, 5, 1, 1] == p.tolist()


def test_master_weights_and_torchs_state():
    """torch's state makes a copy of the parameter; ours in torch, and back without masters, leaves none behind."""
    ps = parameters(torch.bfloat16)
    give_gradients(ps)
    theirs = torch.optim.AdamW(ps)
    theirs.step()
    ours = AdamW(ps, master_weights=True)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.state[ps[0]]["exp_avg"].dtype == torch.float32
    ours.step()
    assert torch.equal(ours.state[ps[0]]["master_param"].bfloat16(), ps[0].detach())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    theirs.step()
    plain = AdamW(ps)
    plain.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert "master_param" not in plain.state[ps[0]]
    assert plain.state[ps[0]]["exp_avg"].dtype == torch.bfloat16
    plain.step()


def test_schedulers_closures_and_hooks():
    a, b = parameters(), parameters()
    ours, theirs = AdamW(a, lr=1e-2), torch.optim.AdamW(b, lr=1e-2)
    seen = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8) for o in (ours, theirs)]
    for step in range(6):
        for ps, optimizer, schedule in ((a, ours, schedules[0]), (b, theirs, schedules[1])):

            def closure(ps=ps, step=step):
                assert torch.is_grad_enabled()
                for p in ps:
                    p.grad = None
                loss = sum((p - step).square().sum() for p in ps)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            schedule.step()
            assert loss.requires_grad
    assert seen == ["before", "after"] * 6
    assert_same(a, b, rtol=1e-5, atol=1e-6)


def test_grad_scaler():
    a, b = parameters(), parameters()
    optimizers = [AdamW(a, lr=1e-2, fused=True), torch.optim.AdamW(b, lr=1e-2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(4):
        give_gradients(a, b, seed=step, scale=6.4)
        if step == 2:
            a[0].grad[0, 0] = b[0].grad[0, 0] = float("inf")  # skipped
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
    assert_same(a, b, rtol=1e-5, atol=1e-6)
    assert_same_state(*optimizers, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_non_finite_gradients_go_as_torchs(dtype):
    """NaN and infinities where torch has them; the elements beside them as if there were none."""
    bad = {1: float("nan"), 2: float("inf"), 5: float("-inf")}

    def run(kind, values):
        p = nn.Parameter(torch.arange(8.0).to(dtype))
        optimizer = kind([p], lr=1e-2, eps=1e-3)
        for step in range(3):
            p.grad = torch.linspace(-1, 1, 8).to(dtype)
            if step == 1:
                for i, value in values.items():
                    p.grad[i] = value
            optimizer.step()
        return p.detach(), *(optimizer.state[p][k] for k in ("exp_avg", "exp_avg_sq"))

    beside = [i for i in range(8) if i not in bad]
    for ours, theirs, clean in zip(
        run(AdamW, bad), run(torch.optim.AdamW, bad), run(AdamW, {}), strict=True
    ):
        torch.testing.assert_close(ours[list(bad)], theirs[list(bad)], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(ours[beside], clean[beside])
        assert not torch.isfinite(ours[list(bad)]).all() and torch.isfinite(ours[beside]).all()


def test_layouts():
    """Transposed, sliced and interleaved parameters, complex ones, gradients of other dtypes, expanded gradients."""
    base, other = torch.randn(6, 8), None
    other = base.clone()

    def make(memory):
        return [
            nn.Parameter(memory[:, :4]),
            nn.Parameter(memory[:, 4:7]),
            nn.Parameter(torch.arange(12.0).view(3, 4).t()),
            nn.Parameter(torch.complex(torch.arange(5.0), -torch.arange(5.0))),
        ]

    a, b = make(base), make(other)
    ours, theirs = AdamW(a, lr=1e-2), torch.optim.AdamW(b, lr=1e-2)
    for step in range(3):
        give_gradients(a[:3], b[:3], seed=step)
        a[1].grad, b[1].grad = torch.tensor(0.5).expand(6, 3), torch.full((6, 3), 0.5)
        for p in (a[3], b[3]):
            p.grad = torch.complex(torch.ones(5), torch.arange(5.0) - step)
        ours.step()
        theirs.step()
    assert_same(a, b, rtol=1e-6, atol=1e-6)
    assert_same_state(ours, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(base[:, :7], other[:, :7])
    assert torch.equal(base[:, 7], other[:, 7])
    # A gradient of another dtype.
    p, q = nn.Parameter(torch.randn(9)), None
    q = nn.Parameter(p.detach().clone())
    p.grad_dtype = torch.bfloat16
    p.grad = torch.randn(9).bfloat16()
    q.grad = p.grad.float()
    AdamW([p]).step()
    AdamW([q]).step()
    assert torch.equal(p, q)


def test_what_is_refused():
    ps = parameters()
    for key in ("amsgrad", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=f"jumar.optim.AdamW: {key}=True is not supported"):
            AdamW(ps, **{key: True})
        with pytest.raises(ValueError, match=key):
            AdamW([{"params": ps, key: True}])
        optimizer = AdamW(ps)
        state = optimizer.state_dict()
        state["param_groups"][0][key] = True
        with pytest.raises(ValueError, match=key):
            AdamW(ps).load_state_dict(state)
        optimizer.param_groups[0][key] = True
        with pytest.raises(ValueError, match=key):
            optimizer.step()
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="[Ii]nvalid"):
            AdamW(ps, **bad)
    for hints in ({"foreach": True}, {"fused": True}, {"foreach": True, "lr": torch.tensor(1e-3)}):
        optimizer = AdamW(ps, **hints)
        assert all(optimizer.param_groups[0][k] is v for k, v in hints.items() if k != "lr")
        give_gradients(ps)
        optimizer.step()


def test_errors_leave_everything_as_it_was():
    ps = parameters()
    optimizer = AdamW([("first", ps[0]), ("last", ps[4])], lr=1.0)
    before = [p.detach().clone() for p in ps]

    def fails(match):
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        assert all(torch.equal(p.detach(), q) for p, q in zip(ps, before, strict=True))
        assert all(state["step"] == 0 for state in optimizer.state.values())

    give_gradients(ps)
    ps[4].grad = torch.eye(40, 33).to_sparse()
    fails("parameter last has a sparse gradient .*SparseAdam")
    give_gradients(ps)
    ps[4].grad.data = torch.randn(40, 32)
    fails(r"jumar.optim.AdamW: adamw_: grad\[1\] must have the shape \[40, 33\] .*\(parameter last\)")
    give_gradients(ps)
    optimizer.state[ps[4]]["exp_avg"] = optimizer.state[ps[0]]["exp_avg_sq"].new_zeros(()).expand(40, 33)
    fails("exp_avg.1. overlaps itself .*parameter last")
    same = torch.randn(4)
    with pytest.raises(RuntimeError, match="overlap in memory .*parameter 0 of group 0, parameter 1"):
        twice = [nn.Parameter(same), nn.Parameter(same)]
        give_gradients(twice)
        AdamW(twice).step()


def test_a_backward_after_the_step_notices():
    p = nn.Parameter(torch.randn(4))
    optimizer = AdamW([p])
    loss = (p * p).sum()
    p.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_same_bits_for_every_thread_count():
    def step():
        ps = [nn.Parameter(torch.linspace(-1, 1, size)) for size in (150001, 3, 70000)]
        give_gradients(ps)
        AdamW(ps).step()
        return ps

    check_threads(step)


def test_compiled_step_is_opaque():
    a, b = parameters(), parameters()
    ours, theirs = AdamW(a, lr=1e-2), AdamW(b, lr=1e-2)
    give_gradients(a, b)

    @torch.compile(backend="eager")
    def step():
        ours.step()

    step()
    theirs.step()
    assert_same(a, b, 0, 0)


def test_other_devices_take_torchs_step():
    p = nn.Parameter(torch.randn(4, device="meta"))
    p.grad = torch.empty(4, device="meta")
    optimizer = AdamW([p])
    jumar.reset_call_counts()
    optimizer.step()
    assert optimizer.state[p]["step"] == 1 and "adamw_" not in jumar.call_counts()
    half = nn.Parameter(torch.randn(4, device="meta", dtype=torch.bfloat16))
    half.grad = torch.empty_like(half)
    with pytest.raises(RuntimeError, match="master_weights needs parameters on the CPU"):
        AdamW([half], master_weights=True).step()


def test_import_jumar_is_enough():
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", "import jumar; jumar.optim.AdamW"], check=True)

"""Whole models: logits, loss and every gradient of eager and converted against the fp64 run of the plain model."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from jumar import ops
from jumar.opinfo import dtype_name

#: A tensor of the converted model may be this much further from fp64 than eager's, plus FLOOR ulps at its largest value:
#: both errors are maxima over roundings that fall differently.
FACTOR = 2.0
FLOOR = 4.0
#: The geometric mean over all tensors varies less: fused against eager lay between 0.7 and 1.15 for the built-in models.
MEAN_FACTOR = 1.3
MEAN = "(geometric mean)"
#: Draws of tokens that are judged together where the first one breaks the contract: every gradient carries the roundings
#: of one loss, so that one draw may set two runs of equal accuracy apart by a half.
DRAWS = 3


@dataclass
class ModelRow:
    """One tensor of a model run; errors in ulps of the dtype at the largest magnitude of the oracle's tensor."""

    dtype: str
    result: str
    eager: float
    fused: float
    index: tuple[int, ...] = ()
    got: float = math.nan
    expected: float = math.nan

    @property
    def ok(self) -> bool:
        mean = self.result == MEAN
        limit = MEAN_FACTOR * self.eager if mean else FACTOR * self.eager + FLOOR
        return math.isfinite(self.fused) and self.fused <= limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "index": list(self.index), "ok": self.ok}


class StayWide(TorchFunctionMode):
    """Keeps an fp64 run in fp64: models cast to fp32 by name inside norms, softmax and rotary tables."""

    _CASTS = (torch.Tensor.to, torch.Tensor.float, torch.Tensor.type)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float and not args[0].is_floating_point():
            return args[0].double()
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func in self._CASTS:
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, loss and gradients, by name."""
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    model.zero_grad(set_to_none=True)
    output = model(**inputs)
    output.loss.backward()
    results = {"logits": output.logits.detach(), "loss": output.loss.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[f"d {name}"] = parameter.grad
    return results


def _compare(
    dtype: torch.dtype, name: str, eager: Tensor, fused: Tensor, exact: Tensor
) -> ModelRow:
    # Every element is measured in ulps of the tensor's largest value: slack makes up the difference to its own ulp.
    scale = torch.full_like(exact, exact.abs().max().item() if exact.numel() else 0.0)
    unit = scale * torch.finfo(dtype).eps
    row = ModelRow(dtype_name(dtype), name, 0.0, 0.0)
    row.eager = ops.ulp_error(eager.to(dtype), exact, unit)[0].item()
    error, index = (value.item() for value in ops.ulp_error(fused.to(dtype), exact, unit))
    row.fused = error
    if index >= 0:
        row.index = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), exact.shape))
        row.got, row.expected = fused[row.index].item(), exact[row.index].item()
    return row


def _mean(rows: list[ModelRow]) -> ModelRow:
    """The geometric means of both errors over the tensors where neither is zero."""
    pairs = [(row.eager, row.fused) for row in rows if row.eager > 0 and row.fused > 0]
    if not pairs:
        return ModelRow(rows[0].dtype, MEAN, 0.0, max(row.fused for row in rows))
    eager, fused = (
        math.exp(math.fsum(map(math.log, side)) / len(pairs)) for side in zip(*pairs, strict=True)
    )
    return ModelRow(rows[0].dtype, MEAN, eager, fused)


def compare_runs(
    dtype: torch.dtype, eager: dict[str, Tensor], fused: dict[str, Tensor], exact: dict[str, Tensor]
) -> list[ModelRow]:
    """A row per tensor of the runs, and one for all. ConverterError where ``fused`` has other gradients than ``exact``."""
    from jumar.convert import ConverterError

    exact = {name: tensor.double() for name, tensor in exact.items()}
    missing = {name for name in exact.keys() ^ fused.keys() if name.startswith("d ")}
    if missing:
        raise ConverterError(f"gradients differ in kind: {', '.join(sorted(missing))}")
    names = [name for name in exact if name in fused]
    rows = [_compare(dtype, name, eager[name], fused[name], exact[name]) for name in names]
    return [*rows, _mean(rows)]


def judge(draw: Callable[[int], list[ModelRow]], seed: int) -> list[ModelRow]:
    """The rows of ``draw(seed)``, or, where one of them is not ok, those of DRAWS seeds from it on.

    Their errors are root mean squares over the draws: what is wrong by more than a root of DRAWS in one fails in all. Element
    and values are those of the largest error.
    """
    rows = draw(seed)
    if all(row.ok for row in rows):
        return rows
    draws = [rows, *(draw(seed + i) for i in range(1, DRAWS))]
    found: dict[str, list[ModelRow]] = {}
    for row in itertools.chain(*draws):
        if row.result != MEAN:
            found.setdefault(row.result, []).append(row)
    together = []
    for same in found.values():
        worst = max(same, key=lambda row: math.inf if math.isnan(row.fused) else row.fused)
        eager, fused = (
            math.sqrt(math.fsum(x * x for x in side) / len(same))
            for side in zip(*((row.eager, row.fused) for row in same), strict=True)
        )
        together.append(replace(worst, eager=eager, fused=fused))
    return [*together, _mean(together)]


def verify_model(
    model: nn.Module,
    converters: list[str] | None = None,
    *,
    inputs: dict[str, Tensor] | None = None,
    seed: int = 0,
) -> list[ModelRow]:
    """A row per tensor, and one for all, for ``model`` in its own dtype and in eval mode; the model is not changed.

    Random tokens are drawn again, and the draws judged together (:func:`judge`), where the first ones break the contract.

    Args:
        model: a model whose output has ``loss`` and ``logits``.
        converters: names; None for all that apply.
        inputs: keyword arguments of the model, labels among them; None for random tokens.
        seed: of these tokens.

    Raises:
        ConverterError: an unknown converter, or nothing was replaced.
    """
    if inputs is not None:
        return _verify(model, converters, inputs)
    from jumar.models import example_inputs

    return judge(lambda drawn: _verify(model, converters, example_inputs(model, seed=drawn)), seed)


def _verify(
    model: nn.Module, converters: list[str] | None, inputs: dict[str, Tensor]
) -> list[ModelRow]:
    import jumar
    from jumar.convert import ConverterError

    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        eager = _run(copy.deepcopy(model).eval(), inputs)
        wide = copy.deepcopy(model).double().eval()
        if hasattr(wide, "set_experts_implementation"):
            wide.set_experts_implementation("eager")  # the default has no fp64
        with StayWide():
            exact = _run(wide, inputs)
        converted = copy.deepcopy(model).eval()
        report = (
            jumar.kernelize(converted)
            if converters is None
            else jumar.convert(converted, converters)
        )
        if not report.replaced:
            raise ConverterError("nothing in the model was replaced: there is nothing to verify")
        fused = _run(converted, inputs)
    return compare_runs(dtype, eager, fused, exact)

"""AdamW in one multithreaded pass over all parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from jumar.ops.optimizer import adamw_
from jumar.optim.local import is_dtensor, is_plain, memory

_NAME = "jumar.optim.AdamW"
_REFUSED = ("amsgrad", "capturable", "differentiable")
_MASTER = "master_param"
_HALF = (torch.bfloat16, torch.float16)


def _refuse(settings: dict[str, Any]) -> None:
    for key in _REFUSED:
        if settings.get(key):
            raise ValueError(f"{_NAME}: {key}=True is not supported; torch.optim.AdamW has it")


def _default_float() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class AdamW(torch.optim.AdamW):
    """A drop-in for ``torch.optim.AdamW`` on CPUs: the same arguments, parameter groups, state and ``state_dict``.

    All parameters of all groups are updated by one C++ call, spread over threads by elements. Every result is rounded
    once and within 0.52 ulp of the formula in fp64, from any state, and the same for every thread count.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch's. ``lr`` and ``betas`` may be tensors.
        amsgrad, capturable, differentiable: refused.
        foreach, fused: accepted, kept in the groups, without effect.
        master_weights: bf16 and fp16 parameters get an fp32 copy, which is what is stepped, and fp32 moments. The copy is
            in the state (``master_param``), is saved, and is restored exactly. A parameter that is changed elsewhere wins
            over its copy. Without it moments have the parameter's dtype, as torch's: in bf16 a second moment with
            ``beta2`` above 0.998 cannot decay.

    Raises:
        ValueError: a refused argument, here, in a group, or in a state that is loaded; a value that torch refuses.
        RuntimeError: from :meth:`step`, with nothing written: sparse gradients, parameters that overlap in memory,
            gradients that do not fit.

    Parameters may be any floating dtype and complex, with gradients of the same or another floating dtype, any strides,
    and DTensors (FSDP2, tensor parallelism): each process steps its own part. On devices other than the CPU torch's own
    step runs, without master weights.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool = False,
    ) -> None:
        _refuse({"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable})
        self.master_weights = bool(master_weights)
        # torch refuses some combinations of foreach and fused with each other and with tensors.
        super().__init__(
            params, lr, betas, eps, weight_decay, False, maximize=maximize, foreach=None, fused=None
        )
        for settings in (self.defaults, *self.param_groups):
            for key, hint in (("foreach", foreach), ("fused", fused)):
                if settings[key] is None:
                    settings[key] = hint
        # GradScaler unscales gradients itself and calls step() only where they are finite.
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's. ValueError where the group asks for what is refused."""
        _refuse(param_group)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_weights": self.master_weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("master_weights", False)
        self._step_supports_amp_scaling = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class or of ``torch.optim.AdamW``. ValueError where it has what is refused.

        fp32 moments and copies stay fp32, which torch's own loading would round to the parameter's dtype.
        """
        for group in state_dict["param_groups"]:
            _refuse(group)
        loaded: list[dict[str, Any]] = []
        # Last of the hooks: sees what the others made of it.
        handle = self.register_load_state_dict_pre_hook(lambda _, state: loaded.append(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved = [i for group in loaded[0]["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, params, strict=True):
            if not self._has_master(p):
                self.state.get(p, {}).pop(_MASTER, None)
                continue
            for key, value in loaded[0]["state"].get(index, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[p][key] = value.to(device=p.device, dtype=torch.float32)

    def _has_master(self, p: Tensor) -> bool:
        return self.master_weights and p.dtype in _HALF

    def _state_of(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter, made when there is none."""
        state = self.state[p]
        master = self._has_master(p)
        dtype = torch.float32 if master else p.dtype
        if "exp_avg" not in state:
            state["step"] = torch.tensor(0.0, dtype=_default_float())
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        if master:
            for key in ("exp_avg", "exp_avg_sq"):
                if state[key].dtype != dtype:
                    state[key] = state[key].to(dtype)
            if _MASTER not in state:
                state[_MASTER] = p.detach().to(dtype)
        return state

    def _gradient(self, group: dict[str, Any], at: tuple[int, int]) -> Tensor:
        """The gradient of parameter ``at`` (group, index) in the parameter's layout over processes."""
        p = group["params"][at[1]]
        grad = p.grad
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{_NAME}: {self._name(at)} has a sparse gradient ({grad.layout}); torch.optim.SparseAdam takes those"
            )
        if is_dtensor(p) != is_dtensor(grad):
            raise RuntimeError(f"{_NAME}: {self._name(at)} and its gradient must both be DTensors")
        if is_dtensor(p) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)
        if p.is_complex() != grad.is_complex():
            raise RuntimeError(
                f"{_NAME}: {self._name(at)} is {p.dtype} and its gradient {grad.dtype}"
            )
        return grad.resolve_conj().resolve_neg() if grad.is_conj() or grad.is_neg() else grad

    def _name(self, at: tuple[int, int]) -> str:
        group = self.param_groups[at[0]]
        names = group.get("param_names")
        return f"parameter {names[at[1]] if names else f'{at[1]} of group {at[0]}'}"

    # Opaque to torch.compile: one C++ call leaves nothing to fuse.
    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. ``closure`` evaluates the model again, with gradients enabled, and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            places = [
                (g, i)
                for g, group in enumerate(self.param_groups)
                for i, p in enumerate(group["params"])
                if p.grad is not None
            ]
            for group in self.param_groups:
                _refuse(group)
            grads = [self._gradient(self.param_groups[at[0]], at) for at in places]
            params = [self.param_groups[g]["params"][i] for g, i in places]
            if all(map(is_plain, params)):
                self._step_here(places, params, grads)
            else:
                self._step_elsewhere()
        return loss

    def _step_here(self, places: list[tuple[int, int]], params: list[Tensor], grads: list[Tensor]) -> None:
        if not params:
            return
        states = [self._state_of(p) for p in params]
        masters = [i for i, p in enumerate(params) if self._has_master(p)]
        used = sorted({g for g, _ in places})
        groups = [self.param_groups[g] for g in used]
        try:
            adamw_(
                [memory(p) for p in params],
                [memory(g) for g in grads],
                [memory(s["exp_avg"]) for s in states],
                [memory(s["exp_avg_sq"]) for s in states],
                [memory(states[i][_MASTER]) for i in masters],
                masters,
                [s["step"] for s in states],
                [sum(g == k for g, _ in places) for k in used],
                [float(group["lr"]) for group in groups],
                [float(group["betas"][0]) for group in groups],
                [float(group["betas"][1]) for group in groups],
                [float(group["eps"]) for group in groups],
                [float(group["weight_decay"]) for group in groups],
                [int(group["maximize"]) for group in groups],
            )
        except RuntimeError as error:
            names = ", ".join(self._name(at) for i, at in enumerate(places) if f"[{i}]" in str(error))
            raise RuntimeError(f"{_NAME}: {error}{f' ({names})' if names else ''}") from error
        wrapped = [p for p in params if is_dtensor(p) or p.is_complex()]
        if wrapped:  # the operator has counted the memory's own versions
            torch.autograd.graph.increment_version(wrapped)

    def _step_elsewhere(self) -> None:
        """torch's own step, for parameters that are not in this machine's memory."""
        for group in self.param_groups:
            if any(self._has_master(p) for p in group["params"]):
                raise RuntimeError(f"{_NAME}: master_weights needs parameters on the CPU")
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            has_complex = self._init_group(group, *lists)
            beta1, beta2 = group["betas"]
            adam(
                *lists,
                foreach=group["foreach"],
                fused=group["fused"],
                has_complex=has_complex,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                decoupled_weight_decay=True,
            )

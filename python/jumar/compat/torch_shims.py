"""Shims of torch itself: the device that torchtitan picks, and calls that are newer than the torch installed."""

from __future__ import annotations

import functools
import inspect
import os
import platform
from types import SimpleNamespace
from typing import Any

import torch

from jumar.compat.shim import Shim


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 1 << 34


def _no_accelerator() -> bool:
    return torch._utils._get_available_device_type() is None


def _patch_cpu_device() -> None:
    """torchtitan asks torch for its device type once, at import, and takes "cuda" when there is none."""
    name = platform.processor() or platform.machine()
    answers: dict[str, Any] = {
        # One device a process: with more, ranks would be given indices that no CPU device has.
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device=None: None,
        "get_device_name": lambda device=None: f"cpu {name}",
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=f"cpu {name}", total_memory=_memory()
        ),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for attribute, function in answers.items():
        if attribute in ("device_count", "current_device", "set_device") or not hasattr(
            torch.cpu, attribute
        ):
            setattr(torch.cpu, attribute, function)
    before = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = functools.wraps(before)(lambda: before() or "cpu")


def _set_timeout_missing() -> bool:
    return torch.distributed.is_available() and not hasattr(torch.distributed, "set_timeout")


def _patch_set_timeout() -> None:
    from torch.distributed.distributed_c10d import _set_pg_timeout

    def set_timeout(timeout: Any, group: Any = None) -> None:
        """The timeout of a process group; None is the default group."""
        _set_pg_timeout(timeout, group)

    torch.distributed.set_timeout = set_timeout


def _needs_force_sum() -> bool:
    """Gloo (and HCCL) have no PREMUL_SUM, which FSDP2 uses once a divide factor is set."""
    return torch.distributed.is_available() and _no_nccl()


def _no_nccl() -> bool:
    return not torch.distributed.is_nccl_available() or not torch.cuda.is_available()


def _patch_force_sum() -> None:
    from torch.distributed.fsdp import FSDPModule

    before = FSDPModule.set_gradient_divide_factor

    @functools.wraps(before)
    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        before(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def _step_has_microbatches() -> bool:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters


def _needs_pp_step() -> bool:
    return torch.distributed.is_available() and not _step_has_microbatches()


def _patch_pp_step() -> None:
    """``schedule.step(arg_mbs=..)`` gives microbatches that are split already; torch 2.13 only splits them itself."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    def wrap(cls: type) -> None:
        before = cls.step

        @functools.wraps(before)
        def step(
            self: Any,
            *args: Any,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            **more: Any,
        ) -> Any:
            if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
                return before(self, *args, **more)
            if self._has_backward and not torch.is_grad_enabled():
                raise RuntimeError("step() needs gradients to be enabled")
            stages = self._stages if hasattr(self, "_stages") else [self._stage]
            for stage in stages:
                stage.has_backward = self._has_backward
            for stage in stages:
                stage.clear_runtime_states()
            count = self._n_microbatches
            self._step_microbatches(
                arg_mbs if arg_mbs is not None else [()] * count,
                kwarg_mbs if kwarg_mbs is not None else [{}] * count,
                target_mbs,
                more.get("losses"),
                more.get("return_outputs", True),
                loss_kwargs=more.get("loss_kwargs"),
            )
            last = next((stage for stage in stages if stage.is_last), None)
            if last is not None and more.get("return_outputs", True):
                return self._merge_outputs(last.output_chunks)
            return None

        cls.step = step

    wrap(PipelineScheduleSingle)
    wrap(PipelineScheduleMulti)


def _infers_shapes() -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.pipelining.stage import PipelineStage

    return hasattr(PipelineStage, "_forward_metadata_inference")


def _patch_pp_buffers() -> None:
    """Buffers that the runs for shapes wrote to get their contents back."""
    from torch.distributed.pipelining.stage import PipelineStage

    def wrap(name: str) -> None:
        before = getattr(PipelineStage, name)

        @functools.wraps(before)
        def infer(self: Any, *args: Any, **more: Any) -> Any:
            kept = [(b, b._version, b.detach().clone()) for b in self.submod.buffers()]
            try:
                return before(self, *args, **more)
            finally:
                with torch.no_grad():
                    for buffer, version, content in kept:
                        # What was only read may be wanted by the backward pass, as it is.
                        if buffer._version != version:
                            buffer.copy_(content)

        setattr(PipelineStage, name, infer)

    for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
        if hasattr(PipelineStage, name):
            wrap(name)


#: In the order in which they are applied.
SHIMS = [
    Shim(
        "cpu_device",
        "torchtitan takes the device cuda where torch reports no accelerator, and dies when it selects it",
        "torchtitan/tools/utils.py: get_device_info",
        _no_accelerator,
        _patch_cpu_device,
    ),
    Shim(
        "set_timeout",
        "torch.distributed.set_timeout, called after the first step, is newer than torch 2.13",
        "torchtitan/distributed/utils.py: set_pg_timeouts",
        _set_timeout_missing,
        _patch_set_timeout,
    ),
    Shim(
        "fsdp_force_sum",
        "FSDP2 reduces gradients by PREMUL_SUM once a divide factor is set; Gloo has only SUM",
        "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: _get_gradient_divide_factors",
        _needs_force_sum,
        _patch_force_sum,
    ),
    Shim(
        "pp_step",
        "schedule.step(arg_mbs=...), which torchtitan's pipeline uses, is newer than torch 2.13",
        "torch/distributed/pipelining/schedules.py: step",
        _needs_pp_step,
        _patch_pp_step,
    ),
    Shim(
        "pp_buffers",
        "a pipeline's first step runs each stage on uninitialised tensors to learn shapes; experts count their tokens",
        "torch/distributed/pipelining/stage.py: _forward_metadata_inference",
        _infers_shapes,
        _patch_pp_buffers,
    ),
]

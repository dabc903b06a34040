"""Shims of torchtitan: its Triton module, attention of language models and counts of experts on CPUs."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

from jumar.compat.shim import Shim

# The kernels of an expert-parallel dispatcher that only runs on CUDA.
_TRITON_MODULE = "torchtitan.distributed.minimal_async_ep.kernels"
# In 0.2.x the kernels of the MoE token order; they have a CPU form in the same file.
_TRITON_MODULE_02 = "torchtitan.models.moe.kernels"


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _version() -> tuple[int, ...]:
    """(0, 3, 0) for torchtitan 0.3.0; () when it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("torchtitan").split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return ()


def _needs_triton_stub() -> bool:
    return bool(_version()) and not _has("triton")


def _patch_triton_stub() -> None:
    """Puts a stand-in for the single module that imports triton; ``triton`` itself must stay absent for Inductor."""
    name = _TRITON_MODULE if _version() >= (0, 3) else _TRITON_MODULE_02
    if name in sys.modules:
        return
    stub = ModuleType(name, "Stand-in: the kernels of this module need triton, which is not installed.")
    stub.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)

    def attribute(key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{name}.{key} needs triton, which is not installed")

        return missing

    stub.__getattr__ = attribute
    if name == _TRITON_MODULE_02:
        from jumar.titan02.moe_indices import generate_permute_indices

        stub.generate_permute_indices = generate_permute_indices
    sys.modules[name] = stub


def _needs_attention() -> bool:
    if _version() < (0, 3):
        return False
    from torchtitan.tools.utils import device_type

    return device_type == "cpu"


def _patch_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    from jumar.compat.attention import SdpaFlexAttention

    # Every config of FlexAttention builds the subclass from here on, in eager and in fused models alike.
    attention.FlexAttention.Config._owner = SdpaFlexAttention
    # The stock form compiles create_block_mask, which costs tens of seconds and a C++ compiler.
    attention._compiled_create_block_mask = create_block_mask


def _needs_histc() -> bool:
    if not (0, 2) <= _version() < (0, 3):
        return False
    try:
        torch.histc(torch.zeros(1, dtype=torch.int64), bins=1, min=0, max=1)
    except (RuntimeError, NotImplementedError):
        return True
    return False


def _patch_histc() -> None:
    """Integers are counted as fp64 numbers, which hold them exactly."""
    before = torch.histc

    @functools.wraps(before)
    def histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_floating_point() or input.device.type != "cpu":
            return before(input, *args, **kwargs)
        return before(input.double(), *args, **kwargs).to(input.dtype)

    torch.histc = histc


def _replicated() -> Any:
    from spmd_types import R
    from torchtitan.models.common.decoder_sharding import dense_param_placement
    from torchtitan.protocols.sharding import ShardingConfig

    return ShardingConfig(state_shardings={"weight": dense_param_placement(tp=R)})


def _needs_lora_sharding() -> bool:
    if _version() < (0, 3):
        return False
    from torchtitan.components import lora

    try:
        lora._lora_adapter_sharding(_replicated())
    except AssertionError:
        return True
    return False


def _patch_lora_sharding() -> None:
    """The adapters of a layer that every rank has whole are whole too."""
    from torchtitan.components import lora

    before = lora._lora_adapter_sharding

    @functools.wraps(before)
    def sharding(base: Any) -> tuple[Any, Any]:
        whole = _replicated()
        weight = base.state_shardings.get("weight") if base else None
        return (whole, whole) if weight == whole.state_shardings["weight"] else before(base)

    lora._lora_adapter_sharding = sharding


#: In the order in which they are applied.
SHIMS = [
    Shim(
        "triton_stub",
        "torchtitan imports one module of Triton kernels for CUDA unconditionally; triton is not installed",
        "torchtitan/distributed/minimal_async_ep/api.py",
        _needs_triton_stub,
        _patch_triton_stub,
    ),
    Shim(
        "flex_attention",
        "FlexAttention, the only attention that torchtitan takes for language models, has no backward on CPUs",
        "torchtitan/models/common/config_utils.py: get_attention_config",
        _needs_attention,
        _patch_attention,
        late=True,
    ),
    Shim(
        "histc",
        "torchtitan 0.2 counts tokens per expert by torch.histc of integers, which CPUs do not have",
        "torchtitan/models/moe/moe.py: TokenChoiceTopKRouter.forward",
        _needs_histc,
        _patch_histc,
    ),
    Shim(
        "lora_sharding",
        "torchtitan has no adapters for layers that tensor parallelism does not shard, as in latent attention",
        "torchtitan/components/lora.py: _lora_adapter_sharding",
        _needs_lora_sharding,
        _patch_lora_sharding,
        late=True,
    ),
]

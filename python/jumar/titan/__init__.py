"""torchtitan 0.3.0 on fused operators: overrides of its configuration nodes.

With any torchtitan command::

    --override.imports jumar.titan.npu_rms_norm jumar.titan.npu_rope jumar.titan.npu_sdpa jumar.titan.npu_swiglu \\
        jumar.titan.npu_linear jumar.titan.npu_gmm jumar.titan.npu_permute jumar.titan.npu_router jumar.titan.npu_loss

Each name below is an override factory. It turns a node of the model's configuration into the same node of a fused
module, before anything is built, so the module's sharding, initialisation and place in the model stay, and with them
FSDP, tensor, pipeline and context parallelism. :func:`plan` tells beforehand what they will match.

Importing this module applies the compat shims that the machine needs (:mod:`jumar.compat`).
"""

# The shims come before anything of torchtitan.
from __future__ import annotations

from jumar import compat

compat.apply()

from torchtitan.components.loss import BaseLoss
from torchtitan.config.override import _REGISTRY, Override
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE, RoPE

from jumar.titan import attention, dsa, modules, moe
from jumar.titan.loss import LossConverter
from jumar.titan.nodes import Converter, install

CONVERTERS: dict[str, Converter] = {
    converter.name: converter
    for converter in (
        Converter(
            "npu_rms_norm", "npu_rms_norm", RMSNorm.Config, {RMSNorm.Config: modules.FusedRMSNorm.Config}
        ),
        Converter(
            "npu_rope",
            "npu_rotary_mul",
            RoPE.Config,
            {
                CosSinRoPE.Config: modules.FusedCosSinRoPE.Config,
                ComplexRoPE.Config: modules.FusedComplexRoPE.Config,
            },
        ),
        attention.CONVERTER,
        dsa.CONVERTER,
        Converter(
            "npu_swiglu",
            "swiglu_gate_up",
            FeedForward.Config,
            {
                FeedForward.Config: modules.FusedFeedForward.Config,
                SigmoidGatedFeedForward.Config: modules.FusedSigmoidGatedFeedForward.Config,
            },
        ),
        Converter("npu_linear", "npu_linear", Linear.Config, {Linear.Config: modules.FusedLinear.Config}),
        *moe.CONVERTERS,
        LossConverter("npu_loss", "linear_cross_entropy", Linear.Config, {}),
    )
}

npu_rms_norm = install(_REGISTRY, Override, CONVERTERS["npu_rms_norm"])
npu_rope = install(_REGISTRY, Override, CONVERTERS["npu_rope"])
npu_sdpa = install(_REGISTRY, Override, CONVERTERS["npu_sdpa"])
npu_dsa = install(_REGISTRY, Override, CONVERTERS["npu_dsa"])
npu_swiglu = install(_REGISTRY, Override, CONVERTERS["npu_swiglu"])
npu_linear = install(_REGISTRY, Override, CONVERTERS["npu_linear"])
npu_gmm = install(_REGISTRY, Override, CONVERTERS["npu_gmm"])
npu_permute = install(_REGISTRY, Override, CONVERTERS["npu_permute"])
npu_router = install(_REGISTRY, Override, CONVERTERS["npu_router"])
npu_loss = install(_REGISTRY, Override, CONVERTERS["npu_loss"], target=BaseLoss.Config, fqns=["loss"])

from jumar.titan.plan import count_modules, plan

__all__ = [
    "CONVERTERS",
    "count_modules",
    "npu_dsa",
    "npu_gmm",
    "npu_linear",
    "npu_loss",
    "npu_permute",
    "npu_rms_norm",
    "npu_rope",
    "npu_router",
    "npu_sdpa",
    "npu_swiglu",
    "plan",
]

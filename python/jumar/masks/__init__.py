"""Which keys each query sees, and the calls of ``npu_fusion_attention`` that compute exactly that.

:mod:`jumar.masks.ranges` holds masks whose rows are ranges of keys, as lengths of packed sequences; :mod:`.blocks` reads
FlexAttention's ``BlockMask``; :mod:`.attend` runs the operator.
"""

"""What a compiled graph is made of."""

from __future__ import annotations

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


class Graphs:
    """A backend that runs graphs as they are, and remembers the tensors in them."""

    def __init__(self):
        self.number, self.made = 0, []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph, inputs):
        self.number += 1
        for node in graph.graph.nodes:
            values = node.meta.get("val")
            values = values if isinstance(values, tuple | list) else [values]
            self.made += [(str(node.target), tuple(v.shape)) for v in values if isinstance(v, torch.Tensor)]
        return make_boxed_func(graph.forward)

    def matrices(self, length):
        """What has a place for every pair of tokens, and large masks of any kind."""
        return {(n, s) for n, s in self.made if len(s) > 1 and (min(s[-2:]) >= length and s[-1] in (length, 2048))}

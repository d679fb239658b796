"""FX graph in, FX graph out: finds the attention blocks of a graph and replaces each by one call of the operator.

Order of reading: `rewrite` (the pass), `composites`, `sdpa` and `products`, `attention` (the proof), `softmax` and
`normal`, `contraction`, `sums`, `pieces`, `beside`, `reader` with its handlers in `leaves`, `pointwise`, `creation`,
`views` and `lookups`, `index` (index algebra), `mutation`, `writes` and `gradients`, `paged`, `program` and `table`
(what the kernels are told), `replace`.
"""

from torchflash.passes import creation, leaves, lookups, pointwise, views  # noqa: F401  (register their handlers)
from torchflash.passes.rewrite import rewrite_graph

__all__ = ["rewrite_graph"]

"""torchflash.kernels: the attention op, its Triton kernels and its blockwise torch implementation.

Importing it registers torch.ops.torchflash.attention, attention_backward and tile_map; triton is imported only when a
kernel is launched. Nothing here imports torchflash.passes.
"""

from torchflash.kernels import op as op  # isort: skip  (before its formulas)
from torchflash.kernels import flops as flops

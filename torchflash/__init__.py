"""A torch.compile backend that turns attention written by hand into one fused FlashAttention op.

    torch.compile(model, backend="torchflash")

needs no import. Here is what tells about it: `explain`, `rewrite`, and the `Options` and `Report` they take and give.
Importing this package touches no device and does not need Triton.
"""

__version__ = "0.1.0"

from torchflash.explaining import explain, rewrite
from torchflash.functional import attention
from torchflash.options import Options
from torchflash.report import SKIP_CODES, Report, Rewritten, Skipped, SkippedError
from torchflash.verification import Comparison, Verification, Verified
from torchflash.verifying import verify

__all__ = [
    "SKIP_CODES",
    "Comparison",
    "Options",
    "Report",
    "Rewritten",
    "Skipped",
    "SkippedError",
    "Verification",
    "Verified",
    "__version__",
    "attention",
    "explain",
    "rewrite",
    "verify",
]

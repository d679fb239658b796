"""A torch.compile backend that turns attention written by hand into one fused FlashAttention op."""

__all__ = ["__version__"]
__version__ = "0.1.0"

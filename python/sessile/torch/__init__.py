"""sessile for PyTorch."""

from .storage import GraphStorage

__all__ = ["GraphStorage"]

"""sessile for PyTorch."""

from .graphed import make_graphed_callables
from .shard import Sharded, ShardedLinear, ShardedParameter, full_state_dict, lead_, load_full_state_dict, shard_
from .storage import GraphStorage

__all__ = [
    "GraphStorage",
    "Sharded",
    "ShardedLinear",
    "ShardedParameter",
    "full_state_dict",
    "lead_",
    "load_full_state_dict",
    "make_graphed_callables",
    "shard_",
]

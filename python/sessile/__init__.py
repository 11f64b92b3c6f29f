"""Fixed-address communication buffers of training that runs as captured graphs.

``sessile.plan`` plans a trace, ``sessile.check_log`` checks an event log, ``sessile.doctor`` says what this machine has,
``sessile.torch`` is for PyTorch and is the only part that imports it.
"""

from ._sessile import Plan, __version__, check_log, check_trace, doctor, plan
from .errors import (
    AgreementError,
    ArgumentError,
    DeviceError,
    FormatError,
    GroupError,
    MismatchError,
    PhaseError,
    PlanError,
    RunnerError,
    SessileError,
    ShardingError,
    StorageError,
    TraceError,
)

__all__ = [
    "AgreementError",
    "ArgumentError",
    "DeviceError",
    "FormatError",
    "GroupError",
    "MismatchError",
    "PhaseError",
    "Plan",
    "PlanError",
    "RunnerError",
    "SessileError",
    "ShardingError",
    "StorageError",
    "TraceError",
    "__version__",
    "check_log",
    "check_trace",
    "doctor",
    "plan",
]

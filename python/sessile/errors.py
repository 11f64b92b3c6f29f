"""One exception class for each family of errors. The message says what happened and what to do; the fields hold the
values, so that a program need not read the message."""

from __future__ import annotations

from typing import Optional


class SessileError(Exception):
    """Any error of sessile."""


class ArgumentError(SessileError, ValueError):
    """An argument has a value that it can't have."""

    def __init__(self, message: str, *, argument: str, value: str) -> None:
        super().__init__(message)
        self.argument = argument
        self.value = value


class PhaseError(SessileError):
    """A call came in a phase that does not allow it. Nothing changed."""

    def __init__(self, message: str, *, call: str, phase: str, remedy: str) -> None:
        super().__init__(message)
        self.call = call
        self.phase = phase
        self.remedy = remedy


class RunnerError(SessileError):
    """A runner that was not discovered, not captured, or captured twice."""

    def __init__(self, message: str, *, runner: str) -> None:
        super().__init__(message)
        self.runner = runner


class MismatchError(SessileError):
    """A pass over a runner differs from its discovery: the first request or order point that differs."""

    def __init__(
        self, message: str, *, runner: str, index: int, expected: Optional[str], found: Optional[str]
    ) -> None:
        super().__init__(message)
        self.runner = runner
        self.index = index
        self.expected = expected
        self.found = found


class AgreementError(SessileError):
    """Ranks differ. The same on every rank; nothing was allocated."""

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        group: Optional[str] = None,
        runner: Optional[str] = None,
        index: Optional[int] = None,
        expected: Optional[str] = None,
        found: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.group = group
        self.runner = runner
        self.index = index
        self.expected = expected
        self.found = found


class GroupError(SessileError):
    """A process group that is not known, or that this rank is no member of."""

    def __init__(self, message: str, *, group: str) -> None:
        super().__init__(message)
        self.group = group


class DeviceError(SessileError):
    """The device, its libraries or its memory. After a reduction that waited in vain, ``group``, ``rank`` (who waited), ``missing``
    (for whom; both of the job) and ``round`` (which reduction of the group, from 1) say which."""

    def __init__(
        self,
        message: str,
        *,
        library: Optional[str] = None,
        remedy: Optional[str] = None,
        requested: Optional[int] = None,
        free: Optional[int] = None,
        group: Optional[str] = None,
        rank: Optional[int] = None,
        missing: Optional[int] = None,
        round: Optional[int] = None,
    ) -> None:
        super().__init__(message)
        self.library = library
        self.remedy = remedy
        self.requested = requested
        self.free = free
        self.group = group
        self.rank = rank
        self.missing = missing
        self.round = round


class StorageError(SessileError):
    """Planned storage, in any other way."""


class PlanError(SessileError):
    """A trace that the options cannot lay out."""


class TraceError(SessileError):
    """A trace that nothing may rest on."""


class FormatError(SessileError):
    """A document that can't be read."""


class ShardingError(SessileError):
    """A module or weight that can't be sharded or graphed, as it is."""

    def __init__(self, message: str, *, module: str, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.module = module
        self.remedy = remedy

"""Declarations of sampling parameters, which stand once, in ``SamplingParams``.

The command line's flags, the columns of jobs and the fields of HTTP bodies follow from the declaration.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from vlm_batch.checks import is_real, is_whole
from vlm_batch.errors import InvalidParameters, shown


@dataclass(frozen=True)
class WholeNumber:
    """A check: an integer within bounds, of Python or numpy."""

    least: int
    most: int

    def checked(self, name: str, value: Any) -> int:
        if is_whole(value) and self.least <= value <= self.most:
            return int(value)
        raise InvalidParameters(
            f"{name} is {shown(value)}; it must be an integer in {self.least}..{self.most}"
        )


@dataclass(frozen=True)
class RealNumber:
    """A check: a number within bounds, or 0 if ``or_zero``; ``right`` says which those are."""

    least: float
    most: float
    right: str
    or_zero: bool = False

    def checked(self, name: str, value: Any) -> float:
        if is_real(value):
            number = float(value)  # of numpy's, too, whose types round bounds
            is_zero = self.or_zero and number == 0
            if is_zero or self.least <= number <= self.most:
                return number
        raise InvalidParameters(f"{name} is {shown(value)}; it must be {self.right}")


@dataclass(frozen=True)
class TrueOrFalse:
    """A check: a bool of Python or numpy; ``right`` says what else may stand there."""

    right: str = "True or False"

    def checked(self, name: str, value: Any) -> bool:
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise InvalidParameters(f"{name} is {shown(value)}; it must be {self.right}")


class Check(Protocol):
    """A check of a parameter's value."""

    def checked(self, name: str, value: Any) -> Any:
        """Return the value in Python's own types. Raises InvalidParameters."""


@dataclass(frozen=True)
class Flag:
    """A parameter's flag on the command line.

    Attributes:
        help: What ``--help`` says.
        metavar: What stands for the value there; FILE means that the flag names a file with it.
        says_default: Whether ``--help`` adds the default.
        is_repeated: Whether the flag may be given several times, each with one text.
    """

    help: str
    metavar: str | None = None
    says_default: bool = False
    is_repeated: bool = False


@dataclass(frozen=True)
class Declared:
    """A parameter as ``declared`` describes it."""

    name: str
    default: Any
    check: Check
    flag: Flag | None
    in_jobs: bool
    over_http: bool


def declared(
    default: Any,
    check: Check,
    *,
    flag: Flag | None = None,
    in_jobs: bool = True,
    over_http: bool = True,
    is_hashed: bool = True,
) -> Any:
    """Return a dataclass's field that declares a parameter.

    Args:
        check: Of its value, when a record is made.
        flag: On the command line; None for none.
        in_jobs: Whether a row's ``params`` and a job's settings may name it.
        over_http: Whether the field of this name in a body sets it, and nothing else does.
        is_hashed: Whether the record's hash has it; False for what cannot be hashed.
    """
    how = {"check": check, "flag": flag, "in_jobs": in_jobs, "over_http": over_http}
    hashed = None if is_hashed else False  # None: as it is compared
    if isinstance(default, dict):
        return field(default_factory=default.copy, hash=hashed, metadata=how)
    return field(default=default, hash=hashed, metadata=how)


def parameters_of(record: type[Any]) -> tuple[Declared, ...]:
    """Return the declarations of a record's fields, in their order."""
    return tuple(
        Declared(name=one.name, default=one.default, **one.metadata)
        for one in fields(record)
    )

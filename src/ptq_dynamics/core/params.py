"""One section of params.yaml, typed; a notebook reads what it needs and depends on nothing else."""

from __future__ import annotations

from typing import Any, TypeVar

from . import paths
from .config import load, one_of, read_yaml
from .errors import UserError

T = TypeVar("T")


def section(cls: type[T], *keys: str) -> T:
    """The part of params.yaml under ``keys`` (``"studies", "token_budgets"``) as ``cls``.

    Raises:
        UserError: no such section (the nearest is named), or its content is not valid.
    """
    file = paths.params_file()
    data: Any = read_yaml(file)
    for i, key in enumerate(keys):
        if not isinstance(data, dict):
            raise UserError(f"{file.name}: '{'.'.join(keys[:i])}' holds no sections")
        try:
            data = data[one_of(key, data, "section")]
        except UserError as e:
            raise UserError(f"{file.name}: {'.'.join(keys[:i]) or 'top level'}: {e}") from None
    return load(cls, data, f"{file.name}: {'.'.join(keys)}")

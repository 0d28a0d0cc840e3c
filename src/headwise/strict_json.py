"""JSON as its standard has it, in every file headwise writes or reads: without NaN and infinity.

Python's own module writes and reads both, and most other programs then refuse the file.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from headwise.errors import HeadwiseError

# What may be half of a character beyond U+FFFF, written as two.
HALF = re.compile(r"\\u[dD][89a-fA-F]")


def encode_json(
    value: Any, *, indent: int | None = None, compact: bool = False, ascii_only: bool = True, sort_keys: bool = False
) -> str:
    """Return a value as a JSON text.

    Args:
        value: What `json.dumps` accepts.
        indent: Spaces of one level; None for one line.
        compact: Whether there are no spaces after commas and colons.
        ascii_only: Whether other characters are escaped.
        sort_keys: Whether keys are sorted.

    Raises:
        HeadwiseError: A number is not finite; the message names its place.

    Example:
        >>> encode_json({"score": {"pooled": float("inf")}})
        Traceback (most recent call last):
            ...
        headwise.errors.HeadwiseError: score.pooled is inf; expected finite numbers, since JSON has no others.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(
            value, indent=indent, separators=separators, ensure_ascii=ascii_only, sort_keys=sort_keys, allow_nan=False
        )
    except ValueError:
        found = find_not_finite(value)
        if found is None:
            raise
        name, number = found
        raise HeadwiseError(
            f"{name or 'the value'} is {number}; expected finite numbers, since JSON has no others."
        ) from None


def find_not_finite(value: Any, name: str = "") -> tuple[str, float] | None:
    """Return the place and value of the first number in JSON data that is NaN or infinite, or None.

    >>> find_not_finite({"heads": [{"drop": 0.5}, {"drop": float("nan")}]})
    ('heads.1.drop', nan)
    """
    if isinstance(value, float):
        return None if math.isfinite(value) else (name, value)
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(number), part) for number, part in enumerate(value)]
    else:
        return None
    inner = (find_not_finite(part, f"{name}.{key}" if name else key) for key, part in parts)
    return next((found for found in inner if found is not None), None)


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, holds NaN or a number beyond the range of floats, is nested more deeply than Python
            can follow, or holds half of a surrogate pair, which no file can be written with.

    Example:
        >>> parse_json('{"loss": NaN}')
        Traceback (most recent call last):
            ...
        ValueError: NaN is no number of JSON
        >>> parse_json("[" * 100_000)
        Traceback (most recent call last):
            ...
        ValueError: brackets are nested too deeply
    """
    try:
        # Python's own reading of bytes lets half pairs pass
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_float, parse_int=_parse_int)
        if HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"{error.object[error.start]!r} is half of a surrogate pair; take it out") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _parse_int(text: str) -> int:
    # longer ones are beyond the range of floats, with which all numbers are compared
    if len(text) > 300:
        raise ValueError(f"{text[:60]}... is beyond the range of numbers")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:60]} is beyond the range of numbers")
    return number

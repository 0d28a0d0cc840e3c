"""Which versions a number was made with."""

from __future__ import annotations

import platform
from importlib.metadata import version

from headwise import __version__


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, headwise and some packages.

    >>> sorted(versions("torch"))
    ['headwise', 'python', 'torch']
    """
    return {"python": platform.python_version(), "headwise": __version__, **{name: version(name) for name in packages}}

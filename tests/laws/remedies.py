"""Remedies: what an error tells its reader to do, done after the error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import headwise as hw

# A case yields what is refused; what follows is the remedy. It may yield again what is to work afterwards, where that
# is another call.
Case = Callable[[], Iterator[Callable[[], Any]]]


class Remedies:
    """Cases by the message of the error that they begin with."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}

    def after(self, message: str) -> Callable[[Case], Case]:
        """Have a case run after an error whose message matches."""

        def keep(case: Case) -> Case:
            assert message not in self.cases
            self.cases[message] = case
            return case

        return keep

    def check(self, message: str) -> None:
        case = self.cases[message]()
        refused = next(case)
        with pytest.raises(hw.errors.HeadwiseError, match=message):
            refused()
        works = next(case, refused)
        works()

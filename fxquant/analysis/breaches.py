"""The limits of a target that an operator breaks at its place in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxquant.analysis.measures import MEASURES, Site
from fxquant.target import Limit, Target


@dataclass(frozen=True)
class Breach:
    """A limit that an operator breaks: the values that are not allowed, and the sentence that says so."""

    limit: Limit
    values: Sequence[Any]
    sentence: str


class Limits:
    """A target's limits, by the operators they are about."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.general = [limit for limit in target.limits if not limit.operators]
        self.special: dict[str, list[Limit]] = {}
        for limit in target.limits:
            for name in limit.operators:
                self.special.setdefault(name, []).append(limit)

    def broken(self, site: Site) -> list[Breach]:
        """Return the limits that the operator breaks; if the target does not have the operator, only that is reported."""
        mine = self.special.get(site.operator.name, [])
        absent = [limit for limit in mine if limit.measure is None]
        if absent:
            return [Breach(limit, (), f"{self.target.name} has no {site.operator.name}") for limit in absent]
        return [found for limit in (*self.general, *mine) if (found := self._broken(site, limit)) is not None]

    def _broken(self, site: Site, limit: Limit) -> Breach | None:
        assert limit.measure is not None
        offending = limit.broken_by(MEASURES[limit.measure](site))
        if not offending:
            return None
        values = " and ".join(map(str, offending))
        return Breach(limit, offending, f"its {limit.measure} is {values}; {self.target.name} allows {limit}")

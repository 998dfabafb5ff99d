"""What can be set for the containerizer. Times are seconds. The command line and the environment fill it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Settings:
    grace: float = 2.0
    """Between the stop signal and the kill; at most half of the budget."""
    budget: float = 10.0
    """What a cleanup may take where neither spec nor caller says."""
    budget_floor: float = 1.0
    budget_max: float = 60.0
    rejoin_grace: float = 5.0
    """How long an adopted, attached launch waits for its caller after a restart."""
    retention_age: float = 600.0
    retention_count: int = 1000
    containers_max: int = 10_000
    ephemeral: bool = False
    """Destroy everything at the end, detached too."""
    node: str = field(default_factory=socket.gethostname)
    """This machine in answers, so that a caller of many knows where to ask next."""

    def budget_for(self, asked: float | None, remaining: float | None) -> float:
        """Seconds a cleanup may take: min(maximum, asked, max(floor, caller's remaining time - 250 ms))."""
        budget = min(self.budget_max, asked if asked is not None else self.budget)
        if remaining is not None:
            budget = min(budget, max(self.budget_floor, remaining - 0.25))
        return budget

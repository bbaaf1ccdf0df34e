"""What a run does at a step with wrong numbers, and the loss scale of fp16. Never imports torch.

Both see only the loss and the gradient norm of the whole model, which are equal on every rank, so every rank
decides the same. Their state goes into the checkpoint: a resumed run decides as the uninterrupted one.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from training.stability_config import LossScaleConfig, StabilityConfig

Action = Literal["update", "skip", "stop", "roll_back"]


@dataclass(frozen=True)
class Verdict:
    """What to do with a step, and why (empty for an update)."""

    action: Action
    reason: str = ""


class Guard:
    """Watches loss and gradient norm, and says what is done with each step."""

    def __init__(self, config: StabilityConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.spike_window)
        self.norms: deque[float] = deque(maxlen=config.spike_window)
        self.in_a_row = 0

    def judge(self, loss_nats: float, norm: float) -> Verdict:
        """Say what to do with a step of this loss and gradient norm.

        Before `spike_window` / 2 updates nothing counts as a spike.
        """
        reason = self._not_finite(loss_nats, norm)
        if reason:
            return self._verdict(self.config.on_nonfinite, reason)
        if self.config.on_spike == "ignore":
            self.in_a_row = 0
            return Verdict("update")
        reason = self._spike("loss", "nats", loss_nats, self.losses) or self._spike(
            "gradient norm", "", norm, self.norms
        )
        if reason:
            return self._verdict(self.config.on_spike, reason)
        self.losses.append(loss_nats)
        self.norms.append(norm)
        self.in_a_row = 0
        return Verdict("update")

    def _verdict(self, policy: Literal["ignore", "stop", "skip", "roll_back"], reason: str) -> Verdict:
        self.in_a_row += 1
        if policy in ("ignore", "stop"):
            return Verdict("stop", reason)
        if self.in_a_row > self.config.max_in_a_row:
            return Verdict("stop", f"{reason}; {self.config.max_in_a_row} steps in a row made no update before it")
        return Verdict("skip" if policy == "skip" else "roll_back", reason)

    @staticmethod
    def _not_finite(loss_nats: float, norm: float) -> str:
        if math.isfinite(loss_nats) and math.isfinite(norm):
            return ""
        return f"the loss is {loss_nats:g} nats and the gradient norm {norm:g}"

    def _spike(self, name: str, unit: str, value: float, seen: deque[float]) -> str:
        if len(seen) < self.config.spike_window // 2:
            return ""
        mean = math.fsum(seen) / len(seen)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in seen) / len(seen))
        if value <= mean + self.config.spike_sigma * deviation:
            return ""
        return f"the {name} {value:.4g} {unit}".rstrip() + (
            f" is more than {self.config.spike_sigma:g} deviations ({deviation:.3g}) above the mean of the "
            f"last {len(seen)} updates ({mean:.4g})"
        )

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must know; empty where there is nothing."""
        if not self.losses and not self.in_a_row:
            return {}
        return {"losses": list(self.losses), "norms": list(self.norms), "in_a_row": self.in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.losses = deque(state.get("losses", ()), maxlen=self.config.spike_window)
        self.norms = deque(state.get("norms", ()), maxlen=self.config.spike_window)
        self.in_a_row = int(state.get("in_a_row", 0))


class LossScaler:
    """The factor on the loss that keeps fp16 gradients from vanishing; doubles and halves as they allow."""

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = config.initial
        self.updates_since = 0
        self.borne = 0

    @property
    def can_fall(self) -> bool:
        return self.scale > self.config.smallest

    def on_update(self) -> None:
        """Count an update without overflow."""
        self.updates_since += 1
        if self.updates_since == self.config.window:
            self.scale *= 2.0
            self.updates_since = self.borne = 0

    def on_overflow(self) -> None:
        """Count a step whose gradients were not finite."""
        self.updates_since = 0
        self.borne += 1
        if self.borne >= self.config.hysteresis:
            self.scale = max(self.config.smallest, self.scale / 2.0)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must know."""
        return {"scale": self.scale, "updates_since": self.updates_since, "borne": self.borne}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self.scale = float(state["scale"])
        self.updates_since, self.borne = int(state["updates_since"]), int(state["borne"])

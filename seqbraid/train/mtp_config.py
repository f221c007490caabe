"""The part of a run's configuration that says whether it trains multi-token prediction, and how."""

from __future__ import annotations

from dataclasses import dataclass

from ..models.mtp_module import MtpOptions


@dataclass(frozen=True)
class MtpConfig:
    """Multi-token prediction (Qwen3.5, Qwen3-Next)."""

    depth: int = 0
    """Tokens that are predicted beyond the next one; with 0 the checkpoint's `mtp.` tensors stay as they are.
    """
    loss_factor: float = 0.3
    """What the mean of the depths' losses is multiplied with before it is added to the loss."""
    fresh: bool = False
    """Start from random weights instead of the checkpoint's."""
    only: bool = False
    """Train the module of multi-token prediction alone: all else is frozen."""

    def check(self) -> None:
        """Refuse invalid settings."""
        if self.depth < 0:
            raise ValueError(f"mtp.depth={self.depth} must be at least 0 (0 trains without)")
        if not 0 <= self.loss_factor < float("inf"):
            raise ValueError(f"mtp.loss_factor={self.loss_factor} must be a finite number of at least 0")
        if not self.depth and (self.fresh or self.only):
            raise ValueError(
                f"mtp.{'fresh' if self.fresh else 'only'}=true, but mtp.depth=0 trains no multi-token "
                "prediction; set mtp.depth to 1 or more"
            )
        if self.only and not self.loss_factor:
            raise ValueError(
                "mtp.only=true with mtp.loss_factor=0 would train nothing; give a factor above 0"
            )

    def options(self, source: str | None, seed: int) -> MtpOptions | None:
        """For a model of this checkpoint; None where there is nothing to train."""
        if not self.depth:
            return None
        source = None if self.fresh else source
        return MtpOptions(self.depth, self.loss_factor, source, self.fresh, self.only, seed)

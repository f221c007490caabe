"""What is measured of a step, as one flat dict of floats."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch

from ..models.agreement import Agreed
from ..models.output import ExpertLoad, MtpReport, StepOutput

GIB = 2.0**30


@dataclass(frozen=True)
class StepCounts:
    """What is counted of a step, over the whole job."""

    tokens: int
    """Real ones."""
    labels: int
    """Tokens that the loss covers."""
    physical: int
    """Slots that were computed, padding included."""
    correct: int | None = None
    """Labels that had the largest logit."""
    flops: float | None = None
    """What the model's arithmetic needed (`plan.flops.ModelFlops.step`)."""
    experts: ExpertLoad | None = None
    """Where tokens went, of a model with experts."""
    mtp_loss: float | None = None
    """Of multi-token prediction, where it is trained."""
    mtp: MtpReport | None = None

    @staticmethod
    def of(agreed: Agreed, out: StepOutput) -> StepCounts:
        """What the ranks agreed on, and what a step gave."""
        return StepCounts(
            agreed.counts["tokens"],
            agreed.label_tokens,
            agreed.counts["physical_tokens"],
            correct=int(out.correct_tokens),
            flops=1e6 * agreed.counts["megaflops"],
            experts=out.expert_load,
            mtp_loss=None if out.mtp_loss is None else float(out.mtp_loss),
            mtp=out.mtp,
        )


class StepMeter:
    """Turns the counts of steps into metrics, timing each from the end of the one before."""

    def __init__(self, devices: int, peak: float | None = None, device: torch.device | str = "cpu") -> None:
        """
        Args:
            devices: how many the job has.
            peak: FLOP/s that one of them can do at most, by `plan.flops.peak_flops`; no MFU without it.
            device: the one whose memory is looked at.
        """
        if devices < 1:
            raise ValueError(f"devices={devices} must be at least 1")
        self.devices = devices
        self.peak = peak
        self.device = torch.device(device)
        self._began = time.perf_counter()

    def start(self) -> None:
        """Time from now on: what came since the last step (an evaluation, a checkpoint) is in none."""
        self._began = time.perf_counter()

    def step(
        self,
        counts: StepCounts,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        data_wait_s: float,
        epoch: float = 0.0,
        fill: float | None = None,
    ) -> dict[str, float]:
        """The metrics of the step that ends now.

        Call it when the loss has arrived on the CPU: before that a GPU may still be at work.

        Args:
            counts: of the whole job's step.
            loss: mean per label token.
            grad_norm: of the whole gradient, before it is clipped.
            lr: learning rate of this step.
            data_wait_s: how long the step waited for its samples.
            epoch: passes over the data so far.
            fill: share of the step's rows that holds tokens.
        """
        now = time.perf_counter()
        seconds = max(now - self._began, 1e-9)  # clocks tick coarsely
        self._began = now
        found = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_s": counts.tokens / seconds,
            "tokens_per_s_per_device": counts.tokens / seconds / self.devices,
            "memory_gib": peak_memory(self.device) / GIB,
            "data_wait_s": data_wait_s,
            "padding": 1.0 - counts.tokens / counts.physical if counts.physical else 0.0,
            "label_tokens": counts.labels,
            "tokens": counts.tokens,
            "epoch": epoch,
            "step_s": seconds,
        }
        if counts.flops is not None and self.peak is not None:
            found["mfu"] = counts.flops / (seconds * self.devices * self.peak)
        if fill is not None:
            found["fill"] = fill
        if counts.correct is not None:
            found["accuracy"] = counts.correct / max(counts.labels, 1)
        if counts.experts is not None:
            found |= counts.experts.summary()
        if counts.mtp is not None and counts.mtp_loss is not None:
            found |= {"mtp_loss": counts.mtp_loss, **counts.mtp.summary()}
        return {name: float(value) for name, value in found.items()}


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by tensors on a GPU, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows, which has no distributed training either

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak

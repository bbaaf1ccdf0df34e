"""Settings of the optimizer and of what changes along the run: learning rate, weight decay, the batch's size.

Nothing here imports torch. A position in the run is counted in optimizer steps, or in samples where a
setting that ends in `_samples` is given.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from contracts.configuration import Settings, added

OptimizerKind = Literal["adamw", "sgd", "muon"]
ScheduleKind = Literal["cosine", "linear", "inverse_sqrt", "wsd", "constant"]
DecayShape = Literal["linear", "cosine", "minus_sqrt", "exponential"]


class OptimizerConfig(Settings):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), SGD or Muon, with the learning-rate schedule."""

    habits: ClassVar[Mapping[str, str]] = {
        "learning_rate": "lr",
        "lr_warmup_iters": "warmup_steps",
        "lr_decay_iters": "decay_steps",
        "lr_warmup_samples": "warmup_samples",
        "lr_decay_samples": "decay_samples",
        "lr_decay_style": "schedule",
        "lr_wsd_decay_iters": "wsd_decay_steps",
        "lr_wsd_decay_samples": "wsd_decay_samples",
        "lr_wsd_decay_style": "wsd_decay",
        "optimizer": "kind",
        "adam_beta1": "beta1",
        "adam_beta2": "beta2",
        "adam_eps": "eps",
        "sgd_momentum": "momentum",
        "muon_num_ns_steps": "muon_iterations",
        "max_grad_norm": "clip_grad",
    }

    kind: OptimizerKind = added(
        "adamw",
        description="adamw; sgd with momentum; muon for the matrices of the layers and AdamW for all else.",
    )
    lr: float = Field(3e-4, gt=0, description="Peak learning rate.")
    min_lr: float = Field(3e-5, ge=0, description="Learning rate at the last step.")
    schedule: ScheduleKind = added(
        "cosine",
        description="How lr falls to min_lr: cosine, linear, inverse_sqrt, wsd (warm-up, stable, decay) or constant.",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0 to lr.")
    warmup_samples: int | None = added(None, ge=0, description="The same in samples; then all is counted in samples.")
    decay_steps: PositiveInt | None = Field(
        None, description="Step at which the cosine reaches min_lr. Default: train_steps."
    )
    decay_samples: PositiveInt | None = added(
        None, description="Samples after which min_lr is reached; then all is counted in samples."
    )
    wsd_decay_steps: PositiveInt | None = added(None, description="Steps that the decay of wsd takes, at the end.")
    wsd_decay_samples: PositiveInt | None = added(None, description="The same in samples.")
    wsd_decay: DecayShape = added(
        "minus_sqrt", description="Shape of wsd's decay: linear, cosine, minus_sqrt (1 - sqrt) or exponential."
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: float = added(0.9, ge=0, lt=1, description="Momentum of sgd.")
    nesterov: bool = added(False, description="sgd looks ahead along its momentum; muon always does.")
    muon_momentum: float = added(0.95, ge=0, lt=1, description="Momentum of muon.")
    muon_iterations: PositiveInt = added(5, le=99, description="Newton-Schulz iterations that orthogonalize an update.")
    muon_scale: Literal["match_rms_adamw", "original"] = added(
        "match_rms_adamw",
        description="Size of muon's update: 0.2 sqrt(largest dimension), so that lr and weight_decay of AdamW serve "
        "(Liu et al. 2025, arXiv:2502.16982, equation 4), or sqrt(max(1, rows / columns)).",
    )
    weight_decay: float = Field(0.1, ge=0, description="Decoupled decay of matrices; norms and biases have none.")
    end_weight_decay: float | None = added(
        None,
        ge=0,
        description="Weight decay where the decay of lr ends; linear up to there. Empty: constant.",
    )
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")
    ema_decay: float | None = added(
        None,
        gt=0,
        lt=1,
        description="Keep an exponential moving average of the weights with this decay per step, such as 0.999. "
        "Empty: none. It lies in the checkpoints; evaluate --ema measures it.",
    )

    @property
    def counts_samples(self) -> bool:
        """The schedule's position is the number of consumed samples, not of steps."""
        return (self.warmup_samples, self.decay_samples, self.wsd_decay_samples) != (None, None, None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr ({self.min_lr}) is above lr ({self.lr}). The schedule falls from lr to min_lr.")
        in_steps = [
            f"{name} ({value})"
            for name in ("warmup_steps", "decay_steps", "wsd_decay_steps")
            if (value := getattr(self, name))
        ]
        if self.counts_samples and in_steps:
            raise ValueError(f"{in_steps[0]} counts steps, and other settings count samples. Give all in samples.")
        has_length = self.wsd_decay_steps is not None or self.wsd_decay_samples is not None
        if self.schedule == "wsd" and not has_length:
            raise ValueError("schedule: wsd needs the length of its decay. Set wsd_decay_steps (or wsd_decay_samples).")
        if self.schedule != "wsd" and has_length:
            raise ValueError(f"wsd_decay_steps goes with schedule: wsd, not with {self.schedule}. Leave it out.")
        if self.wsd_decay == "exponential" and self.schedule == "wsd" and self.min_lr == 0:
            raise ValueError("wsd_decay: exponential never reaches min_lr 0. Set min_lr above 0, or another shape.")
        if self.nesterov and (self.kind != "sgd" or self.momentum == 0):
            raise ValueError("nesterov goes with kind: sgd and a momentum above 0.")
        return self

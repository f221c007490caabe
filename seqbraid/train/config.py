"""The configuration of a training run: dataclasses, read from YAML and dotted overrides by `config_file`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from os.path import expanduser
from typing import Any, Literal, get_type_hints

from ..data.records.formats import FormatName, check_format
from ..data.records.mix import parse_specs
from ..data.stream.plan import OnBadSample, OverLong
from ..layout.pieces import Policy
from ..ops.kernels import KernelOptions
from ..plan.estimate import Precision
from ..plan.memory import MemoryOptions
from ..plan.pipeline import PipelineOptions
from ..sequence_parallel.gated_delta_bytes import Choice
from .checkpoint.choose import check_resume
from .mtp_config import MtpConfig
from .step_config import StepConfig


@dataclass(frozen=True)
class MeshConfig:
    """How the processes are shared out; the product of all but `ep` is the number of processes."""

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Copies of the model that see different samples."""
    dp_shard: int = -1
    """Ranks that see different samples and share the parameters; −1 takes what the other axes leave."""
    ring: int = 1
    """Ranks along which keys and values of long sequences travel."""
    ulysses: int = 1
    """Ranks that exchange heads for tokens."""
    tp: int = 1
    """Ranks that share every matrix product."""
    ep: int = 1
    """Ranks that share the experts; carved out of `dp_shard × ring × ulysses × tp`."""


@dataclass(frozen=True)
class DataConfig:
    """The training data, and how it becomes samples and rows."""

    train: list[str | dict[str, Any]] | str = field(default_factory=list)
    """Files (globs too): .jsonl, .json, .csv, .tsv, each also as .gz or .zst, and .parquet; folders that
    `datasets` saved; or `hf:NAME`. Of several sources each may be `{path, weight, format, system,
    ignore_keys}`; with weights, they are mixed."""
    eval: list[str | dict[str, Any]] | str = field(default_factory=list)
    """Held-out data in the same formats, evaluated every `train.eval_every` steps."""
    format: FormatName = "auto"
    """The format of the records; `auto` takes each record for what its keys say."""
    system: str | None = None
    """The system prompt of conversations that have none."""
    chat_template: str | None = None
    """A chat template in place of the model's own: a file, or the text of one."""
    end_of_document: str | None = None
    """The token after each document of plain text and each plain completion; the tokenizer's `eos_token` when
    left out."""
    media_root: str = "."
    """The folder that media paths are relative to; nothing outside of it is read."""
    ignore_keys: list[str] = field(default_factory=list)
    """Keys of records and turns to ignore, such as ids and metadata; any other unknown key is refused."""
    allow_urls: bool = False
    """Download media given as http(s) URLs."""
    cache: str | None = None
    """The folder to which files without random access (compressed, `.json` arrays, CSV) are unpacked once;
    the user's folder for caches when left out."""
    cache_gib: float = 100.0
    """The most that folder may hold; what was not used for longest is deleted from it."""
    token_cache_gib: float = 8.0
    """The most it may hold of what was tokenized, kept so that a second start is quick; 0 keeps none."""
    row_tokens: int = 8192
    """Tokens of a packed row: the maximum sequence length, and the micro-batch of `ring × ulysses` ranks."""
    over_long: OverLong = "error"
    """What to do with a sample that is longer than a row: stop, leave it out, cut it to the first
    `row_tokens` tokens (text only), or split it into pieces of a row each (plain text only)."""
    on_bad_sample: OnBadSample = "error"
    """Stop at a line that cannot be used, or leave it out, count it and list it in `bad_samples.jsonl`."""
    shuffle: bool = True
    """Draw the samples of an epoch in random order."""
    buffer_size: int = 1024
    """Size of the buffer of samples from which rows are filled."""
    workers: int = 2
    """Processes per rank that tokenize and decode; 0 does it between the steps."""
    prefetch_steps: int = 2
    """Steps that are prepared ahead."""
    policy: Policy = "balanced"
    """How sequences are cut over `ring × ulysses` ranks."""
    min_pixels: int | None = None
    """Images are enlarged to at least this many pixels; by default the processor's setting."""
    max_pixels: int | None = None
    """Images are shrunk to at most this many pixels; by default the processor's setting."""
    video_min_pixels: int | None = None
    """As `min_pixels`, for videos: of a frame, or of all frames together, as the processor counts."""
    video_max_pixels: int | None = None
    """As `max_pixels`, for videos."""
    fps: float | None = None
    """Frames sampled per second of video; by default the processor's setting."""
    max_frames: int | None = None
    """Maximum number of frames sampled from a video; by default the processor's setting."""
    use_audio_in_video: bool = False
    """Use the audio of videos (Qwen3-Omni)."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters in place of full training, through peft."""

    rank: int = 0
    """Rank of the adapters; 0 trains the model itself."""
    alpha: float = 16.0
    """Their scale, divided by the rank."""
    targets: list[str] | str = "all-linear"
    """Names of the linear layers to adapt; `all-linear` means every one of the decoder."""
    dropout: float = 0.0
    """Dropout before the adapters; the same on every mesh."""
    rslora: bool = False
    """Divide the scale by the root of the rank."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: int | None = None
    """Steps between checkpoints; by default only at the end."""
    keep: int = 2
    """Number of newest checkpoints to keep, besides the best."""
    asynchronous: bool = True
    """Write while the next steps are computed."""
    on_error: Literal["stop", "continue"] = "stop"
    """If a checkpoint cannot be written (a full disk): stop, or continue and keep the previous one."""


@dataclass(frozen=True)
class TimeoutConfig:
    """Seconds without progress until the run names the rank that causes it, and ends; null: no limit."""

    start: float | None = 1800.0
    """One stage of the start (waiting for the other ranks, loading the model, resuming), or a checkpoint."""
    step: float | None = 600.0
    """One part of a step: a micro-batch, the update, an exchange between ranks, a row of an evaluation."""
    loader: float | None = 300.0
    """One sample, in the process that tokenizes and decodes it."""
    stop: float | None = 60.0
    """Any of the above, once a signal has asked the run to stop."""


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go."""

    every: int = 1
    """Steps between lines on the console if it is not a terminal; `log.jsonl` has every step."""
    sinks: list[str] | str = "tensorboard"
    """Trackers besides `log.jsonl`: tensorboard, wandb, mlflow, trackio, or one that an installed package has
    under the entry point group `seqbraid.sinks`."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run.

    >>> TrainConfig(model="tiny:llama", out="runs/a", data=DataConfig(train="a.jsonl"),
    ...             train=StepConfig(steps=3, batch_tokens=8192)).check().train.schedule
    'cosine'
    """

    model: str = ""
    """A checkpoint's folder, its name on the Hub (`owner/name` or `owner/name@revision`; a run keeps
    the commit that it began with), or `tiny:FAMILY` for a tiny model with random weights."""
    out: str = ""
    """The run's folder: checkpoints, `log.jsonl`, `config.yaml`."""
    precision: Precision = "mixed"
    """`mixed`: float32 parameters, bfloat16 compute; `bfloat16`: bfloat16 parameters with float32 master
    weights in the optimizer."""
    kernels: KernelOptions = field(default_factory=KernelOptions)
    """Kernels for attention, the gated delta rule, the loss and more; `seqbraid doctor` lists them."""
    gated_delta: Choice = "auto"
    """What gated-delta layers exchange over `ring × ulysses`: states, heads, or whichever is less."""
    freeze: list[str] = field(default_factory=list)
    """Parts to freeze: vision, merger, audio, language_model, embeddings, head, mtp, `re:PATTERN`."""
    seed: int = 0
    """Seed of the order of samples and of everything else that is random."""
    resume: str = "auto"
    """`auto`: resume from the last checkpoint in `out` if there is one; `must`: stop if there is none;
    `never`: stop if there is one; `step:N`: go back to the checkpoint of that step; `latest-intact`: skip
    damaged checkpoints, at which all others stop."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The device mesh."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    train: StepConfig = field(default_factory=StepConfig)
    """The steps."""
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    """Memory switches; none of them changes the gradient."""
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    """Pipeline stages, where `mesh.pp` is more than 1."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA."""
    mtp: MtpConfig = field(default_factory=MtpConfig)
    """Multi-token prediction."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    """How long the run waits without progress."""
    log: LogConfig = field(default_factory=LogConfig)
    """Logging."""

    def check(self) -> TrainConfig:
        """Refuse invalid settings before anything is loaded; returns the configuration with `~` expanded."""
        for name, value in (("model", self.model), ("out", self.out), ("data.train", self.data.train)):
            if not value:
                raise ValueError(f"{name} is empty; set it in the config or with --{name}=…")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be at least 0 and below 2**63")
        check_resume(self.resume)
        steps, data = self.train, self.data
        steps.check()
        self.mtp.check()
        positive = {
            "log.every": self.log.every, "data.row_tokens": data.row_tokens,
            "checkpoint.every": self.checkpoint.every, "checkpoint.keep": self.checkpoint.keep,
            "data.prefetch_steps": data.prefetch_steps,
        }  # fmt: skip
        for name, number in positive.items():
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        check_format(data.format)
        parse_specs(data.train)
        if any(spec.weight is not None for spec in parse_specs(data.eval, "data.eval")):
            raise ValueError(
                "data.eval has weights, but an evaluation is one pass over all of it; remove them"
            )
        if not data.cache_gib > 0:
            raise ValueError(f"data.cache_gib={data.cache_gib} must be above 0")
        if not data.token_cache_gib >= 0:
            raise ValueError(f"data.token_cache_gib={data.token_cache_gib} must be at least 0 (0 keeps none)")
        if steps.batch_tokens % data.row_tokens:
            below = steps.batch_tokens // data.row_tokens * data.row_tokens
            choices = " or ".join(str(n) for n in (below, below + data.row_tokens) if n)
            raise ValueError(
                f"train.batch_tokens={steps.batch_tokens} is not a multiple of "
                f"data.row_tokens={data.row_tokens}; use {choices}"
            )
        for name, seconds in as_dict(self.timeouts).items():
            if seconds is not None and not seconds > 0:
                raise ValueError(f"timeouts.{name}={seconds} must be above 0, or null to wait forever")
        if self.lora.rank < 0:
            raise ValueError(f"lora.rank={self.lora.rank} must be at least 0 (0 trains the model itself)")
        if self.lora.rank and self.freeze:
            raise ValueError(
                "with lora the model itself is frozen already; leave `freeze` out, or set lora.rank=0"
            )
        if self.lora.rank and self.mtp.fresh:
            raise ValueError(
                "mtp.fresh=true with lora would leave random weights frozen under their adapters; train the "
                "module by itself first (mtp.only=true), or leave lora out"
            )
        if self.mtp.only and (self.lora.rank or self.freeze):
            raise ValueError(
                "mtp.only=true freezes all but multi-token prediction; leave `freeze` and lora out beside it"
            )
        if steps.eval_every is not None and not data.eval:
            raise ValueError(f"train.eval_every={steps.eval_every} but data.eval names no file")
        if steps.patience is not None and not data.eval:
            raise ValueError(f"train.patience={steps.patience} but data.eval names no file to evaluate on")
        return replace(
            self,
            model=expanduser(self.model),
            out=expanduser(self.out),
            data=replace(
                data,
                train=_at_home(data.train),
                eval=_at_home(data.eval),
                chat_template=_template(data.chat_template),
                media_root=expanduser(data.media_root),
                cache=None if data.cache is None else expanduser(data.cache),
            ),
        )


def as_dict(config: Any) -> dict[str, Any]:
    """Nested dicts of a configuration."""
    return {
        f.name: as_dict(value) if is_dataclass(value := getattr(config, f.name)) else value
        for f in fields(config)
    }


def keys(kind: type = TrainConfig, prefix: str = "") -> list[str]:
    """All dotted names of the configuration."""
    found = []
    for name, hint in get_type_hints(kind).items():
        found += keys(hint, f"{prefix}{name}.") if is_dataclass(hint) else [prefix + name]
    return found


Paths = list[str | dict[str, Any]] | str


def _at_home(paths: Paths) -> Paths:
    """With `~` as the home folder; a shell leaves it alone behind a `=`."""
    if isinstance(paths, str):
        return expanduser(paths)
    return [
        expanduser(one) if isinstance(one, str) else {**one, "path": expanduser(one["path"])} for one in paths
    ]


def _template(given: str | None) -> str | None:
    """The text of a chat template, so that a run keeps the one that it began with."""
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        with open(expanduser(given), encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.chat_template={given[:200]!r} is not a template ({{{{ … }}}} or {{% … %}}) and cannot be "
            f"read as a file: {error}"
        ) from None


OF_A_MACHINE = ("model", "out", "data.train", "data.eval", "data.media_root", "data.workers")
OF_A_MACHINE += ("data.cache", "data.cache_gib", "data.token_cache_gib")
"""What may differ from rank to rank: where things lie. What is in them is compared elsewhere."""


def shared(config: TrainConfig) -> dict[str, Any]:
    """What no two ranks may have otherwise: they would wait for each other, or learn something else."""
    return {name: reduce(getattr, name.split("."), config) for name in keys() if name not in OF_A_MACHINE}

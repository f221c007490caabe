"""From a configuration to what a run needs: model, processor, encoder, loader."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..comm.consensus import raised_by_all
from ..comm.gpus import own_gpu
from ..comm.rendezvous import join_job, set_timeouts
from ..comm.whereabouts import Whereabouts
from ..data.encode import SampleEncoder
from ..data.media.files import MediaFiles
from ..data.media.processor import load_processor
from ..data.records.cache import GIB, RecordCache
from ..data.records.mix import open_mix
from ..data.records.source import Source
from ..data.stream.loader import Loader, Reading
from ..data.stream.plan import RowOptions
from ..data.stream.token_cache import TokenCache
from ..data.stream.workers import WorkerOptions
from ..data.tiny import tiny_training_model
from ..distributed.api import parallelize
from ..distributed.weights import spread_weights
from ..layout.packing import CostModel
from ..mesh import Mesh
from ..models.braided import BraidedModel
from ..models.mtp import attach_mtp, train_mtp_only
from ..plan.flops import ModelFlops
from .batches import StepMaker
from .config import DataConfig, Paths, TrainConfig, as_dict
from .freeze import freeze
from .lora import LoraOptions, add_lora
from .weights import checkpoint_folder, empty_model, load_stock, weights_fingerprint

FOR_EVER = timedelta(days=365)
TINY = "tiny:"
MEDIA_OPTIONS = ("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "fps", "max_frames")


@dataclass(frozen=True)
class EncoderFactory:
    """How a worker makes its encoder: from names, so that it can be sent to another process."""

    model: str
    data: DataConfig
    config: Any

    def __call__(self) -> SampleEncoder:
        """The encoder."""
        data = self.data
        asked = {name: getattr(data, name) for name in MEDIA_OPTIONS}
        return SampleEncoder(
            load_model_processor(self.model, data.chat_template),
            self.config,
            MediaFiles(Path(data.media_root), allow_urls=data.allow_urls),
            use_audio_in_video=data.use_audio_in_video,
            ignore_keys=data.ignore_keys,
            format=data.format,
            system=data.system,
            end_of_document=data.end_of_document,
            **{name: value for name, value in asked.items() if value is not None},
        )


def make_mesh(config: TrainConfig, where: Whereabouts | None = None) -> Mesh:
    """The mesh of this job's processes, which meet here; `where` is told which are still missing."""
    where = Whereabouts() if where is None else where
    check_launcher(os.environ)
    mesh = Mesh(**as_dict(config.mesh))
    if mesh.world_size > 1:
        start = config.timeouts.start
        # The watchdog is to be first: it says more.
        limit = FOR_EVER if start is None else timedelta(seconds=start + 30)
        join_job(limit=limit, tell=partial(setattr, where, "waits_for"))
    return mesh


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse processes that were started as several, but of which each would train by itself."""
    for name, what in (("SLURM_STEP_NUM_TASKS", "srun"), ("OMPI_COMM_WORLD_SIZE", "mpirun")):
        number = environment.get(name, "1")
        if number != "1" and "RANK" not in environment:
            raise ValueError(
                f"{what} has started {number} processes ({name}={number}), but there is no RANK, so each "
                "would train alone; let it start one torchrun on each node instead, see docs/multi_node.md"
            )


def set_group_timeouts(config: TrainConfig, mesh: Mesh) -> None:
    """Let collectives wait longer than the watchdog does, which says more than they."""
    if mesh.cpu_group is None:
        return
    limits = (config.timeouts.start, config.timeouts.step, config.timeouts.loader)
    known = [seconds for seconds in limits if seconds is not None]
    longest = FOR_EVER if len(known) < len(limits) else timedelta(seconds=2 * max(known) + 60)
    groups = [group for found in mesh.device_meshes.values() for group in found.get_all_groups()]
    set_timeouts([mesh.cpu_group, *groups], longest)


def make_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    gpu = own_gpu()
    return torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def make_model(config: TrainConfig, weights: bool = True) -> PreTrainedModel:
    """The stock model with what is trained of it decided: adapters, or all but the frozen parts.

    Without `weights` a checkpoint's are not read, and its parameters are on the meta device.
    """
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    if config.model.startswith(TINY):
        model = tiny_training_model(config.model.removeprefix(TINY), config.seed, dtype)[0]
        if not weights:
            model.to("meta")
            model.tie_weights()
    elif weights:
        model = load_stock(config.model, dtype).model
    else:
        with torch.device("meta"):
            model = empty_model(checkpoint_folder(config.model), dtype)
    attach_configured_mtp(config, model, weights)
    lora = config.lora
    if lora.rank:
        options = LoraOptions(lora.rank, lora.alpha, lora.targets, lora.dropout, lora.rslora)
        add_lora(model, options, config.seed)
    elif config.freeze:
        freeze(model, config.freeze)
    elif config.mtp.only:
        train_mtp_only(model)
    return model


def attach_configured_mtp(config: TrainConfig, model: PreTrainedModel, weights: bool = True) -> None:
    """Give the model its module of multi-token prediction, where the run trains it."""
    source = None if config.model.startswith(TINY) else str(checkpoint_folder(config.model))
    options = config.mtp.options(source, config.seed)
    if options is not None:
        attach_mtp(model, options, weights)


def adapted_weights(config: TrainConfig) -> str | None:
    """What identifies the weights under adapters, which no step changes; None where there are no adapters."""
    if not config.lora.rank:
        return None
    if config.model.startswith(TINY):
        return f"{config.model}, seed {config.seed}"
    return weights_fingerprint(checkpoint_folder(config.model))


def load_model_processor(name: str, chat_template: str | None = None) -> Any:
    """The processor or tokenizer that belongs to a model, with another chat template if one is given."""
    if name.startswith(TINY):
        processor = tiny_training_model(name.removeprefix(TINY), 0, torch.float32)[1]
    else:
        processor = load_processor(checkpoint_folder(name))
    if chat_template is not None:
        processor.chat_template = chat_template
        getattr(processor, "tokenizer", processor).chat_template = chat_template
    return processor


def braid(config: TrainConfig, mesh: Mesh, device: torch.device) -> BraidedModel:
    """The model on the mesh, as the configuration wants it; the first rank alone reads the weights."""
    with raised_by_all(mesh.cpu_group):
        source = make_model(config) if mesh.rank == 0 else None
        shell = source.to(device) if mesh.world_size == 1 else make_model(config, weights=False)
    model = parallelize(
        shell,
        mesh,
        gated_delta=config.gated_delta,
        memory=config.memory,
        kernels=config.kernels,
        compute_dtype=torch.bfloat16 if config.precision == "mixed" else None,
        pipeline=config.pipeline,
    )
    if mesh.world_size > 1:
        spread_weights(model, source, device)
    return model


def open_data(paths: Paths, data: DataConfig, mesh: Mesh) -> Source:
    """The records of some files; where one rank cannot read them, all refuse."""
    with raised_by_all(mesh.cpu_group):
        source = open_mix(paths, RecordCache(data.cache, data.cache_gib * GIB))
        source.fingerprint, len(source)  # read now, and then known
    return source


def make_loader(
    config: TrainConfig,
    model_config: Any,
    mesh: Mesh,
    lists_bad: bool = True,
    where: Whereabouts | None = None,
    flops: ModelFlops | None = None,
) -> Loader:
    """The stream of training steps; bad samples are listed in the run's folder."""
    bad_file = Path(config.out) / "bad_samples.jsonl" if lists_bad else None
    prepare = StepMaker(model_config, mesh, config.data.policy, flops, config.mtp.depth)
    return _loader(config, config.data.train, bad_file, row_options(config, flops), prepare, where)


def make_eval_loader(config: TrainConfig, model_config: Any, mesh: Mesh) -> Loader:
    """One pass over the held-out data, a row for each data rank at a time."""
    rows = replace(row_options(config), rows_per_step=mesh.data_world_size, epochs=1, shuffle=False)
    bad_file = Path(config.out) / "bad_eval_samples.jsonl"
    prepare = StepMaker(model_config, mesh, config.data.policy, mtp_depth=config.mtp.depth)
    return _loader(config, config.data.eval, bad_file, rows, prepare)


def row_options(config: TrainConfig, flops: ModelFlops | None = None) -> RowOptions:
    """How the rows of training steps are made."""
    data, step = config.data, config.train
    return RowOptions(
        data.row_tokens,
        rows_per_step=step.batch_tokens // data.row_tokens,
        epochs=step.epochs,
        seed=config.seed,
        shuffle=data.shuffle,
        buffer_size=data.buffer_size,
        over_long=data.over_long,
        on_bad_sample=data.on_bad_sample,
        cost=CostModel() if flops is None else flops.cost_model(),
    )


def _loader(
    config: TrainConfig,
    paths: Paths,
    bad_file: Path | None,
    rows: RowOptions,
    prepare: StepMaker,
    where: Whereabouts | None = None,
) -> Loader:
    data, mesh = config.data, prepare.mesh
    workers = WorkerOptions(data.workers, data.prefetch_steps, config.timeouts.loader)
    make_encoder = EncoderFactory(config.model, data, prepare.config)
    tokens = TokenCache(data.cache, data.token_cache_gib * GIB) if data.token_cache_gib else None
    reading = Reading(open_data(paths, data, mesh), make_encoder, bad_file, tokens)
    return Loader(reading, mesh, rows, workers, prepare, where)

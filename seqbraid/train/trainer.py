"""The run: steps from the loader, until it is done or told to stop; every bit of it resumable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..comm.consensus import check_alike, gather_objects, raised_by_all
from ..comm.whereabouts import Stopped, Whereabouts
from ..data.records.contents import contents
from ..data.stream.loader import StepData
from ..distributed.gradients import counted, gradient_norm
from ..mesh import Mesh
from ..models.agreement import Agreed
from ..models.step import Step, agree_on, forward_backward
from ..plan.flops import ModelFlops, peak_flops
from .best import Best
from .changes import changes, check_unchanged, others
from .checkpoint.checkpoints import Checkpoints, Failed, Published
from .checkpoint.files import folder_name
from .config import TrainConfig, as_dict, shared
from .ending import Ending, write_ending, write_failure
from .evaluate import evaluate
from .guard import SpikeGuard
from .identity import agree_on_model, check_same_model
from .log import check_sinks
from .lora import save_adapter
from .metrics import StepCounts, StepMeter
from .news import News
from .nonfinite import StepFound, refuse_not_finite, stop_non_finite
from .optimizer import check_entries, make_optimizer
from .optimizers.kinds import OptimizerKind
from .profile_steps import StepProfiler
from .recompute import settle_checkpointing
from .run_folder import RunFolder, run_sinks, versions, write_description
from .seeds import drawn_seed, seed_everything
from .setup import (
    adapted_weights,
    braid,
    make_device,
    make_eval_loader,
    make_loader,
    open_data,
    set_group_timeouts,
)
from .signals import stop_on_signals
from .update import update
from .weights import split_revision


class Trainer:
    """A model, its data and its optimizer, and the loop over steps; `where` is told what it is at."""

    def __init__(self, config: TrainConfig, mesh: Mesh, where: Whereabouts | None = None) -> None:
        self.config = config
        self.mesh = mesh
        self.where = Whereabouts() if where is None else where
        self.where.starts("looking for a checkpoint to resume from")
        check_alike(mesh.cpu_group, shared(config))
        with raised_by_all(mesh.cpu_group):
            if mesh.rank == 0:
                check_sinks(config.log.sinks)
        self.folder = Path(config.out)
        self.place = RunFolder(config.out, mesh)
        try:
            self._prepare()
        except BaseException as error:
            if mesh.rank == 0:
                write_failure(self.folder, 0, None, error)
            self.place.release()
            raise

    def _prepare(self) -> None:
        """All that can be refused, before the first step."""
        mesh = self.mesh
        self.config, self.identity = agree_on_model(self.config, mesh)
        config = self.config
        self.device = make_device()
        with raised_by_all(mesh.cpu_group):
            base = adapted_weights(config)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            mesh,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            on_error=config.checkpoint.on_error,
            base=base,
        )
        last, state = self._last()
        seed_everything(config.seed)
        with raised_by_all(mesh.cpu_group):
            OptimizerKind.of(config.train).check_ranks(mesh.world_size)
            if mesh.rank == 0:
                (self.folder / "model").mkdir(parents=True, exist_ok=True)
        over = f" and sharding it over {mesh.world_size} ranks" if mesh.world_size > 1 else ""
        self.where.starts(f"loading the model {config.model}{over}")
        memory, self.chosen = settle_checkpointing(config, mesh, self.device, state)
        self.checkpointing = memory.checkpointing
        self.model = braid(replace(config, memory=memory), mesh, self.device)
        if self.model.pipeline is not None:
            self.model.pipeline.moves = self.where.moves
        set_group_timeouts(config, mesh)
        self.model_config = self.model.model.config
        self.flops = ModelFlops.if_known(self.model.structure)
        self.optimizer = make_optimizer(self.model, config.train)
        self.where.starts("opening the data and starting its workers")
        # Refused now if at all, not when it is first evaluated.
        self.eval_files = contents(open_data(config.data.eval, config.data, mesh)) if config.data.eval else {}
        self.loader = make_loader(config, self.model_config, mesh, flops=self.flops, where=self.where)
        self.step = 0
        """Steps that are done, with those that were skipped."""
        self.trained = 0
        """Steps among them that had a label, and so changed the weights."""
        self.progress = 0.0
        self.best = Best(config.train.best_metric, config.train.patience)
        self.guard = SpikeGuard(config.train.skip_spikes, mesh)
        self.latest: dict[str, float] = {}
        """The numbers that were logged last, by name."""
        self.without_reasoning = 0
        """Turns read so far that are trained without their reasoning."""
        self.changes: list[str] = []
        """What a resumed run has otherwise than before."""
        if last is not None:
            self.where.starts(f"reading the checkpoint {last.name}")
            self._resume(last)
        # Nothing is left that could refuse the run.
        write_description(self.folder, self.config, self.model_config, mesh)
        compute = torch.float32 if config.precision == "float32" else torch.bfloat16
        self.meter = StepMeter(mesh.world_size, peak_flops(self.device, compute), self.device)
        self.asked_by: str | None = None
        """The signal that asked this rank to stop."""
        self.saved = self.step if last is not None else -1
        self.published = None if last is None else last.name

    @property
    def stop(self) -> bool:
        """Whether this rank, or one that it has heard of, was asked to stop."""
        return self.where.stop

    @stop.setter
    def stop(self, asked: bool) -> None:
        self.where.stop = asked

    def run(self) -> Ending:
        """Train to the end, or until a signal asks to stop; the last step is always saved."""
        self.where.starts(f"preparing the samples of step {self.step + 1}")  # before there is a bar
        with (
            stop_on_signals(self, says=self.mesh.rank == 0),
            run_sinks(self.folder, self.config, self.mesh, self.step + 1) as sinks,
        ):
            self.news = News(sinks, self.mesh.cpu_group)
            try:
                ending = self._run()
            except BaseException as error:
                self.checkpoints.leave()
                write_failure(self.folder, self.mesh.rank, self.step, error)
                raise
            else:
                write_ending(self.folder, self.mesh, ending)
            finally:
                self.place.release()
        return ending

    def _run(self) -> Ending:
        found = [("changed", change) for change in self.changes]
        if self.chosen is not None:
            kind = "chosen" if self.config.memory.checkpointing == "auto" else "memory"
            found.append((kind, self.chosen))
        self.news.start(self.step, found)
        say = self.news.sinks.say
        profiler = StepProfiler(self.config.train.profile, self.folder, self.mesh.rank, say)
        self.meter.start()
        stopped = False
        try:
            while not (stopped or self._done()):
                try:
                    data = self._data()
                except Stopped:
                    stopped = True
                    break
                if data is None:
                    self._check_trained()
                    break
                with profiler.around(self.step + 1):
                    stopped = self._step(data)
            if self.best.stops:
                self.news.stopped_early(self.step, self.best.sentence())
            stopped = stopped and not (self._done() or self.loader.at_end)
            if self.saved != self.step:
                self._save()
            self.where.at("waiting for the last checkpoint to be written", limit="start")
            self._report(self.checkpoints.finish())
            if self.config.lora.rank:
                name = split_revision(self.config.model)[0]
                save_adapter(self.model, self.folder / "adapter", base_name=name)
        finally:
            self.loader.close()
        if self.published != folder_name(self.step):
            return Ending("unsaved", self.step, self.published)
        if stopped:
            names = gather_objects(self.mesh.cpu_group, self.asked_by)
            asked_by = next((name for name in names if name), None)
            return Ending("preempted", self.step, self.published, asked_by)
        return Ending("finished", self.step, self.published)

    def _done(self) -> bool:
        steps = self.config.train.steps
        return self.best.stops or (steps is not None and self.step >= steps)

    def _data(self) -> StepData | None:
        """What the next step is made of; None at the end of the data."""
        # Workers have a limit of their own for each sample; without any, this thread is at the samples.
        self.where.at("waiting for data", self.step + 1, "step" if self.config.data.workers else "loader")
        data = next(self.loader, None)
        before, self.without_reasoning = self.without_reasoning, self.loader.without_reasoning
        if self.without_reasoning and not before:
            self.news.reasoning_left_out(self.without_reasoning)
        return data

    def _step(self, data: StepData) -> bool:
        """One optimizer step; whether a rank was asked to stop."""
        config = self.config.train
        self.where.at("agreeing on the step with the other ranks", limit="step")
        # Nothing random is remembered: each step starts from its own seed, so a resumed one draws the same.
        seed_everything(self.config.seed, self.step, self.mesh.rank)
        seed, work = drawn_seed(self.config.seed, self.step), data.prepared
        agreed = agree_on(self.model, work, seed=seed, flag=self.stop)
        if not agreed.label_tokens:
            return self._skip(agreed)
        out = forward_backward(
            self.model, work, seed=seed, agreed=agreed, after=self._after_micro_batch(work)
        )
        self.where.at("gradient norm and optimizer update")
        by_parameter = self.optimizer.gradients()
        gradients = list(by_parameter.values())
        norm = self.guard.agreed(gradient_norm(counted(self.model, by_parameter), self.mesh))
        loss = float(out.mean_loss)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            found = StepFound(self.step + 1, out, norm)
            stop_non_finite(self.folder, self.mesh.rank, self.model, self.optimizer, data, found)
        before, self.progress = self.progress, self._progress(self.step + 1)
        done = update(self.optimizer, self.guard, config, gradients, norm, (before, self.progress))
        self.step += 1
        self.trained += done.skipped is None
        metrics = self.meter.step(
            StepCounts.of(agreed, out),
            loss=loss,
            grad_norm=norm,
            lr=done.metrics["lr"],
            data_wait_s=data.wait_s,
            epoch=data.epoch,
            fill=data.fill,
        )
        if self.model.pipeline is not None:
            metrics |= self.model.pipeline.times().summary()
        if done.skipped:
            self.news.skipped(self.step, done.skipped)
        self._after_step({**metrics, **done.metrics}, agreed.flag)
        return agreed.flag

    def _after_micro_batch(self, work: Step) -> Callable[[int], None]:
        """What is done when the backward of a micro-batch is."""
        number_of_all = len(work.batches)
        self.where.at(f"forward and backward of micro-batch 1 of {number_of_all}")

        def after(number: int) -> None:
            if number < number_of_all:
                self.where.at(f"forward and backward of micro-batch {number + 1} of {number_of_all}")
            self.optimizer.gather_gradients()

        return after

    def _skip(self, agreed: Agreed) -> bool:
        """A step without a label counts, also for the learning rate, but changes no weight and no moment."""
        self.step += 1
        self.progress = self._progress(self.step)
        self.news.skipped(self.step, f"none of its {agreed.counts['tokens']:,} tokens has a label")
        if self._done() or self.loader.at_end:
            self._check_trained()
        self._after_step({}, agreed.flag)
        return agreed.flag

    def _check_trained(self) -> None:
        """Refuse to end as if something had been trained."""
        if not self.trained:
            cut, bad = self.loader.over_long.without_labels, self.loader.bad.count
            raise ValueError(
                f"none of {self.step} steps had a label, so nothing was trained: {cut} samples have no "
                f"label among their first data.row_tokens={self.config.data.row_tokens} tokens, {bad} are "
                "bad"
            )

    def _after_step(self, metrics: dict[str, float], stop: bool) -> None:
        """Evaluate, log and save what is due."""
        checkpoint, train = self.config.checkpoint, self.config.train
        due = train.eval_every is not None and self.step % train.eval_every == 0
        improved = False
        # Not because of a signal: who sends one does not wait long, and the resumed run is to be the same.
        if self.config.data.eval and (due or self._done() or self.loader.at_end):
            held_out = make_eval_loader(self.config, self.model_config, self.mesh)
            found = evaluate(self.model, held_out, self.where)
            metrics = {**metrics, **found}
            improved = self.best.add(self.step, found)
        self.where.at("writing the log")
        self.latest |= metrics
        if metrics:
            self.news.log(self.step, metrics)
        self._report(self.checkpoints.poll())
        if improved or stop or self._done() or (checkpoint.every and self.step % checkpoint.every == 0):
            self._save()
        self.meter.start()

    def _progress(self, steps_done: int) -> float:
        """The part of the run that is behind it after so many steps, of which the loader gave the last."""
        steps = self.config.train.steps
        if steps is not None:
            return steps_done / steps
        done = self.loader.progress()
        assert done is not None, "a run without train.steps has train.epochs"
        return done

    def _save(self) -> None:
        self.place.check()
        refuse_not_finite(self.model, self.optimizer, self.mesh, self.step, self.config.train.lr)
        state = {
            "step": self.step,
            "trained": self.trained,
            **self.best.state_dict(),
            "guard": self.guard.state_dict(),
            "loader": self.loader.state_dict(),
            "config": as_dict(self.config),
            "identity": self.identity,
            "mesh": self.mesh.sizes,
            "checkpointing": self.checkpointing,
            "versions": versions(),
            "eval_files": self.eval_files,
        }
        self.saved = self.step
        self.where.at(f"saving step {self.step}, once the previous save is written", limit="start")
        self.checkpoints.save(self.step, self.model, self.optimizer, state)
        if self.best.now.get("step") == self.step:
            self.checkpoints.mark_best(self.step)

    def _report(self, events: list[Published | Failed]) -> None:
        if not events:
            return
        self.news.checkpoints(events, self.published)
        for event in events:
            if isinstance(event, Published):
                self.published = event.path.name
            else:
                self.best.lost(event.step)

    def _last(self) -> tuple[Path | None, dict[str, Any] | None]:
        """The checkpoint to go on from, and its state."""
        last = self.checkpoints.last(self.config.resume)
        if last is None:
            return None, None
        state = self.checkpoints.state(last)
        check_unchanged(state["config"], as_dict(self.config), last)
        check_same_model(state.get("identity"), self.identity, last)
        return last, state

    def _resume(self, path: Path) -> None:
        state = self.checkpoints.load(path, self.model, self.optimizer)
        self.loader.load_state_dict(state["loader"])
        self.checkpoints.set_back(path, self.config.resume)
        with raised_by_all(self.mesh.cpu_group):
            check_entries(self.optimizer)
        self.step = state["step"]
        self.best.load_state_dict(state)
        self.guard.load_state_dict(state.get("guard", {}))
        self.trained = state.get("trained", self.step)
        self.changes = changes(state["config"], as_dict(self.config), self.step)
        self.changes += others(state, versions(), self.eval_files)
        # Of the run as it is now: its number of steps or epochs may have changed.
        self.progress = self._progress(self.step)

"""`Trainer`: that of transformers, for a model on any mesh.

What happens when (arguments, callbacks, logging, evaluation, saving) is the stock Trainer's. What happens in
a step is ours: rows are packed, all micro-batches of an optimizer step are divided once by its label tokens
over all ranks, and accelerate neither wraps the model nor scales anything.
"""

from __future__ import annotations

import copy
from functools import partial
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, denumpify_detensorize, seed_worker

from ..comm.consensus import gather_ints, raised_by_all
from ..distributed.gradients import clip_gradients, counted, gradient_norm
from ..mesh import Mesh
from ..models.agreement import Agreed
from ..models.output import StepOutput
from ..models.step import Step, agree_on, forward_backward
from ..plan.flops import ModelFlops
from ..plan.memory import MemoryOptions
from ..train.batches import COUNTS, StepMaker
from ..train.seeds import drawn_seed
from .arguments import check_arguments, without_stock_checkpointing
from .braiding import OWN, Braiding
from .checkpoint import ShardedState, read_beside, save_beside, save_weights
from .evaluation import run_through
from .optimizer import gradients_by_parameter, partwise, stock_optimizer
from .rows import Dealt, Numbers, RowSampler, RowSettings, lengths_of, set_epoch
from .samples import LabelledRowMaker, RowMaker, bad_step

SCHEDULER = "scheduler.pt"
STOCK = list(signature(transformers.Trainer).parameters)
"""What the stock Trainer takes, the model and the arguments first."""
CONTROLS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Trainer(transformers.Trainer):
    """The stock Trainer for a model on any mesh.

    Args:
        model: what `parallelize` gave, or a stock model (or a `PeftModel` with LoRA), which is put on `mesh`.
        args: `TrainingArguments`; what cannot be kept is refused by name. `per_device` means per data rank.
        mesh: of a stock model; by default all processes see different samples (`Mesh(dp_shard=-1)`).
        row_tokens: pack items into rows of so many tokens; `per_device_train_batch_size` then counts rows. By
            default each batch is one row, without padding.
        policy: how rows are split; see `seqbraid.pack`.
        gated_delta, memory, kernels: of a stock model; see `seqbraid.parallelize`. Without `memory`,
            activation checkpointing in the arguments is `MemoryOptions(checkpointing="full")`.
        loss: a loss of your own; see `seqbraid.forward_backward`.
        stock: the other arguments of the stock Trainer.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        mesh: Mesh | None = None,
        row_tokens: int | None = None,
        memory: MemoryOptions | None = None,
        **stock: Any,
    ) -> None:
        ours = {name: stock.pop(name) for name in OWN if name in stock}
        stock |= dict(zip(STOCK[2:], positional, strict=False))
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        # A subclass that prepares the model, as TRL's does, has set it before it comes here.
        braiding: Braiding = vars(self).setdefault(
            "braiding", Braiding(mesh, row_tokens, memory=memory, **ours)
        )
        check_arguments(args)
        for name in ("model_init", "compute_loss_func", "preprocess_logits_for_metrics"):
            if stock.get(name) is not None:
                raise ValueError(f"{name} is not supported: {UNSUPPORTED[name]}")
        self.braided = braiding.braid(model, args)
        self.mesh = self.braided.mesh
        args = copy.copy(args)
        without_stock_checkpointing(args)
        self._state = ShardedState(self.braided)
        self._flops = ModelFlops.if_known(self.braided.model)
        self._work: Step = Step([])
        self._agreed: Agreed | None = None
        self._arrived = 0
        super().__init__(self.braided.model, args, **stock)

    # What accelerate and the stock Trainer would do to the model

    def create_accelerator_and_postprocess(self) -> None:
        """Accelerate moves, wraps and scales nothing."""
        super().create_accelerator_and_postprocess()
        if (
            self.is_fsdp_enabled
            or self.is_deepspeed_enabled
            or getattr(self.accelerator, "parallelism_config", None) is not None
        ):
            raise ValueError(
                "accelerate is configured for FSDP, DeepSpeed or a parallelism of its own; parallelize "
                "shards the model already: start with torchrun, or configure accelerate without them"
            )
        self.accelerator.prepare = lambda *found, **_: found if len(found) > 1 else found[0]

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """It is where it belongs."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return model

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Torch's own on this rank's parts, with float32 master weights where parameters are narrower."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if getattr(kind, "__module__", "").startswith("torch.optim."):
                self.optimizer_cls_and_kwargs = partwise(kind), settings
        return super().create_optimizer(model)

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The rows of this data rank."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset")
        size, row_tokens = self._train_batch_size, self.braiding.row_tokens
        return self._rows(
            self.train_dataset,
            "Training",
            RowSettings(
                items=size if row_tokens is None else 1,
                rows=1 if row_tokens is None else size,
                row_tokens=row_tokens,
                shuffle=getattr(self.args, "train_sampling_strategy", "random") != "sequential",
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                drop_last=self.args.dataloader_drop_last,
            ),
            RowMaker,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Held-out data, `per_device_eval_batch_size` samples to a row."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        found = self.eval_dataset if eval_dataset is None else eval_dataset
        if found is None:
            raise ValueError("evaluation needs an eval_dataset")
        settings = RowSettings(items=self.args.eval_batch_size, shuffle=False)
        return self._rows(found, "Evaluation", settings, LabelledRowMaker)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As held-out data."""
        return self.get_eval_dataloader(test_dataset)

    def _rows(self, dataset: Any, what: str, settings: RowSettings, kind: type[RowMaker]) -> DataLoader[Any]:
        columns, lengths = getattr(dataset, "column_names", None), None
        if "seq_lengths" in (columns or ()):
            raise ValueError(
                "the data set has seq_lengths: its rows were packed before, and would be read as single "
                "samples; give single samples, and row_tokens= to the trainer"
            )
        is_stream = not hasattr(dataset, "__getitem__") or isinstance(
            dataset, torch.utils.data.IterableDataset
        )
        if settings.row_tokens is not None and not is_stream:
            lengths = lengths_of(dataset, self.args.length_column_name)
        if columns is None:
            collator = self._get_collator_with_removed_columns(self.data_collator, description=what)
        else:
            collator, dataset = self.data_collator, self._remove_unused_columns(dataset, description=what)
        if getattr(collator, "mlm", False):
            raise ValueError("the collator masks tokens, but the loss is that of the next one; set mlm=False")
        mtp = self.braided.parts.mtp
        depth = 0 if mtp is None else mtp.module.options.depth
        steps = StepMaker(self.braided.model.config, self.mesh, self.braiding.policy, self._flops, depth)
        if is_stream:
            self._check_stream(settings)
            dealt = Dealt(dataset, settings.items, self.mesh)
            return DataLoader(dealt, batch_size=None, collate_fn=kind(None, collator, steps))
        workers = self.args.dataloader_num_workers
        return DataLoader(
            Numbers(len(dataset)),
            batch_sampler=RowSampler(settings, len(dataset), lengths, self.mesh),
            collate_fn=kind(dataset, collator, steps),
            num_workers=workers,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=self.mesh.data_rank),
        )

    def _check_stream(self, settings: RowSettings) -> None:
        if settings.row_tokens is not None:
            raise ValueError(
                "packing needs the lengths of all items ahead, but the data set is a stream; leave packing "
                "out: then each batch is one row"
            )
        if self.args.dataloader_num_workers:
            raise ValueError(
                f"dataloader_num_workers={self.args.dataloader_num_workers} with a stream is not supported: "
                "each worker would read it all, or an unknown part of it; use 0"
            )

    def get_total_train_batch_size(self, args: Any) -> int:
        """Of an optimizer step, over the data ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.mesh.data_world_size

    # A step

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        set_epoch(kwargs["train_dataloader"], kwargs["epoch"])
        return super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: Any
    ) -> tuple[list[Any], int | None]:
        """The micro-batches of an optimizer step; the ranks agree on it here, once."""
        try:
            found = list(islice(epoch_iterator, num_batches))
        except Exception as error:  # a worker that died, here alone
            found = [bad_step(error)]
        if not found:
            return [], None
        counts = {name: sum(step.counts[name] for step in found) for name in COUNTS}
        self._work = Step([batch for step in found for batch in step.batches], counts)
        self._arrived = 0
        self.braided.train()
        self._agreed = agree_on(self.braided, self._work, seed=self._seed(), loss=self.braiding.loss)
        return found, self._agreed.label_tokens

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Nothing, until the last micro-batch of the step is there; then forward and backward of all."""
        self._arrived += len(inputs.batches)
        if self._arrived < len(self._work.batches):
            return torch.zeros((), device=self.args.device)
        assert self._agreed is not None
        optimizer = stock_optimizer(self.optimizer)
        gather = getattr(optimizer, "gather_gradients", None)
        out = forward_backward(
            self.braided,
            self._work,
            self.braiding.loss,
            seed=self._seed(),
            agreed=self._agreed,
            after=None if gather is None else lambda _: gather(),
        )
        if not self._agreed.label_tokens:  # no weight and no moment changes
            self.braided.zero_grad()
            optimizer.zero_grad()
        if self.args.include_num_input_tokens_seen not in (False, "no"):
            self.state.num_input_tokens_seen += self._agreed.counts["tokens"]
        self.observe(out, self._agreed)
        self._work = Step([])
        return out.mean_loss.to(self.args.device, torch.float32)

    def observe(self, out: StepOutput, agreed: Agreed) -> None:
        """For subclasses: what a step gave, the same on every rank."""

    def _seed(self) -> int:
        """What dropout is drawn from, as in `seqbraid train`."""
        return drawn_seed(self.args.seed, self.state.global_step)

    def _clip_grad_norm(self, model: Any) -> float:
        norm = self._get_grad_norm(model)
        gradients = list(gradients_by_parameter(self.optimizer).values())
        clip_gradients(gradients, norm, self.args.max_grad_norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        if grad_norm is not None:
            return grad_norm
        by_parameter = gradients_by_parameter(self.optimizer)
        return gradient_norm(counted(self.braided, by_parameter), self.mesh)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counted once a step, over all ranks."""

    def floating_point_ops(self, inputs: Any) -> float:
        """This rank's share of the model's arithmetic, which the stock Trainer sums over all ranks."""
        ranks = self.mesh.world_size // self.mesh.data_world_size
        return inputs.counts["megaflops"] * 1e6 / ranks if isinstance(inputs, Step) else 0.0

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What a callback of one rank asks for, all do: the others would wait for it for ever."""
        asked = [int(getattr(self.control, name)) for name in CONTROLS]
        of_ranks = gather_ints(self.mesh.cpu_group, asked)
        for name, values in zip(CONTROLS, zip(*of_ranks, strict=True), strict=True):
            setattr(self.control, name, any(values))
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # Evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The mean loss per label token of the whole data set, and metrics of its log-probabilities."""
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        self.braided.eval()
        self.callback_handler.eval_dataloader = dataloader
        found = run_through(self.braided, dataloader, not prediction_loss_only, self._after_prediction)
        if not found.labels:
            raise ValueError(f"the data set of {metric_key_prefix!r} has no label token")
        scores, labels = (None, None) if prediction_loss_only else found.arrays()
        metrics: dict[str, Any] = {}
        if self.compute_metrics is not None and scores is not None:
            metrics = self.compute_metrics(EvalPrediction(predictions=scores, label_ids=labels))
        metrics = denumpify_detensorize(metrics) | {"loss": found.loss_sum / found.labels}
        metrics["mean_token_accuracy"] = found.correct / found.labels
        prefix = f"{metric_key_prefix}_"
        return EvalLoopOutput(
            predictions=scores,
            label_ids=labels,
            metrics={name if name.startswith(prefix) else prefix + name: x for name, x in metrics.items()},
            num_samples=found.num_samples,
        )

    def _after_prediction(self) -> None:
        self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    # Checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A stock checkpoint, or peft's, and tokenizer or processor beside it; all ranks call it."""
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        save_weights(self.braided, folder, lambda path: save_beside(path, processor, self.args))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._state.save(Path(output_dir), self.state.global_step, stock_optimizer(self.optimizer))
        with raised_by_all(self.mesh.cpu_group):
            if self.mesh.rank == 0:
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Together with the optimizer's, once there is one."""
        self._state.check(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with raised_by_all(self.mesh.cpu_group):
                scheduler = read_beside(Path(checkpoint) / SCHEDULER)
            self._state.load(Path(checkpoint), stock_optimizer(self.optimizer))
            self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        self._state.load(Path(self.state.best_model_checkpoint), None)


UNSUPPORTED = {
    "model_init": "the model is on the mesh before the trainer is made; pass model=",
    "compute_loss_func": "it takes logits, which never exist as a whole; pass loss=, a sum of "
    "log-probabilities (see seqbraid.forward_backward)",
    "preprocess_logits_for_metrics": "compute_metrics is given log-probabilities of labels, not logits",
}

"""Pre-tokenized records: `input_ids`, with `labels` or masks as TRL, axolotl and `Trainer` keep them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .known_keys import known_keys
from .plain_json import show

MASKS = ("completion_mask", "assistant_masks")
"""1 where the loss covers a token; with several of them, where all have 1."""
OPTIONAL = ("labels", *MASKS, "attention_mask", "position_ids")
KEYS = ("input_ids", *OPTIONAL)

UNLABELLED = -100
LARGEST = 2**31


@dataclass(frozen=True)
class Tokens:
    """Ids and labels; a label is its own token's id, or −100."""

    ids_T: NDArray[np.int64]
    labels_T: NDArray[np.int64]
    all_labelled: bool
    """Every token is a label, as of a document."""


def parse_tokens(record: Mapping[str, Any], ignored: Collection[str] = ()) -> Tokens:
    """The tokens of a record.

    >>> parse_tokens({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}).labels_T.tolist()
    [-100, 6, 7]
    """
    said = {"input_ids": record["input_ids"]} | known_keys(record, KEYS, ignored, "the record")
    columns = {key: _integers(said[key], key) for key in KEYS if key in said}
    ids_T = columns["input_ids"]
    if not len(ids_T):
        raise ValueError("input_ids is empty, so there is nothing to train on; leave the record out")
    for key, column in columns.items():
        if len(column) != len(ids_T):
            raise ValueError(f"{key} has {len(column)} entries, input_ids {len(ids_T)}; give one for each")
    labels_T = ids_T.copy()
    if "labels" in columns:
        labels_T = columns["labels"]
        _check_labels(ids_T, labels_T)
    for key in MASKS:
        if key in columns:
            _check_values(columns[key], (0, 1), key)
            labels_T = np.where(columns[key] == 1, labels_T, UNLABELLED)
    if "attention_mask" in columns and not columns["attention_mask"].all():
        place = int(np.argmin(columns["attention_mask"] != 0))
        raise ValueError(
            f"attention_mask[{place}] is 0; records are packed without padding, so leave the padding out"
        )
    if "position_ids" in columns:
        _check_positions(columns["position_ids"])
    if not (labels_T[1:] != UNLABELLED).any():  # nothing comes before the first token that could predict it
        raise ValueError("no token after the first has a label, so there is nothing to train on")
    return Tokens(ids_T, labels_T, bool((labels_T == ids_T).all()))


def _integers(values: Any, key: str) -> NDArray[np.int64]:
    if not isinstance(values, list):
        nested = "; decode it first" if isinstance(values, str) else ""
        raise ValueError(f"{key} is a list of integers, not {show(values)}{nested}")
    for place, value in enumerate(values):
        if type(value) is not int or not -LARGEST <= value < LARGEST:
            what = "; give one record for each sequence" if isinstance(value, list) else ""
            raise ValueError(f"{key}[{place}] is an integer, not {show(value)}{what}")
    return np.asarray(values, np.int64)


def _check_values(column: NDArray[np.int64], valid: tuple[int, ...], key: str) -> None:
    wrong = np.flatnonzero(~np.isin(column, valid))
    if len(wrong):
        raise ValueError(f"{key}[{wrong[0]}] is {column[wrong[0]]}; valid are {', '.join(map(str, valid))}")


def _check_labels(ids_T: NDArray[np.int64], labels_T: NDArray[np.int64]) -> None:
    """Refuse labels that are other tokens than those at their place, above all shifted ones."""
    wrong = np.flatnonzero((labels_T != UNLABELLED) & (labels_T != ids_T))
    if not len(wrong):
        return
    place = wrong[0]
    ahead = labels_T[:-1] != UNLABELLED
    shifted = bool(ahead.any() and (labels_T[:-1] == ids_T[1:])[ahead].all())
    hint = "; they are shifted by one, which is done here: shift them back" if shifted else ""
    raise ValueError(
        f"labels[{place}] is {labels_T[place]}, but input_ids[{place}] is {ids_T[place]}; a label is the id "
        f"of its own token, or {UNLABELLED} where there is no loss{hint}"
    )


def _check_positions(positions_T: NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(positions_T != np.arange(len(positions_T)))
    if len(wrong):
        place = wrong[0]
        packed = place and not positions_T[place]
        raise ValueError(
            f"position_ids[{place}] is {positions_T[place]}, not {place}; positions are counted from 0 in "
            "each sample"
            + (", and this record seems to hold several: give each of them as a record" if packed else "")
        )

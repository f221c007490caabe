"""The plans of all ranks fit together, and bring each segment the state and the tokens before it."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqbraid import SequenceLayout
from seqbraid.layout.layout import Segment
from seqbraid.sequence_parallel.chain import ChainPlan, ScanPlan
from seqbraid.sequence_parallel.gated_delta import _scan

LAYOUTS = {
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=8),
    "ring": st.integers(1, 4),
    "ulysses": st.integers(1, 3),
    "policy": st.sampled_from(["contiguous", "zigzag", "balanced"]),
}


def plans_of(layout: SequenceLayout) -> list[ChainPlan]:
    return [ChainPlan.of(layout, rank) for rank in range(layout.num_ranks)]


def chain_of(layout: SequenceLayout, sequence: int) -> list[Segment]:
    found = [s for rank in range(layout.num_ranks) for s in layout.segments(rank) if s.sequence == sequence]
    return sorted(found, key=lambda s: s.start)


def delivered(values: list[Tensor], rows: list[Tensor], send: list[list[int]], rank: int) -> Tensor:
    """What all ranks send to one, in rank order."""
    return torch.cat([x[r].split(n)[rank] for x, r, n in zip(values, rows, send, strict=True)])


def entering(
    layout: SequenceLayout, scans: list[ScanPlan], M: dict[Segment, int], S0: dict[Segment, int]
) -> dict[Segment, float]:
    """For each segment that is entered: its state, by the exchange and the scan of its rank."""
    told_M, told_S0 = [], []
    for rank, scan in enumerate(scans):
        own = layout.segments(rank)
        told_M.append(torch.tensor([M[own[i]] for i in scan.others], dtype=torch.float64))
        told_S0.append(torch.tensor([S0[own[i]] for i in (*scan.firsts, *scan.others)], dtype=torch.float64))
    found = {}
    for rank, scan in enumerate(scans):
        send_S0, send_M = ([[n[i] for n in s.send] for s in scans] for i in (0, 1))
        heard_S0 = delivered(told_S0, [s.S0_sent for s in scans], send_S0, rank)
        heard_M = delivered(told_M, [s.M_sent for s in scans], send_M, rank)
        states = _scan(heard_M.view(-1, 1, 1, 1), heard_S0.view(-1, 1, 1, 1), scan)
        for i, state in zip(scan.entered.tolist(), states.flatten().tolist(), strict=True):
            found[layout.segments(rank)[i]] = state
    return found


@settings(max_examples=150, deadline=None)
@given(**LAYOUTS)
def test_scans_follow_the_sequence(lengths: list[int], ring: int, ulysses: int, policy: str) -> None:
    """With signs for M and powers of two for S0: every mistake in the order shows, and sums are exact."""
    layout = SequenceLayout(lengths, ring, ulysses, policy)
    plans = plans_of(layout)
    chains = [chain_of(layout, sequence) for sequence in range(len(lengths))]
    place = {segment: i for chain in chains for i, segment in enumerate(chain)}
    M = {segment: -1 if i % 3 == 1 else 1 for segment, i in place.items()}
    S0 = {segment: 2**i for segment, i in place.items()}
    for reverse in (False, True):
        scans = [plan.backward if reverse else plan.forward for plan in plans]
        expected = {}
        for chain in chains:
            state = 0
            for before, segment in pairwise(chain[::-1] if reverse else chain):
                state = M[before] * state + S0[before]
                expected[segment] = state
        assert entering(layout, scans, M, S0) == expected
        for rank, scan in enumerate(scans):
            assert list(scan.receive) == [other.send[rank] for other in scans]
            assert scan.others == plans[rank].forward.others
        talks = any(n != (0, 0) for r, s in enumerate(scans) for peer, n in enumerate(s.send) if peer != r)
        assert all(scan.is_local != talks for scan in scans)


@settings(max_examples=150, deadline=None)
@given(**LAYOUTS, width=st.integers(1, 6))
def test_halos_are_the_tokens_before(
    lengths: list[int], ring: int, ulysses: int, policy: str, width: int
) -> None:
    layout = SequenceLayout(lengths, ring, ulysses, policy)
    plans = plans_of(layout)
    halos = [plan.halo(width) for plan in plans]
    # Each token stands for itself; padding is −1.
    shards = [plan.compact(layout.index(rank)) for rank, plan in enumerate(plans)]
    talks = False
    for rank, (plan, halo) in enumerate(zip(plans, halos, strict=True)):
        arrived = delivered(shards, [h.rows.rows for h in halos], [list(h.rows.send) for h in halos], rank)
        assert list(halo.rows.receive) == [h.rows.send[rank] for h in halos]
        talks |= sum(halo.rows.receive) > halo.rows.receive[rank]
        segments = layout.segments(rank)
        got = torch.full((len(segments) * (width - 1),), -1).index_copy(0, halo.places, arrived)
        expected = [
            layout.cu_seqlens[s.sequence] + t if t >= 0 else -1
            for s in segments
            for t in range(s.start - width + 1, s.start)
        ]
        assert got.tolist() == expected
        assert plan.halo(width) is halo
    assert all(halo.rows.is_local != talks for halo in halos)


@settings(max_examples=100, deadline=None)
@given(**LAYOUTS, multiple_of=st.integers(1, 7))
def test_compact_leaves_padding_out(
    lengths: list[int], ring: int, ulysses: int, policy: str, multiple_of: int
) -> None:
    layout = SequenceLayout(lengths, ring, ulysses, policy, multiple_of)
    for rank, plan in enumerate(plans_of(layout)):
        index = layout.index(rank)
        tokens = plan.compact(index)
        assert tokens.tolist() == index[index >= 0].tolist()
        begins = [layout.cu_seqlens[s.sequence] + s.start for s in layout.segments(rank)]
        assert tokens[list(plan.cu[:-1])].tolist() == begins and plan.cu[-1] == len(tokens)
        spread = plan.spread(torch.stack([tokens, tokens], dim=1) + 1)
        assert spread.tolist() == [[token + 1] * 2 for token in index.tolist()]

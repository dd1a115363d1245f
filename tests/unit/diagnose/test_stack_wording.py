"""Groups of ranks in words, the same ones for every channel."""

from __future__ import annotations

import pytest

from slurm_watchdog.diagnose.stacks.sentences import group_words
from slurm_watchdog.diagnose.stacks.vote import VoteGroup
from slurm_watchdog.knowledge.stack_frames import Place


@pytest.mark.parametrize(
    ("place", "ranks", "words"),
    [
        (Place.BACKWARD, (1,), "1 rank is in the backward pass"),
        (Place.BACKWARD, (1, 3), "2 ranks are in the backward pass"),
        (Place.DATALOADER, (2,), "1 rank waits for its data loader"),
        (Place.DATALOADER, (2, 3), "2 ranks wait for their data loader"),
        (Place.OTHER, (0,), "1 rank runs"),
        (Place.OTHER, (0, 1), "2 ranks run"),
    ],
)
def test_a_group_is_told_in_the_number_that_it_has(place: Place, ranks: tuple[int, ...], words: str) -> None:
    assert group_words(VoteGroup(place=place, frames=("f (a.py)",), ranks=ranks, nodes=("n1",))) == words


@pytest.mark.parametrize("place", list(Place))
def test_every_place_makes_a_sentence_of_one_rank_and_of_several(place: Place) -> None:
    one, two = (group_words(VoteGroup(place=place, frames=(), ranks=r, nodes=("n1",))) for r in ((0,), (0, 1)))
    verbs = {one.split()[2], two.split()[2]}
    assert verbs == {"is", "are"} or {v.rstrip("s") for v in verbs} == {two.split()[2].rstrip("s")}
    assert "elsewhere" not in one and "its " not in two


def test_the_nodes_of_a_group_stand_beside_its_ranks() -> None:
    group = VoteGroup(place=Place.COLLECTIVE, frames=(), ranks=tuple(range(8)), nodes=("n1", "n2"))
    assert group_words(group, nodes=True) == ("8 ranks (0, 1, 2, 3, 4, 5, … 8 in all on n1, n2) wait in a collective")

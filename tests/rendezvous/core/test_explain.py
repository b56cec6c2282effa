"""The loss of a node is explained in one sentence, with the figures that an operator needs."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core.facts import explain_loss
from rallypoint.rendezvous.core.state import LossReason, RunSettings


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (LossReason.LEASE_EXPIRED, "no heartbeat for 15 s (3 missed, one every 5 s)"),
        (LossReason.DISCONNECTED, "its connection broke and it did not come back within 2 s"),
        (LossReason.SUPERSEDED, "an agent joined again under its name"),
        (LossReason.CONFIRM_TIMED_OUT, "it did not confirm the round within 60 s"),
        (LossReason.DEPARTURE_TIMED_OUT, "it announced that it would leave and did not within 60 s"),
        (LossReason.JOIN_TIMED_OUT, "fewer than 4 nodes were there after 600 s"),
    ],
)
def test_the_sentence_names_node_reason_and_figures(reason: LossReason, sentence: str) -> None:
    """The figures are the settings of the run."""
    assert explain_loss("n7", reason, RunSettings(min_nodes=4)) == f"node n7 was lost: {sentence}"


def test_every_reason_has_a_sentence() -> None:
    """Names with braces in them are only names."""
    for reason in LossReason:
        assert explain_loss("{s}", reason, RunSettings()).startswith("node {s} was lost: ")

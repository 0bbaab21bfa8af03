"""Half of the places for each of two learned scores: of what questions look at, and of what a
second reading of the same text looks at."""

from . import learned
from .score import Composition


class _OfPassages(learned.Score):
    learns = ("passage_keep_weight",)


class Score(Composition):
    """The second half chooses among what the first has left."""

    keep_score = "two_learned"
    parts = (learned.Score(), _OfPassages())

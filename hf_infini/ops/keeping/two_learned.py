"""Half of the places for each of two learned scores: of what questions look at, and of what a
second reading of the same text looks at."""

from .learned import Score as Learned
from .score import Composition


class _OfPassages(Learned):
    learns = ("passage_keep_weight",)


class Score(Composition):
    """The second half chooses among what the first has left."""

    keep_score = "two_learned"
    parts = (Learned(), _OfPassages())

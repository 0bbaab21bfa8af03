"""Three quarters of the places by what questions look at, a quarter by what a second reading of the
same text looks at: two learned scores."""

from .learned import Score as Learned
from .score import Composition


class _OfPassages(Learned):
    learns = ("passage_keep_weight",)


class Score(Composition):
    """The second chooses among what the first has left. With half of the places for each, single
    facts are lost."""

    keep_score = "two_learned"
    parts = (Learned(), _OfPassages())
    portions = (3, 1)

"""Half of the places for the tokens that received most attention, half for those with the highest
learned score."""

from .attention import Score as Attention
from .learned import Score as Learned
from .score import Composition


class Score(Composition):
    """The second half chooses among what the first has left."""

    keep_score = "half"
    parts = (Attention(), Learned())

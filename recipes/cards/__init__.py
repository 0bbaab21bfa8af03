"""Model cards: a run's files read, checked and told as Markdown, section by section."""

from .card import write_card
from .run import Run, Stage

__all__ = ["Run", "Stage", "write_card"]

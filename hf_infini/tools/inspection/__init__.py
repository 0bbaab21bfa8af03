"""Inside a model: what each head did with a text, as named tensors and tables, and as a page of HTML."""

from .heads import Inspection, LayerInspection, NamedTensor, Prediction
from .parts import FATES
from .run import inspect_attention

__all__ = ["FATES", "Inspection", "LayerInspection", "NamedTensor", "Prediction", "inspect_attention"]

"""Inside a model: what each head did with a text, as named tensors and tables, and as a page of HTML."""

from .heads import Inspection, LayerInspection, NamedTensor, inspect_attention
from .predictions import Prediction

__all__ = ["Inspection", "LayerInspection", "NamedTensor", "Prediction", "inspect_attention"]

"""Inside a model: what each head did with a text, as named tensors and tables, and as a page of HTML."""

from .heads import Inspection, LayerInspection, NamedTensor, Prediction
from .run import inspect_attention

__all__ = ["Inspection", "LayerInspection", "NamedTensor", "Prediction", "inspect_attention"]

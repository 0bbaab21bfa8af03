"""Inside a model: what each head did with a text, as named tensors and tables, and as a page of
HTML."""

from .heads import FATES, Inspection, LayerInspection
from .page import inspection_page
from .run import inspect_attention

__all__ = ["FATES", "Inspection", "LayerInspection", "inspect_attention", "inspection_page"]

"""Training: the Trainer, the optimiser's parameter groups, and the gates. Its data collator is `rows.RowReader`."""

from .trainer import PerplexityTrainer, PushWithCode, gate_values, parameter_groups

__all__ = ["PerplexityTrainer", "PushWithCode", "gate_values", "parameter_groups"]

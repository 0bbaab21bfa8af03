"""What `recipes/train.py` is made of: the Trainer and its options, the run's folder, and the largest batch that fits."""

from .trainer import PerplexityTrainer, gate_values, parameter_groups

__all__ = ["PerplexityTrainer", "gate_values", "parameter_groups"]

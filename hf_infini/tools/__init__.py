"""What is used beside a model: training, metrics, lm-eval, inspection, one text over several devices.
Nothing below imports it."""

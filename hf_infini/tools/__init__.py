"""What is used beside a model: parameter groups, lm-eval, inspection, one text over several devices.
Nothing below imports it."""

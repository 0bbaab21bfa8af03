"""What is used beside a model: parameter groups, lm-eval, inspection, reading, one text over
several devices."""

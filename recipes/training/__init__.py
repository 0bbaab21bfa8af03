"""What `recipes/train.py` needs around the Trainer: data, the run's folder, dilution, what it says."""

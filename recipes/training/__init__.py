"""What `recipes/train.py` is made of: its Trainer, data, the run's folder, dilution, what it
says."""

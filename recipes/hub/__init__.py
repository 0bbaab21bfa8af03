"""A run's way to the Hugging Face Hub: which files go, what must be right in them, and the one commit that sends them."""

"""How good a trained model is: loading it, its perplexity, and intervals of it."""

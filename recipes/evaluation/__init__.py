"""How good a trained model is: loading it, its losses and perplexity, and intervals of it."""

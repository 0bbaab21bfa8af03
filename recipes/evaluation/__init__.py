"""How good a trained model is: loading it, its perplexity, intervals of it, and what n-grams reach on the same rows."""

"""What a model keeps between two calls: the cache of `generate()`, the text that it has read, and
memory files."""

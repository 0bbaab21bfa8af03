"""Whether a model recalls what it has read: documents that ask for it, rows that train it, and
tasks that measure it."""

"""How fast the attention and the models are, and how much memory they take, beside what else one
could use.

recipes/benchmark.py runs it; nothing else imports it.
"""

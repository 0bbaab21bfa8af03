"""Workarounds for transformers, accelerate, PEFT and the Hub: one file each, with the version that
makes it needless."""

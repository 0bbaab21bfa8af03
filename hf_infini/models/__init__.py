"""All families of decoders, patching a loaded model and back, the from-scratch model, generation,
adapters."""

"""The from-scratch model: causal multi-head attention with the classic scores and position encodings, without
attention, or with a memory."""

"""The from-scratch model: causal attention with the classic scores and positions, without
attention, or with a memory."""

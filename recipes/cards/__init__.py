"""Model cards: the numbers of a run as a card, and the folder that holds it with the model."""

"""Model cards: the numbers of a run as a card, the folder that holds it with the model, and that folder's way to the Hub."""

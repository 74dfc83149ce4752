"""How commands with a Hydra configuration start, and what two of them share."""

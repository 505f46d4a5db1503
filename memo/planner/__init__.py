"""Plans made before training, from artifacts alone: what moves, when, and where it lies. No torch."""

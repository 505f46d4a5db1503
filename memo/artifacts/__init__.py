"""What the stages hand to each other: frozen dataclasses with a JSON file of their own. No torch."""

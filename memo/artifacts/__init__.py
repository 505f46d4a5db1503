"""The artifacts that one command writes for another: frozen dataclasses, each with a JSON file. No torch."""

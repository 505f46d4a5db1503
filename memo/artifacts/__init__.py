"""The artifacts that one stage writes for another: frozen dataclasses, each with a JSON file. No torch."""

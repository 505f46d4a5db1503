"""Drawings, pages and traces for people, made from artifacts."""

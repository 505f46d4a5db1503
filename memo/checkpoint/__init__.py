"""Training state on disk, independent of the layout that wrote it."""

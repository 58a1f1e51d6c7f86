"""Training data: corpora with captions, labels and splits, views for the auditor, pairs for the inpainter."""

"""Training: one short file per component on one small engine."""

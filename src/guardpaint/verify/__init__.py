"""Verify: score the candidates, gate them, pick a winner or keep the control."""

"""Reinsert: put the accepted repair back into the live trajectory, only inside the feathered mask."""

"""Defences under one interface: GuardPaint and everything it is compared with, one small file each."""

"""Measuring: judges, suites, defences, reports. Nothing here is part of the guard, and the guard imports none of it."""

"""For tests, yours included: predictable doubles and small random-initialised instances of the real classes."""
